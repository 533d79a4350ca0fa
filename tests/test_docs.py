"""What the docs claim is true of the code: links, defaults, fields, metrics, snippets."""

import ast
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

import hacrl
from conftest import MakeConfig
from hacrl.algorithms import ALGORITHMS, HACPO, CapabilityOptions, Imitation, RobustHACPO
from hacrl.config import AgentConfig, ModelSettings, RunConfig, parse_algorithm
from hacrl.config.reference import markdown
from hacrl.config.task import CurriculumConfig, PartConfig, ProblemsConfig, RewardConfig, TaskConfig
from hacrl.config.warmup import DataConfig, WarmupAgentConfig, WarmupConfig, WarmupSettings
from hacrl.run import RESUMABLE_CHANGES, train
from hacrl.training.run_dir import RunDir, read_jsonl
from hacrl.warmup.stage import warm_up
from teacher_server import Response, Teacher, right

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hacrl"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "examples").rglob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ALGORITHM = (ROOT / "docs" / "algorithm.md").read_text(encoding="utf-8")
CONFIG = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
FILES = (ROOT / "docs" / "files.md").read_text(encoding="utf-8")
TASKS = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")

CODE = re.compile(r"`([^`]+)`")
NAMED = re.compile(r"((?:`[\w.]+`(?:,\s+|\s+and\s+)?)+)\s+(?:in|of)\s+\[[^\]]+\]\(([^)\s]+\.py)\)")
"""Functions and classes followed by the linked file they are in: `name` in [file.py](path/file.py)."""
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")


def tables(text: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The header and the rows of each table."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        yield header, rows


def first_column(heading: str, text: str) -> list[str]:
    """Everything in code style in the first column of the tables with this heading."""
    cells = [row[0] for header, rows in tables(text) if header[0] == heading for row in rows]
    return [name for cell in cells for name in CODE.findall(cell)]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


# --- form ------------------------------------------------------------------------------------------


def test_the_readme_fits_three_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.name)
def test_tables_are_narrow(page: Path) -> None:
    for header, rows in tables(page.read_text(encoding="utf-8")):
        assert len(header) <= 7, header
        if page.name == "README.md":
            for row in (header, *rows):
                assert len(" | ".join(re.sub(r"\]\([^)]*\)|[`\[*]", "", cell) for cell in row)) <= 100, row


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == hacrl.__version__
    assert f"version = {{{hacrl.__version__}}}" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n## {hacrl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


# --- links, options, snippets ----------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in ("".join(found) for found in LINK.findall(text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or linked.suffix != ".md" or anchor in headings(linked), f"{page.name} links to {target}"


