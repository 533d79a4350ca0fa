"""`hacrl.train` with Python objects: what it takes, what it returns, how its runs are continued, what it refuses."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import nbformat
import pandas
import pytest
from datasets import Dataset, DatasetDict
from nbclient import NotebookClient
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import hacrl
from conftest import FAST
from hacrl.algorithms import GSPO
from hacrl.api import config_of
from hacrl.config import RunConfig
from hacrl.errors import UserError
from hacrl.run import RunResult
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.run_dir import RunDir
from integration.test_resume import assert_equal_runs, without_times

SMALL: dict[str, Any] = {
    "algorithm": {"name": "hacpo_robust", "imitation": {"when": "never"}},  # a run can be lengthened
    "prompts_per_step": 4,
    "rollouts_per_update": 16,
    "num_generations": 4,
    "max_prompt_length": 32,
    "max_completion_length": 40,
    "learning_rate": 1e-4,
    "eval_every": 2,
    "save_every": 2,
    "max_steps": 3,
    "fast": FAST,
}
AGENTS = ["zoo:llama-plus", {"id": "neox", "model": "zoo:neox-pair", "learning_rate": 5e-5}]
ARITHMETIC = ArithmeticTask(seed=3)
ROWS = [{"prompt": problem.prompt, "answer": problem.answer} for problem in ARITHMETIC.train(0, 24)]
HELDOUT = [{"prompt": problem.prompt, "answer": problem.answer} for problem in ARITHMETIC.heldout("test", 8)]


def rewards() -> list[Any]:
    """A function of its own module, and a closure with a weight."""
    mark, most = "#", 30

    def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [float(text.rpartition(mark)[2] == gold) for text, gold in zip(completions, answer, strict=True)]

    return [right, (lambda completions, **columns: [float(len(text) < most) for text in completions], 0.25)]


def train(output_dir: Path, **changes: Any) -> RunResult:
    given = {"agents": AGENTS, "train": ROWS, "eval": Dataset.from_list(HELDOUT), "reward": rewards()}
    return hacrl.train(**{**given, **SMALL, "output_dir": output_dir, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return train(tmp_path_factory.mktemp("api") / "run")


# --- what it returns -------------------------------------------------------------------------------


def test_the_result(run: RunResult) -> None:
    metrics = run.metrics()
    assert isinstance(metrics, pandas.DataFrame)
    assert list(metrics["step"]) == [0, 1, 2, 3]
    assert run.summary["steps"] == 3
    assert list(run.agents) == ["llama-plus", "neox"]
    agent = run.agents["neox"]
    assert agent.summary == run.summary["agents"]["neox"]
    assert agent.summary["final_accuracy"] == metrics["neox/eval_accuracy"].iloc[-1]
    assert agent.model_dir == run.run_dir / "checkpoint-3" / "agents" / "neox"
    assert AutoModelForCausalLM.from_pretrained(agent.model_dir).num_parameters() > 0
    assert AutoTokenizer.from_pretrained(agent.model_dir)("1+1=")["input_ids"]


def test_rewards_are_those_of_the_functions(run: RunResult) -> None:
    lines = [json.loads(line) for line in (run.run_dir / "rollouts" / "step-000001.jsonl").open()]
    for line in lines:
        right = float(line["text"].rpartition("#")[2] == {row["prompt"]: row["answer"] for row in ROWS}[line["prompt"]])
        assert line["reward_parts"] == {"right": right, "lambda": float(len(line["text"]) < 30)}
        assert line["reward"] == right + 0.25 * line["reward_parts"]["lambda"]
    assert {line["reward_parts"]["right"] for line in lines} == {0.0, 1.0}


def test_the_final_table_says_what_was_wrong(tmp_path: Path) -> None:
    console = Console(file=StringIO(), width=500)
    changes = {"reward": lambda completions, **columns: [0.5] * len(completions), "max_steps": 1, "eval": None}
    train(tmp_path / "run", console=console, **changes)
    said = console.file.getvalue()
    assert "hacpo_robust, 1 steps" in said
    for agent in ("llama-plus", "neox"):
        assert (
            f"note In the only step every rollout of agent {agent} had the reward 0.5, so it learned nothing." in said
        )
    hacrl.train(tmp_path / "run", resume=True, console=console)
    assert "is already finished: 1 steps. Nothing to do.\n" in console.file.getvalue().removeprefix(said)


def test_metrics_without_pandas(run: RunResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run.metrics() == RunDir(run.run_dir).metrics()


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    result = train(tmp_path / "run", max_steps=1, save_every=0, save_final=False)
    with pytest.raises(
        UserError, match=r"saved no checkpoint, so there is no trained model of neox\. Train with save_f"
    ):
        _ = result.agents["neox"].model_dir


def test_a_trained_model_is_an_agent(run: RunResult, tmp_path: Path) -> None:
    folders = [agent.model_dir for agent in run.agents.values()]
    result = train(tmp_path / "next", agents=[folders[0], {"model": folders[1]}], max_steps=1)
    assert list(result.agents) == ["llama-plus", "neox"]


# --- what it takes ---------------------------------------------------------------------------------


def config(source: Any = None, **settings: Any) -> RunConfig:
    """The config of a call of `hacrl.train`."""
    given = {name: settings.pop(name) for name in ("train", "eval", "reward") if name in settings}
    return config_of(source, given, settings, resume=False)


def test_agents_get_ids_from_their_models() -> None:
    models = ["org/Qwen3-0.6B", {"id": "qwen3-0.6b", "model": "zoo:tiny"}, {"model": "other/qwen3-0.6B"}, Path("a/B c")]
    agents = config(agents=models, task={"name": "arithmetic"}).agents
    assert [agent.id for agent in agents] == ["qwen3-0.6b-2", "qwen3-0.6b", "qwen3-0.6b-3", "b-c"]
    assert [agent.model for agent in agents] == ["org/Qwen3-0.6B", "zoo:tiny", "other/qwen3-0.6B", "a/B c"]
    again = RunConfig.load({"agents": models, "task": {"name": "arithmetic"}}, ["seed=4"])
    assert again.agents == agents
    assert again.seed == 4


def test_settings_replace_those_of_a_source(tmp_path: Path) -> None:
    data = {"agents": AGENTS, "task": {"name": "arithmetic", "eval_size": 5}, "learning_rate": 1e-3}
    whole = RunConfig.load(data)
    (tmp_path / "run.yaml").write_text(whole.to_yaml())
    for source in (data, whole, str(tmp_path / "run.yaml"), tmp_path / "run.yaml"):
        assert config(source) == whole
        changed = config(source, learning_rate=1e-5, algorithm="gspo", output_dir=tmp_path)
        for algorithm in (GSPO(), GSPO):
            assert changed.algorithm == config(source, algorithm=algorithm).algorithm == GSPO()
        assert [agent.learning_rate for agent in changed.agents] == [1e-5, 5e-5]
        assert changed.output_dir == str(tmp_path)
        with pytest.raises(UserError, match=r"give either name .* or train"):
            config(source, train=ROWS)
    assert config("demo", max_steps=7).max_steps == 7
    own = RunConfig.load({"agents": AGENTS, "task": {"train": ROWS, "reward": len}})
    assert config(own, reward="exact").task.train == own.task.train
    assert config(own, task={"eval_size": 3}, train=ROWS, reward="exact").task.eval_size == 3


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        (None, {}, r"hacrl\.train: agents: missing"),
        (None, {"train": None, "reward": None}, "There is nothing to train on: give train= and reward=, or task="),
        (None, {"agents": AGENTS, "reward": None}, "task: reward is missing"),
        (None, {"agents": "zoo:llama-plus"}, r"agents: expected a list of models, or .*, not 'zoo:llama-plus'\."),
        (None, {"agents": [3]}, r"agents\.0: expected \{id: NAME, model: MODEL\}, not 3"),
        (None, {"agents": []}, "agents: needs 1 or more entries"),
        (None, {"agents": [{"model": "zoo:tiny", "lr": 1}]}, r"agents\.0\.lr: unknown key 'lr' \(set to 1\)"),
        (None, {"agents": [{"id": "a"}]}, r"agents\.0\.model: missing"),
        (None, {"agents": [{"model": 3}]}, r"agents\.0\.model: expected a text \(got 3\)"),
        (None, {"agents": [""]}, r"agents\.0\.model: needs 1 or more characters"),
        (None, {"agents": AGENTS, "train": None}, "task: train is missing"),
        (
            None,
            {"agents": AGENTS, "resume": "run"},
            "resume: expected True or False, not 'run'; name",
        ),
        (None, {"agents": AGENTS, "console": "quiet"}, r"console: expected a rich\.console\.Console, not str"),
        (None, {"agents": AGENTS, "num_generation": 4}, "num_generation: unknown key .* did you mean num_generations"),
        (None, {"agents": AGENTS, "task": {"train": ROWS}}, r"train is given twice, as train=\.\.\. and in task="),
        (
            None,
            {"agents": AGENTS, "task": "arithmetic"},
            "task: expected a section, not 'arithmetic'; write task={'name",
        ),
        (None, {"agents": AGENTS, "train": DatasetDict(train=Dataset.from_list(ROWS))}, r"example data\['train'\]"),
        (None, {"agents": AGENTS, "train": pandas.DataFrame(ROWS)}, r"task\.train: a DataFrame is given as Dataset"),
        (
            ["zoo:llama-plus"],
            {},
            "takes a preset, a YAML file, a dict or a RunConfig first, not list; agents are given",
        ),
        ({"algorithms": ["gspo"]}, {}, "this dict looks like a study: use `hacrl study"),
        ("nowhere.yaml", {}, "There is no file nowhere.yaml"),
    ],
)
def test_what_it_refuses(source: Any, changes: dict[str, Any], message: str) -> None:
    data = {"train": ROWS, "reward": "exact", **changes}
    with pytest.raises(UserError, match=message) as caught:
        hacrl.train(source, **data)
    assert "\n" not in str(caught.value)


def test_a_reward_that_cannot_be_pickled_leaves_no_folder(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match="Reward function lambda cannot be sent to the process"):
        train(tmp_path / "run", reward=lambda completions, **columns: [float(lock.locked())] * len(completions))
    assert not (tmp_path / "run").exists()


def test_errors_of_rewards_are_harmless_and_name_the_function(tmp_path: Path) -> None:
    class Short:
        def __init__(self) -> None: ...

    def hostile(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("\x1b[31mred")

    for reward, said in ((Short, "Reward function Short raised TypeError"), (hostile, r"ValueError: \x1b[31mred")):
        with pytest.raises(UserError) as caught:
            train(tmp_path / said[:20], reward=reward, max_steps=1, eval=None)
        assert said in str(caught.value)


# --- resuming --------------------------------------------------------------------------------------


def test_a_run_is_continued_with_the_same_objects(run: RunResult, tmp_path: Path) -> None:
    part = train(tmp_path / "run", max_steps=2)
    assert part.summary["steps"] == 2
    texts = [(tmp_path / "run", {}), (None, {"output_dir": tmp_path / "run", "agents": AGENTS, **SMALL})]
    for source, settings in texts:
        with pytest.raises(UserError, match=r"was started with other data: train had 24 rows, .* and now has 23 rows"):
            hacrl.train(source, resume=True, train=ROWS[1:], eval=HELDOUT, reward=rewards(), **settings)
    with pytest.raises(
        UserError, match=r"was given from Python \(task.train, task.eval, task.reward\)\. Continue .* hacrl"
    ):
        hacrl.train(tmp_path / "run", resume=True, max_steps=3)
    with pytest.raises(UserError, match=r"started with another task\.reward\."):
        hacrl.train(tmp_path / "run", resume=True, train=ROWS, eval=HELDOUT, reward="exact", max_steps=3)

    rows = Dataset.from_list(ROWS)
    whole = hacrl.train(tmp_path / "run", resume=True, train=rows, eval=HELDOUT, reward=rewards(), max_steps=3)
    assert whole.summary["steps"] == 3
    assert without_times(whole.run_dir)[3] == without_times(run.run_dir)[3]
    assert train(tmp_path / "run", resume=True).already_finished


def command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hacrl.cli", *map(str, words)], capture_output=True, text=True)


def test_commands_on_a_run_that_was_given_objects(run: RunResult) -> None:
    text = run.run_dir.joinpath("config.yaml").read_text()
    assert "train: 'given from Python: 24 rows, digest " in text
    assert "name: 'given from Python: right'" in text
    for words in (["rollouts", run.run_dir], ["watch", run.run_dir, "--once"], ["report", run.run_dir]):
        done = command(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
    assert command("train", run.run_dir, "--resume").stdout.count("already finished") == 1
    resumed = command("train", run.run_dir, "--resume", "max_steps=4")
    how = f"hacrl.train('{run.run_dir}', resume=True, train=..., eval=..., reward=...)"
    assert (resumed.returncode, resumed.stderr.count("\n")) == (2, 1)
    assert f"Continue the run from Python, with the same objects: {how}." in resumed.stderr
    for words, said in (
        (["eval", run.run_dir], f"`hacrl eval {run.agents['llama-plus'].model_dir} --config YAML` measures a model"),
        (["train", run.run_dir / "config.yaml", "--dry-run"], "Put it into a file, and name that in a YAML file."),
    ):
        refused = command(*words)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "does not hold what was given from Python (task.train, task.eval, task.reward). " in refused.stderr
        assert said in refused.stderr


def test_ray_gives_the_same_run(run: RunResult, tmp_path: Path) -> None:
    resources = {"num_cpus": 1}
    result = train(tmp_path / "run", execution="ray", resources=resources)
    assert_equal_runs(result.run_dir, run.run_dir)


# --- where it runs ---------------------------------------------------------------------------------


def test_the_package_is_light_and_shows_its_names() -> None:
    program = (
        "import sys, hacrl; names = dir(hacrl)\n"
        "assert not {'torch', 'transformers', 'pydantic', 'cloudpickle', 'IPython'} & set(sys.modules)\n"
        "assert hacrl.algorithms.HACPO and all(hasattr(hacrl, name) for name in names)\n"
        "print(*names)"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert shown == sorted([*hacrl.__all__, "algorithms"])


class Watching(NotebookClient):
    """Executes a notebook, and keeps what was shown in the place of a table."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "update_display_data":
            self.updates.append(msg["content"]["data"]["text/plain"])
        return super().process_message(msg, cell, cell_index)

    updates: list[str]


