"""Configs that are nearly right: each loads or is refused in a sentence, whatever was done to it."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl.config import RunConfig
from hacrl.config.settings import PRESETS, preset_names
from hacrl.config.study import STUDIES, StudyConfig
from hacrl.config.warmup import WarmupConfig
from hacrl.errors import CONTROL, UserError, harmless
from hacrl.study.grid import Study
from hacrl.tasks import build_task
from hacrl.training.run_dir import changed_settings

WARMUP = """
agents:
- {id: a, model: "zoo:llama-small", max_layers: 1, data: rows.jsonl}
- {id: b, init: random, tokenizer: "zoo:llama-weak", config: {model_type: llama, hidden_size: 32, num_hidden_layers: 1}}
data:
- {file: more.jsonl, weight: 2.5}
- task: {mixture: [{name: arithmetic, max_operators: 4}, {name: "gym:chain_sum", options: {max_terms: 3}}]}
task: {name: arithmetic, eval_size: 50, eval_split: validation}
batch_size: 16
max_steps: 30
learning_rate: 1.0e-4
stop: ["\\n"]
output_dir: runs/warm
"""
STUDY = """
name: small
title: Two algorithms, two teams
base: demo
teams: {near: state, other: {agents: [{id: a, model: "zoo:llama-weak"}, {id: b, model: "zoo:llama-plus"}]}}
algorithms: {gspo_x2: null, mine: {algorithm.name: hacpo, algorithm.alpha: 3}}
options: {plain: null, cold: {temperature: 0.7, agents.a.learning_rate: 1.0e-5}}
settings: {max_steps: 4, task.eval_size: 20, algorithm.epsilon: 3.0e-4}
seeds: 3
baseline: gspo_x2
"""
RUN = {
    "algorithm": {"name": "hacpo", "capability": {"window": 3}},
    "agents": [
        {"id": "a", "model": "zoo:llama-weak", "lora": {"r": 4}, "stop": ["\n"]},
        {"id": "b", "model": "zoo:llama-plus", "chat_template_kwargs": {"n": [1, {"x": None}]}},
    ],
    "task": {"mixture": [{"name": "arithmetic", "max_operators": 4}, {"train": "x.jsonl", "reward": "exact"}]},
    "report_to": ["tensorboard"],
    "execution": "ray",
}

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    0.5,
    0.9,
    2**31,
    2**63,
    2**64,
    -(2**64),
    10**99,
    10**200,
    1e300,
    -1e300,
    5e-324,
    float("nan"),
    float("inf"),
]
TEXTS = ["", " ", "\x1b[31m", "\x9b", "\r", "\u202e", "\0", "ü" * 50, "x" * 50_000, "../..", "~", "a.b", "\ud800", "٣"]
OTHERS = [None, True, [], {}, [[]], [None], {"": ""}, {1: 2}, {"a": {"b": {"c": []}}}, "2026-01-01", "1e-5", "null"]
TOKENS = [
    "&a ",
    "*a",
    "<<: *a",
    "!!int ",
    "!!binary ",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "- ",
    "\t",
    '"',
    "'",
    "|",
    "%",
    "\ufeff",
]
TOKENS += [
    "2026-99-99",
    "[" * 500,
    "- " * 300,
    "0x" + "f" * 300,
    "9" * 5000,
    "1:" * 99 + "1",
    "? ",
    "=",
    "...",
    "---\n",
]
TOKENS += ["&a [*a]", "{a: 1, a: 2}", "<<: [{seed: 1}]", '"\\e"', '"\\UFFFFFFFF"', "\x00", "\x85", "\u2028", "#", "!x "]


@dataclass(frozen=True)
class Kind:
    """A kind of file: how it is loaded, and what is checked of it before models are opened."""

    load: Callable[[Path, list[str]], Any]
    check: Callable[[Any, Path], None]


def check_run(config: RunConfig, path: Path) -> None:
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert changed_settings(config, RunConfig.load(path)) == []
    for agent in config.agents:
        assert 1 <= config.updates_per_step(agent) <= config.prompts_per_step
    if config.task.name == "arithmetic" and config.task.eval_size + config.prompts_per_step < 2000:
        task, _ = build_task(config.task, config.seed)
        task.train(0, config.prompts_per_step)


def check_warmup(config: WarmupConfig, path: Path) -> None:
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert changed_settings(config, WarmupConfig.load(path)) == []
    for agent in config.agents:
        agent.for_agent("zoo:llama-weak")


def check_study(config: StudyConfig, path: Path) -> None:
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert changed_settings(config, StudyConfig.load(path)) == []
    study = Study.build(config)
    assert study.runs


KINDS = {
    "run": Kind(RunConfig.load, check_run),
    "warmup": Kind(WarmupConfig.load, check_warmup),
    "study": Kind(StudyConfig.load, check_study),
}


def valid_texts() -> list[tuple[str, str]]:
    """Kind and text of configs that load."""
    presets = [("run", (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")) for name in preset_names()]
    whole = ("run", RunConfig.from_dict(RUN).to_yaml())
    bundled = ("study", (STUDIES / "quick.yaml").read_text(encoding="utf-8"))
    return [*presets, whole, whole, whole, ("warmup", WARMUP), ("warmup", WARMUP), ("study", STUDY), bundled]


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values of a tree."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [*([path] if path else []), *(place for key, item in children for place in places(item, (*path, key)))]


def odd_value(rng: random.Random, tree: Any) -> Any:
    other = copy.deepcopy(rng.choice(OTHERS))
    return rng.choice([rng.choice(NUMBERS), rng.choice(TEXTS), other, tree, [tree] * 3])


def mutate_tree(rng: random.Random, text: str) -> str:
    """Delete, rename, copy or replace values; what is there twice becomes an alias."""
    tree = yaml.safe_load(text)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        *parents, last = rng.choice(places(tree))
        parent = tree
        for key in parents:
            parent = parent[key]
        match rng.randrange(5):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[rng.choice([*TEXTS, 3, None, f"{last}s", str(last)[:-1]])] = parent.pop(last)
            case 2 if isinstance(parent, list):
                parent.append(parent[last])
            case _:
                parent[last] = odd_value(rng, parent[last])
        if not places(tree):
            break
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=rng.random() < 0.5)


def mutate_text(rng: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    for _ in range(rng.choice([1, 1, 2, 4])):
        line, at = rng.randrange(len(lines)), rng.randrange(len(text))
        match rng.randrange(6):
            case 0:
                lines.insert(rng.randrange(len(lines)), lines[line])
            case 1:
                lines[line] = rng.choice([" ", "  ", "    ", "- "]) + lines[line]
            case 2:
                lines[line] = lines[line].replace(":", rng.choice([":", ": ", "", ": :"]) + rng.choice(TOKENS), 1)
            case 3:
                return text[:at]
            case _:
                whole = "".join(lines)
                at = min(at, len(whole))
                lines = [whole[:at], rng.choice([*TOKENS, *TEXTS]), whole[at + rng.choice([0, 1, 9]) :]]
    return "".join(lines)


def mutate(rng: random.Random, text: str) -> tuple[bytes, list[str]]:
    """A file's content and `key=value` overrides."""
    overrides = []
    if rng.random() < 0.3:
        for _ in range(rng.randrange(1, 3)):
            key = ".".join(map(str, rng.choice(places(yaml.safe_load(text)))))
            key = rng.choice([key, key, key, f"{key}.x", "a." * 150, rng.choice(TEXTS), key[:-1]])
            value = str(rng.choice([*NUMBERS, *TEXTS, *OTHERS, *TOKENS]))
            overrides.append(f"{key}={value}".encode("utf-8", "replace").decode().replace("\0", ""))
    else:
        text = rng.choice([mutate_tree, mutate_text])(rng, text)
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if rng.random() < 0.1 and content:
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content), overrides


def try_mutations(count: int, seed: int, folder: Path) -> Counter[str]:
    """How many were loaded and how many refused; AssertionError with the text for anything else."""
    texts, outcomes = valid_texts(), Counter[str]()
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind, text = rng.choice(texts)
        content, overrides = mutate(rng, text)
        path = folder / "fuzz.yaml"
        path.write_bytes(content)
        try:
            KINDS[kind].check(KINDS[kind].load(path, overrides), folder / "again.yaml")
            outcomes["loaded"] += 1
        except UserError as error:
            shown = harmless(str(error))
            assert shown.strip()
            assert not CONTROL.search(shown)
            shown.encode()
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, mutation {number}, {kind} with {overrides}:\n{content!r}") from error
    return outcomes


@pytest.mark.parametrize("seed", [2026])
def test_300_mutations_load_or_are_refused_in_a_sentence(seed: int, tmp_path: Path) -> None:
    outcomes = try_mutations(300, seed, tmp_path)
    assert min(outcomes["loaded"], outcomes["refused"]) > 30