def test_files_named_in_architecture_exist() -> None:
    """Those that are no links: `room/file.py` is relative to the package, as the page says."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+/\w+\.py)`", page):
        assert (PACKAGE / name).is_file() or (ROOT / name).is_file(), name


def definitions(path: Path) -> set[str]:
    """Names a Python file defines at its top level, and `Class.member` for what is in the body of a class."""

    def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node.body, f"{node.name}.")

    return set(defined(ast.parse(path.read_text(encoding="utf-8")).body))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_functions_are_defined_in_the_file_they_are_named_with(page: Path) -> None:
    for names, target in NAMED.findall(page.read_text(encoding="utf-8")):
        missing = set(CODE.findall(names)) - definitions(page.parent / target)
        assert not missing, f"{page.name} says that {target} has {', '.join(missing)}"


def test_the_papers_four_names_lead_to_the_code() -> None:
    docstring = str(ast.get_docstring(ast.parse((PACKAGE / "algorithms" / "hacpo.py").read_text(encoding="utf-8"))))
    mechanisms = dict(re.findall(r"^\d\. ([\w -]+?)  .*?([\w.]+)$", docstring, re.MULTILINE))
    assert list(mechanisms) == [
        "agent-capability-aware advantage estimation",
        "model capabilities discrepancy coefficient",
        "exponential importance sampling",
        "stepwise clipping",
    ]
    prose = " ".join(ALGORITHM.split())
    for name, home in mechanisms.items():
        assert f"*{name}*" in prose
        module, _, function = home.partition(".")
        path = PACKAGE / "algorithms" / f"{module.lower()}.py"
        assert {function, home} & definitions(path), f"{home} is not defined in {path.name}"


def test_the_theory_names_its_tests_and_all_of_them() -> None:
    theory = ALGORITHM[ALGORITHM.index("## 18.") :]
    files = [ROOT / "tests" / "algorithms" / name for name in ("test_theory.py", "test_alignment.py")]
    written = {name for path in files for name in definitions(path) if name.startswith("test_")}
    assert set(re.findall(r"`(test_\w+)`", theory)) == written


def documented_defaults(text: str) -> dict[str, Any]:
    found = {}
    for header, rows in tables(text):
        if header[:2] == ["option", "default"]:
            found |= {CODE.findall(row[0])[0]: yaml.safe_load(row[1].strip("`")) for row in rows}
    return found


def test_every_option_of_hacpo_is_documented_with_its_default() -> None:
    sections = {"algorithm": HACPO(), "algorithm.capability": CapabilityOptions(), "algorithm.imitation": Imitation()}
    options = {
        f"{section}.{field.name}": getattr(defaults, field.name)
        for section, defaults in sections.items()
        for field in dataclasses.fields(defaults)
    }
    apart = {"algorithm.name", *sections}
    assert documented_defaults(ALGORITHM) == {key: default for key, default in options.items() if key not in apart}


def all_keys(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a section and of the sections inside it, with its default."""
    for name, field in section.model_fields.items():
        inner = next((kind for kind in (field.annotation, *get_args(field.annotation)) if is_section(kind)), None)
        if inner is None or field.default is None or field.default == []:
            yield prefix + name, "required" if field.is_required() else field.default
        if inner is not None:
            yield from all_keys(inner, f"{prefix}{name}.")


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_every_key_of_a_run_is_documented_with_its_default() -> None:
    apart = {"algorithm": {"name": RobustHACPO.name}, "agents": "required", "task": "required"}
    keys = {key: default for key, default in all_keys(RunConfig) if key.partition(".")[0] not in apart}
    own = AgentConfig.model_fields.keys() - RunConfig.model_fields.keys()
    assert documented_defaults(CONFIG) == {**keys, **apart, **{f"agents.{name}": "required" for name in own}}


def test_the_tables_of_all_keys_are_those_that_make_docs_writes() -> None:
    assert CONFIG.partition("in the code. -->\n\n")[2] == markdown(), "run `make docs`"


def test_the_config_of_the_page_on_settings_is_valid() -> None:
    (snippet,) = blocks(ROOT / "docs" / "config.md", "yaml")
    config = RunConfig.from_dict(yaml.safe_load(snippet))
    assert [agent.learning_rate for agent in config.agents] == [1e-4, 5e-5]


def test_settings_that_may_change_on_resume_are_documented() -> None:
    (sentence,) = re.findall(r"It may change (.*?):", " ".join(CONFIG.split()))
    named = {name.removeprefix("task.") for name in CODE.findall(sentence)}
    assert named == RESUMABLE_CHANGES