@pytest.fixture
def executed(tmp_path: Path) -> Callable[..., Watching]:
    def execute(*sources: str) -> Watching:
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        metadata = {"metadata": {"path": str(tmp_path)}}
        client = Watching(nbformat.v4.new_notebook(cells=cells), timeout=300, kernel_name="python3", resources=metadata)
        client.updates = []
        client.execute()
        return client

    return execute


def test_a_notebook_shows_a_table_that_is_updated_in_place(executed: Callable[..., Watching]) -> None:
    settings = {**SMALL, "max_steps": 8, "output_dir": "run"}
    client = executed(
        f"import hacrl\nROWS = {ROWS!r}\nMOST = 30\n"
        "def short(completions, **columns):\n    return [float(len(text) < MOST) for text in completions]",
        f"run = hacrl.train(agents=['zoo:llama-plus', 'zoo:llama-minus'], train=ROWS, reward=short, **{settings!r})",
        "class Right:\n    def __call__(self, completions, answer, **columns):\n"
        "        return [float(t.endswith('#' + a)) for t, a in zip(completions, answer)]\n"
        "settings = dict(resume=True, max_steps=9, train=ROWS)\n"
        "try:\n    hacrl.train('run', reward=Right(), **settings)\n"
        "except hacrl.UserError as error:\n    print(error)\n"
        "again = hacrl.train('run', reward=short, **settings)",
        "run.metrics()",
    )
    _, trained, continued, metrics = client.nb.cells
    table, *_ = [output.data for output in trained.outputs if output.output_type == "display_data"]
    assert "step 8/8" in table["text/plain"]
    assert "llama-minus" in table["text/html"]
    assert len({text.splitlines()[-1] for text in client.updates}) > 2, "the table stood still"
    said = "".join(output.text for output in continued.outputs if output.output_type == "stream")
    assert "run was started with another task.reward" in said
    shown = [output.data["text/plain"] for output in continued.outputs if output.output_type == "display_data"]
    assert "step 9/9" in shown[0]
    assert "hacpo_robust, 9 steps" in "".join(shown[1:])
    assert "<p>10 rows" in metrics.outputs[0].data["text/html"]
