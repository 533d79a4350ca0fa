"""Algorithms in a user's own file or module: found, checked, saved, and sent to other processes."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from conftest import MakeConfig
from hacrl.algorithms import GSPO
from hacrl.config import RunConfig, parse_algorithm
from hacrl.config.study import StudyConfig
from hacrl.errors import UserError
from hacrl.run import resumed_config, train
from hacrl.study.grid import Study
from hacrl.training.run_dir import RunDir, read_jsonl

MINE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hacrl.algorithms import GSPO, Algorithm


@dataclass(frozen=True)
class Mine(GSPO):
    scale: float = 1.0
    sides: Literal["both", "one"] = "both"
    known: ClassVar[int] = 3

    def advantages(self, *args):
        found = super().advantages(*args)
        return type(found)(self.scale * found.advantage_N, found.baseline_N)


class Undecorated(GSPO):
    scale: float = 1.0


class NoTerms(Algorithm):
    pass


@dataclass(frozen=True, kw_only=True)
class NoDefault(GSPO):
    scale: float


@dataclass(frozen=True)
class Picky(GSPO):
    def __post_init__(self):
        raise TypeError("no way")


@dataclass(frozen=True)
class Typo(GSPO):
    scale: Floot = 1.0


@dataclass(frozen=True)
class Odd(GSPO):
    scale: "object.__subclasshook__" = None


SETTING = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with my.py in it."""
    (tmp_path / "my.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("import json\n\nSETTING = json.loads('{')\n")
    (tmp_path / "leaves.py").write_text("import sys\n\nsys.exit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_class_in_a_file(folder: Path) -> None:
    algorithm: Any = parse_algorithm({"name": "my.py:Mine", "scale": 2, "imitation": {"when": "end"}})
    assert algorithm.name == f"{folder}/my.py:Mine"
    assert isinstance(algorithm, GSPO)
    assert (algorithm.scale, algorithm.sides, algorithm.imitation.when) == (2.0, "both", "end")
    assert parse_algorithm(dataclasses.asdict(algorithm)) == algorithm


def test_a_class_in_a_module_of_the_working_directory(folder: Path) -> None:
    (folder / "mine_in_a_module.py").write_text(MINE)
    algorithm: Any = parse_algorithm({"name": "mine_in_a_module:Mine", "scale": 2})
    assert (algorithm.name, algorithm.scale) == ("mine_in_a_module:Mine", 2.0)


@dataclasses.dataclass(frozen=True)
class Given(GSPO):
    scale: float = 1.0


def test_an_instance_given_from_python_can_be_read_back(make_config: MakeConfig) -> None:
    config = make_config(algorithm=Given(scale=3.0))
    assert config.algorithm.name == f"{__name__}:Given", "not gspo, which it inherits"
    assert RunConfig.from_dict(yaml.safe_load(config.to_yaml())) == config
    assert make_config(algorithm=GSPO()).algorithm.name == "gspo"


def test_a_changed_file_is_read_again(folder: Path) -> None:
    parse_algorithm({"name": "my.py:Mine"})
    (folder / "my.py").write_text(MINE.replace("scale: float = 1.0", "scale: float = 5.0"))
    changed: Any = parse_algorithm({"name": "my.py:Mine"})
    assert changed.scale == 5.0


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "my.py"}, "name: unknown algorithm 'my.py'; write my.py:CLASS"),
        ({"name": "gone.py:Mine"}, "name: gone.py:Mine does not exist: there is no file {folder}/gone.py"),
        ({"name": "gone:Mine"}, "there is no module gone, neither installed nor in {folder}; for a file elsewhere"),
        ({"name": "~no-such-user/my.py:Mine"}, "does not exist: there is no file {folder}/~no-such-user/my.py"),
        ({"name": "\0.py:Mine"}, "does not exist: there is no file"),
        ({"name": "x" * 300 + ".py:Mine"}, "File name too long"),
        ({"name": "my.py:Nine"}, "the algorithms of my.py are Mine, Undecorated, NoTerms, NoDefault, Picky, Typo, Odd"),
        ({"name": "my.py:dataclass"}, "a value of type function, which is not a subclass of hacrl.algorithms"),
        ({"name": "my.py:SETTING"}, "is a value of type int, which is not a subclass"),
        ({"name": "my.py:GSPO"}, "my.py:GSPO is built in: write gspo"),
        ({"name": "my.py:NoTerms"}, "my.py:NoTerms lacks the method terms"),
        ({"name": "my.py:Undecorated"}, "scale is not an option yet; write @dataclass(frozen=True) above the class"),
        ({"name": "my.py:NoDefault"}, "my.py:NoDefault: the option scale needs a default"),
        ({"name": "my.py:Picky"}, "my.py:Picky refuses its own defaults: TypeError: no way"),
        ({"name": "my.py:Typo"}, "a type of its options is unknown: name 'Floot' is not defined"),
        ({"name": "my.py:Odd"}, "my.py:Odd has an option of another type; options are numbers, texts, lists and"),
        ({"name": "broken.py:Mine"}, "broken.py:Mine cannot be loaded: JSONDecodeError: "),
        ({"name": "broken.py:Mine"}, "({folder}/broken.py:3)"),
        ({"name": "leaves.py:Mine"}, "leaves.py:Mine cannot be loaded: SystemExit: 3 ({folder}/leaves.py:3)"),
        ({"name": "my.py:Mine", "scael": 2}, "my.py:Mine has no option 'scael' (set to 2); did you mean scale?"),
        ({"name": "my.py:Mine", "scale": "big"}, "scale: expected a number"),
        ({"name": "my.py:Mine", "scale": True}, "my.py:Mine: scale is a number, not true"),
        ({"name": "my.py:Mine", "sides": "two"}, "sides: expected 'both' or 'one' (got 'two')"),
        ({"name": "my.py:Mine", "scale": -1}, "scale must lie between 0 and 1,000,000,000, but is -1"),
    ],
)
def test_mistakes_get_one_sentence(folder: Path, make_config: MakeConfig, section: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        make_config(algorithm=section)
    message = str(error.value)
    assert message.startswith("config: algorithm: ")
    assert said.format(folder=folder) in message
    assert "\n" not in message


def test_it_can_be_sent_to_a_process_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (folder / "sent_as_a_module.py").write_text(MINE)
    sent = [parse_algorithm({"name": f"{file}:Mine", "scale": 2}) for file in ("my.py", "sent_as_a_module")]
    script = "import pickle, sys; print([(a.name, a.scale) for a in pickle.load(sys.stdin.buffer)])"
    command, elsewhere = [sys.executable, "-c", script], tmp_path_factory.mktemp("elsewhere")
    answer = subprocess.run(command, input=pickle.dumps(sent), cwd=elsewhere, stdout=subprocess.PIPE, check=True)
    assert answer.stdout.decode().strip() == str([(f"{folder}/my.py:Mine", 2.0), ("sent_as_a_module:Mine", 2.0)])


def test_a_run_is_resumed_from_elsewhere(
    folder: Path, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = {"name": "my.py:Mine", "scale": 0.0, "beta": 0.0}
    run = RunDir(train(make_config(algorithm=section, max_steps=1, log_kl=False, trace=True)).run_dir)
    assert yaml.safe_load(run.config_file.read_text())["algorithm"]["name"] == f"{folder}/my.py:Mine"
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    train(resumed_config(run.path, ["max_steps=2"]), resume=True)
    assert [line["step"] for line in run.metrics()] == [0, 1, 2]
    trace = [line for step in (1, 2) for line in read_jsonl(run.step_file("trace", step))]
    assert trace
    assert {line["advantage"] for line in trace} == {0.0}, "scale is 0"


def test_a_run_in_several_processes(folder: Path, make_config: MakeConfig) -> None:
    agents = [{"id": "a", "model": "zoo:llama-plus", "fsdp": 2, "device": "cpu"}]
    result = train(make_config(algorithm={"name": "my.py:Mine"}, agents=agents, max_steps=1))
    assert result.summary["algorithm"] == f"{folder}/my.py:Mine"


def test_a_study_compares_it(folder: Path, make_config: MakeConfig) -> None:
    data = {
        "name": "s",
        "base": make_config(algorithm={"name": "gspo"}).to_dict(),
        "algorithms": {"gspo": {}, "mine": {"algorithm.name": "my.py:Mine", "algorithm.scale": 2.0}},
    }
    for section in ("seed", "output_dir"):
        del data["base"][section]
    config = StudyConfig.from_dict(data)
    assert f"algorithm.name: {folder}/my.py:Mine" in config.to_yaml(), "its folder is continued from anywhere"
    nested = StudyConfig.from_dict({**data, "algorithms": {"mine": {"algorithm": {"name": "my.py:Mine", "scale": 2}}}})
    assert nested.algorithms["mine"]["algorithm"] == {"name": f"{folder}/my.py:Mine", "scale": 2}
    study = Study.build(config)
    mine = study.groups["main", "mine"][0].config
    assert mine.algorithm == parse_algorithm({"name": "my.py:Mine", "scale": 2.0})
    assert RunConfig.from_dict(yaml.safe_load(mine.to_yaml())) == mine
    with pytest.raises(UserError, match=r"write \{LABEL: \{algorithm.name: my.py:Mine\}\}"):
        StudyConfig.from_dict({**data, "algorithms": ["gspo", "my.py:Mine"]})


def test_the_example_leaves_out_help_that_is_not_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    overrides = ["max_steps=1", "prompts_per_step=4", "rollouts_per_update=32", "task.eval_size=8", "trace=true"]
    config = RunConfig.load("examples/own_algorithm/run.yaml", [*overrides, f"output_dir={tmp_path}/run"])
    assert train(config).summary["algorithm"] == f"{root}/examples/own_algorithm/helped.py:Helped"
    # Two prompts, two right answers to each by either agent; the learner (0) has solved the first prompt itself.
    rewards_N, prompt_N = torch.tensor([1.0, 1, 1, 0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    source_N = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    given = config.algorithm.advantages(rewards_N, prompt_N, source_N, 0, torch.ones(2, 2, dtype=torch.float64))
    assert given.advantage_N[:4].tolist() == [0, 0, 0, 0]
    assert (given.advantage_N[6:] > 0).all()