def test_clips_of_all_algorithms_are_those_of_the_code() -> None:
    ((header, rows),) = [table for table in tables(ALGORITHM) if table[0][:2] == ["name", "epsilon"]]
    documented = {CODE.findall(row[0])[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert documented.keys() == ALGORITHMS.keys()
    for name, row in documented.items():
        algorithm = parse_algorithm({"name": name})
        clip = [None if row[option] == "-" else float(row[option]) for option in ("epsilon", "epsilon_high")]
        assert clip == [getattr(algorithm, option, None) for option in ("epsilon", "epsilon_high")]
        assert (row["rollouts"] == "all") == algorithm.shares_rollouts


def test_options_of_the_other_ways_to_share_are_those_of_the_code() -> None:
    ((_, rows),) = [table for table in tables(ALGORITHM) if table[0][:2] == ["name", "option"]]
    documented = {(CODE.findall(row[0])[0], CODE.findall(row[1])[0]): yaml.safe_load(row[2].strip("`")) for row in rows}
    common = {"name", "beta", "loss_type", "scale_rewards", "entropy_coef", "imitation"}
    common |= {"epsilon", "epsilon_high", "capability"}
    options = {name: {f.name for f in dataclasses.fields(ALGORITHMS[name])} - common for name, _ in documented}
    assert options.keys() == {"rft", "naive", "swarm", "ftis", "success_gated", "luffy", "opd", "hacpo_robust"}
    assert documented == {
        (name, option): getattr(ALGORITHMS[name](), option) for name, own in options.items() for option in own
    }


def defaults(section: type[BaseModel], prefix: str = "", without: Iterable[str] = ()) -> dict[str, Any]:
    """Every option of a section of the config; those that must be given have none."""
    fields = {name: field for name, field in section.model_fields.items() if name not in without}
    return {f"{prefix}{name}": f.get_default(call_default_factory=True) for name, f in fields.items()}


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        (
            "option of task",
            defaults(TaskConfig, "task.")
            | defaults(RewardConfig, "task.reward.", without=["name"])
            | {"task.reward.name": "required", "task.curriculum.stages": "required"}
            | defaults(CurriculumConfig, "task.curriculum.", without=["stages"])
            | defaults(PartConfig, "task.mixture.", without=ProblemsConfig.model_fields),
        ),
        (
            "option of warm-up",
            defaults(WarmupConfig, without=[*ModelSettings.model_fields.keys() - {"learning_rate"}, "agents"])
            | defaults(DataConfig, "data.")
            | defaults(WarmupAgentConfig, "agents.", without=[*WarmupSettings.model_fields, "id"]),
        ),
    ],
)
def test_options_of_tasks_and_warm_up_are_documented(heading: str, expected: dict[str, Any]) -> None:
    ((_, rows),) = [table for table in tables(CONFIG) if table[0][:2] == [heading, "default"]]
    assert {CODE.findall(row[0])[0]: yaml.safe_load(row[1].strip("`")) for row in rows} == expected


@pytest.mark.parametrize("snippet", blocks(ROOT / "docs" / "tasks.md", "yaml"))
def test_the_configs_of_tasks_and_warm_up_are_valid(snippet: str) -> None:
    data = yaml.safe_load(snippet)
    if "agents" in data:
        WarmupConfig.from_dict(data)
    else:
        RunConfig.from_dict({"agents": [{"id": "a", "model": "zoo:llama-plus"}], **data})


def test_files_and_metrics_of_a_warm_up_are_documented(tmp_path: Path) -> None:
    agent = {"id": "a", "model": "zoo:llama-weak", "max_layers": 1, "data": {"task": {"name": "arithmetic"}}}
    task = {"mixture": [{"name": "arithmetic", "id": "sums"}], "eval_size": 2}
    sizes = {"max_steps": 1, "batch_size": 2, "eval_size": 2}
    result = warm_up(WarmupConfig.from_dict({"agents": [agent], "task": task, "output_dir": str(tmp_path), **sizes}))
    logged = {documented_name(name, ["a"]) for line in RunDir(result.run_dir).metrics() for name in line}
    assert {name.replace("/sums", "/<part>") for name in logged} == set(first_column("metric of warm-up", TASKS))
    files = {name.rstrip("/").split("/")[0] for name in first_column("file of warm-up", TASKS)}
    assert {re.sub(r"checkpoint-\d+", "checkpoint-<step>", path.name) for path in tmp_path.iterdir()} == files


def accepts(name: str, option: str, logprobs: str) -> bool:
    """Whether a config with this algorithm and a teacher is valid."""
    teacher = {"id": "teacher", "endpoint": {"url": "http://host/v1", "model": "big", "logprobs": logprobs}}
    settings = {"name": name, "delta_step": 0.0} if name == "hacpo" else {"name": name}
    algorithm = settings | (yaml.safe_load(option) if option else {})
    agents, task = [{"id": "a", "model": "zoo:llama-plus"}], {"name": "arithmetic"}
    try:
        RunConfig.from_dict({"agents": agents, "sources": [teacher], "task": task, "algorithm": algorithm})
    except hacrl.UserError:
        return False
    return True


def test_sources_are_refused_where_the_page_says_so() -> None:
    page = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    ((_, rows),) = [table for table in tables(page) if table[0][0] == "algorithm"]
    named = set()
    for first, *cells in rows:
        names, option = [], ""
        for code in CODE.findall(first):
            names, option = (names, code) if ": " in code else ([*names, code], option)
        named |= set(names)
        for name, (cell, logprobs) in itertools.product(names, zip(cells, ("raw", "none"), strict=True)):
            assert accepts(name, option, logprobs) != cell.startswith("refused"), (name, logprobs)
            for other in re.findall(r"not with `(.*?)`", cell):
                assert accepts(name, other, logprobs), (name, other)
    assert named == set(ALGORITHMS)


def test_the_configs_of_the_page_on_sources_are_valid() -> None:
    whole, part = map(yaml.safe_load, blocks(ROOT / "docs" / "sources.md", "yaml"))
    for data in (whole, whole | part):
        RunConfig.from_dict(data)


@pytest.mark.parametrize("line", blocks(ROOT / "docs" / "algorithm.md", "sh")[0].splitlines())
def test_the_ablations_are_valid(line: str) -> None:
    _, _, preset, *overrides = line.partition("#")[0].split()
    RunConfig.load(preset, overrides)


def test_the_snippet_for_other_trainers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks(ROOT / "docs" / "algorithm.md", "python")
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["omega_KK"][1, 0] == pytest.approx(3.0)
    assert names["terms"].kept_N.all()
    assert names["logp_NT"].grad.abs().sum() > 0
    assert "0.95" in capsys.readouterr().out


def test_the_example_algorithm_works_as_it_stands(monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig) -> None:
    (snippet,) = blocks(ROOT / "docs" / "architecture.md", "python")
    names: dict[str, Any] = {"__name__": __name__}
    exec(snippet, names)
    monkeypatch.setitem(ALGORITHMS, "unclipped", names["Unclipped"])
    changes = {"max_steps": 1, "prompts_per_step": 2, "task": {"name": "arithmetic", "eval_size": 2}}
    config = make_config("llama-plus", algorithm={"name": "unclipped", "scale": 0.5}, trace=True, **changes)
    trace = read_jsonl(RunDir(train(config).run_dir).step_file("trace", 1))
    assert [line["weight"] for line in trace] == pytest.approx([0.5] * len(trace), abs=1e-3)


# --- files and metrics of a run --------------------------------------------------------------------

REWARD = """
def alternate(completions, **columns):
    return [float(position % 2) for position in range(len(completions))]


def unsure(completions, **columns):
    return [0.5 if position else None for position in range(len(completions))]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One step of two agents with two tokenizers, on two prompts."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = [{"prompt": "12+34+5=", "answer": "51"}, {"prompt": "70-8-9=", "answer": "53"}]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = str(folder / "data.jsonl")
    config = RunConfig.from_dict(
        {
            "algorithm": {"name": "hacpo", "delta": 1.0, "imitation": {"when": "end", "min_reward": 0.0}},
            "agents": [
                {"id": "chars", "model": "zoo:llama-plus", "max_completion_length": 24},
                {"id": "pairs", "model": "zoo:neox-pair", "vllm_importance_sampling_correction": True},
            ],
            "task": {
                "train": data,
                "eval": data,
                "reward": [f"{folder}/reward.py:{f}" for f in ("alternate", "unsure")],
            },
            "prompts_per_step": 2,
            "rollouts_per_update": 32,
            "num_generations": 8,
            "max_prompt_length": 32,
            "max_completion_length": 8,
            "eval_samples": 2,
            "dynamic_sampling": True,
            "dynamic_sampling_rounds": 1,
            "max_steps": 1,
            "trace": True,
            "output_dir": str(folder / "run"),
        }
    )
    return RunDir(train(config).run_dir)


def opd_metrics(folder: Path) -> list[dict[str, Any]]:
    """Of a step in which agents score each other's rollouts, which adds metrics."""
    agents = [
        {"id": name, "model": f"zoo:{model}"} for name, model in (("chars", "llama-plus"), ("pairs", "neox-pair"))
    ]
    sizes = {"prompts_per_step": 2, "num_generations": 2, "max_prompt_length": 32, "max_completion_length": 8}
    task = {"name": "arithmetic", "eval_size": 2}
    base = {"algorithm": {"name": "opd"}, "agents": agents, "task": task, "max_steps": 1, "output_dir": str(folder)}
    return RunDir(train(RunConfig.from_dict({**base, **sizes})).run_dir).metrics()


def source_metrics(rollouts: Path, folder: Path) -> list[dict[str, Any]]:
    """Metrics of a step with stored rollouts and with a teacher that refuses some requests."""
    teacher = Teacher(lambda fields: right(fields) if fields["seed"] % 2 else Response(b"", 418))
    endpoint = {"url": teacher.url, "model": "big"}
    base = {
        "agents": [{"id": "chars", "model": "zoo:llama-plus"}],
        "sources": [{"id": "past", "rollouts": str(rollouts)}, {"id": "teacher", "endpoint": endpoint}],
        "task": {"name": "arithmetic", "eval_size": 2},
    }
    sizes = {"prompts_per_step": 4, "num_generations": 2, "max_prompt_length": 32, "max_completion_length": 8}
    try:
        config = RunConfig.from_dict({**base, **sizes, "max_steps": 1, "output_dir": str(folder)})
        return RunDir(train(config).run_dir).metrics()
    finally:
        teacher.close()


def documented_name(name: str, agents: Iterable[str], sources: Iterable[str] = ()) -> str:
    """The pattern of the docs for a name in metrics.jsonl: `<agent>`, `<source>`, `<reason>` for what varies."""
    of_agents, of_sources = ("|".join(map(re.escape, ids)) for ids in (agents, sources))
    name = re.sub(rf"^({of_agents})/", "<agent>/", name)
    name = re.sub(rf"^({of_sources})/", "<source>/", name)
    name = re.sub(rf"^<agent>/from_({of_agents}|{of_sources})/", "<agent>/from_<source>/", name)
    name = re.sub(r"^<source>/failed/\w+$", "<source>/failed/<why>", name)
    reasons = "|".join(map(re.escape, first_column("reason", ALGORITHM)))
    return re.sub(rf"/dropped/({reasons})$", "/dropped/<reason>", name)


def test_every_metric_is_documented_and_every_documented_metric_exists(run: RunDir, tmp_path: Path) -> None:
    agents = [agent.id for agent in run.config().agents]
    lines = [*run.metrics(), *opd_metrics(tmp_path / "opd"), *source_metrics(tmp_path / "opd", tmp_path / "run")]
    logged = {documented_name(name, agents, ["past", "teacher"]) for line in lines for name in line}
    documented = first_column("metric", FILES)
    assert len(documented) == len(set(documented))
    assert logged <= set(documented)
    # The runs have all there is; only whether the short-limited learner must drop something is up to what is sampled.
    assert set(documented) - logged <= {"<agent>/dropped/<reason>", "<agent>/from_<source>/dropped/<reason>"}


def test_the_reasons_for_dropping_are_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    assert set(re.findall(r'(?:Dropped\(|dropped\[row\] = )"(\w+)"', source)) == set(first_column("reason", ALGORITHM))
    rows = (PACKAGE / "warmup" / "rows.py").read_text(encoding="utf-8")
    assert set(re.findall(r'return "(\w+)"', rows)) == set(first_column("reason of warm-up", TASKS))


def test_every_field_of_rollouts_and_trace_is_documented(run: RunDir) -> None:
    trace = read_jsonl(run.step_file("trace", 1))
    assert all(sorted(line) == sorted(first_column("field of trace", FILES)) for line in trace)
    sometimes = {"problem", "detail", "lead", "opened"}
    fields = set(first_column("field of rollouts", FILES))
    assert sometimes < fields
    assert all(fields - sometimes <= set(line) <= fields for line in read_jsonl(run.step_file("rollouts", 1)))


def test_every_file_of_a_run_is_documented(run: RunDir) -> None:
    agents = {agent.id for agent in run.config().agents}
    documented = {name.rstrip("/") for name in first_column("file", FILES)}
    for path in run.path.rglob("*"):
        name = re.sub(r"checkpoint-\d+", "checkpoint-<step>", str(path.relative_to(run.path)))
        name = "/".join("<id>" + Path(part).suffix if Path(part).stem in agents else part for part in name.split("/"))
        known = name in documented or any(d.startswith(f"{name}/") for d in documented)
        assert known or "agents/<id>/" in name, name
