"""A run's config: defaults, what is refused and how, overrides, presets."""

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hacrl.algorithms import ALGORITHMS, GSPO, HACPO, RFT, Imitation, RobustHACPO
from hacrl.config import AgentConfig, RunConfig, parse_algorithm
from hacrl.config.agent import CORRECTION
from hacrl.config.settings import PRESETS, apply_overrides, preset_names
from hacrl.config.task import TaskConfig
from hacrl.errors import UserError
from hacrl.training.run_dir import RunDir

PAIR = [{"id": "a", "model": "zoo:llama-weak"}, {"id": "b", "model": "zoo:llama-small"}]
BASE: dict[str, Any] = {"algorithm": {"name": "hacpo"}, "agents": PAIR, "task": {"name": "arithmetic"}}

HACPO_DEFAULTS = yaml.safe_load("""
name: hacpo
alpha: 1.0
delta: 0.2
delta_step: 0.025
epsilon: 3.0e-4
epsilon_high: 4.0e-4
beta: 0.0
loss_type: grpo
scale_rewards: group
entropy_coef: 0.0
cross_weight: 1.0
baseline: capability
cross_baseline: learner
baseline_guard: true
cross_omega: true
cross_clip: true
ratio_unit: token
reward_min: 0.0
capability: {metric: mean_reward, window: 5, include_current: true, ratio_min: 0.1, ratio_max: 10.0}
""")

PAPER = {
    # arXiv 2603.02604, table 5: alpha, delta (the table prints the lower bound 1 - delta), delta_step.
    "paper-qwen3-4b-4b-instruct": (3.0, 0.2, 0.01),
    "paper-qwen3-1.7b-4b": (1.0, 0.2, 0.025),
    "paper-qwen3-4b-8b": (3.0, 0.2, 0.025),
    "paper-llama-1b-3b": (1.0, 0.1, 0.01),
    "paper-qwen3-1.7b-llama-1b": (1.0, 0.2, 0.025),
    "paper-qwen3-4b-llama-3b": (1.0, 0.2, 0.025),
}
ZOO_PRESETS = ["demo", "gap", "model", "size", "state", "team"]


def load(changes: dict[str, Any] | None = None, *overrides: str) -> RunConfig:
    return RunConfig.from_dict(apply_overrides({**BASE, **(changes or {})}, overrides), "run.yaml")


def refusal(changes: dict[str, Any] | None = None, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(changes, *overrides)
    return str(caught.value)


def resolved(config: RunConfig) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(config.to_yaml())
    return data


# --- defaults ------------------------------------------------------------------------------------------------------


def test_the_defaults_of_hacpo() -> None:
    section = resolved(load())["algorithm"]
    assert section.pop("allow_closed_band") is False
    assert section.pop("imitation")["when"] == "never"
    assert section == HACPO_DEFAULTS


def test_the_default_algorithm() -> None:
    assert RunConfig.from_dict({"agents": PAIR, "task": {"name": "arithmetic"}}).algorithm == RobustHACPO()


def test_the_defaults_of_a_run() -> None:
    expected = {
        "prompts_per_step": 32,
        "rollouts_per_update": 128,
        "num_generations": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "num_iterations": 1,
        "max_grad_norm": 1.0,
        "max_steps": 60,
        "eval_every": 20,
        "save_every": 20,
        "seed": 0,
        "trace": False,
        "dynamic_sampling": False,
        "keep_best": False,
        "trust_remote_code": False,
        "mask_truncated_completions": False,
    }
    data = resolved(load())
    assert {name: data[name] for name in expected} == expected


# --- what is refused -----------------------------------------------------------------------------------------------

FILE_TASK = {"train": "train.jsonl", "reward": "exact"}
OVERLONG = {"name": "soft_overlong", "max_completion_length": 64, "soft_punish_cache": 16}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    # Unknown keys: the place, the value, the nearest name.
    ({"lerning_rate": 0.1}, ["lerning_rate: unknown key", "0.1", "did you mean learning_rate?"]),
    ({"agents": [{**PAIR[0], "temprature": 2}]}, ["agents.0.temprature", "set to 2", "did you mean temperature?"]),
    ({"agents": [{**PAIR[0], "seed": 1}]}, ["agents.0.seed", "of the whole run"]),
    ({"task": {"name": "arithmetic", "evel_size": 9}}, ["task.evel_size", "set to 9", "did you mean eval_size?"]),
    ({"algorithm": {"name": "hacpo", "alhpa": 3}}, ["algorithm: hacpo", "'alhpa'", "set to 3", "did you mean alpha?"]),
    ({"algorithm": {"name": "gspo", "alpha": 3}}, ["gspo has no option 'alpha'", "epsilon"]),
    ({"algorithm": {"name": "hacop"}}, ["algorithm: name: unknown algorithm 'hacop'", "did you mean hacpo?"]),
    ({"algorithm": {"name": "ppo-clip-max"}}, ["'ppo-clip-max'", f"choose from {', '.join(ALGORITHMS)}"]),
    (
        {"algorithm": {"name": "hacpo", "capability": {"windw": 3}}},
        ["algorithm: capability", "'windw'", "set to 3", "did you mean window?"],
    ),
    (
        {"task": {**FILE_TASK, "reward": [{"name": "exact", "wieght": 2}]}},
        ["task.reward.0.wieght", "set to 2", "did you mean weight?"],
    ),
    # Wrong types and values: the place and the value.
    ({"num_generations": "many"}, ["num_generations: expected a whole number (got 'many')"]),
    ({"num_generations": 2.5}, ["num_generations", "2.5"]),
    ({"num_generations": 0}, ["num_generations: must be at least 1 (got 0)"]),
    ({"seed": True}, ["seed is a number, not true"]),
    ({"seed": -1}, ["seed", "got -1"]),
    ({"seed": 2**64}, ["seed", str(2**64)]),
    ({"save_total_limit": True}, ["save_total_limit is a number, not true"]),
    ({"temperature": 0}, ["temperature", "greater than 0", "got 0"]),
    ({"top_p": 1.5}, ["top_p", "1.5"]),
    ({"learning_rate": float("nan")}, ["learning_rate", "finite", "nan"]),
    ({"lr_scheduler_type": "cosin"}, ["lr_scheduler_type", "'cosine'", "'cosin'"]),
    ({"dtype": "float8"}, ["dtype", "bfloat16", "'float8'"]),
    ({"device": "gpu"}, ["device", "'gpu'", "cuda"]),
    ({"stop": "\n"}, ["stop", "list"]),
    ({"stop": [""]}, ["stop.0: needs 1 or more characters (got '')"]),
    ({"stop": "END"}, ["stop: expected a list (got 'END')"]),
    ({"trace": "perhaps"}, ["trace: expected true or false (got 'perhaps')"]),
    ({"output_dir": 3}, ["output_dir: expected a text (got 3)"]),
    ({"algorithm": "gspo"}, ["algorithm", "section with a name", "'gspo'"]),
    ({"algorithm": {"alpha": 1}}, ["algorithm: hacpo_robust has no option 'alpha' (set to 1)"]),
    ({"algorithm": {"name": None}}, ["algorithm: name: unknown algorithm None", "hacpo"]),
    ({"algorithm": {"name": ["hacpo"]}}, ["algorithm: name", "['hacpo']"]),
    ({"algorithm": {"name": "hacpo", "alpha": "big"}}, ["algorithm: alpha", "'big'"]),
    ({"algorithm": {"name": "hacpo", "alpha": True}}, ["alpha is a number, not true"]),
    ({"algorithm": {"name": "hacpo", "alpha": -1}}, ["alpha", "-1"]),
    ({"algorithm": {"name": "hacpo", "alpha": float("nan")}}, ["alpha", "nan"]),
    ({"algorithm": {"name": "hacpo", "delta": 0}}, ["delta must lie in (0, 1]", "0"]),
    ({"algorithm": {"name": "hacpo", "delta_step": -0.1}}, ["delta_step", "-0.1"]),
    ({"algorithm": {"name": "hacpo", "reward_min": float("inf")}}, ["reward_min", "inf"]),
    ({"algorithm": {"name": "hacpo", "baseline": "mean"}}, ["algorithm: baseline", "'joint'", "'mean'"]),
    ({"algorithm": {"name": "hacpo", "capability": {"window": 0}}}, ["capability", "window must be at least 1", "0"]),
    ({"algorithm": {"name": "hacpo", "capability": {"window": True}}}, ["capability", "window is a number, not true"]),
    ({"algorithm": {"name": "hacpo", "capability": {"ratio_min": 2}}}, ["capability", "ratio_min <= 1", "2"]),
    ({"algorithm": {"name": "grpo", "epsilon": -0.2}}, ["epsilon", "-0.2"]),
    ({"algorithm": {"name": "gspo", "beta": -1}}, ["beta", "-1"]),
    ({"agents": []}, ["agents: needs 1 or more entries (got [])"]),
    ({"agents": {"a": "zoo:llama-weak"}}, ["agents", "list"]),
    ({"agents": ["zoo:llama-weak"]}, ["agents.0", "'zoo:llama-weak'"]),
    ({"agents": ["smol", "smol"]}, ["agents.0: expected {id: NAME, model: MODEL}, not 'smol'"]),
    ({"agents": "smol"}, ["agents: expected a list of {id: NAME, model: MODEL}, not 'smol'"]),
    ({"agents": [{"id": "a"}]}, ["agents.0.model: missing"]),
    ({"agents": [{"id": "../a", "model": "x"}]}, ["agents.0.id", "'../a'"]),
    (
        {"agents": [{**PAIR[0], "engine": "vllm", "top_p": 0.9, "temperature": 0.8}]},
        ["agents.0", "with top_p or top_k use temperature: 1, or engine: native"],
    ),
    (
        {"agents": [{**PAIR[0], "engine": "vllm", "lora": {"r": 600}}]},
        ["agents.0", "vLLM takes adapters of rank 512 at most, not 600"],
    ),
    (
        {"agents": [{**PAIR[0], "vllm_importance_sampling_correction": True, "recompute_logprobs": False}]},
        ["vllm_importance_sampling_correction", "leave recompute_logprobs out"],
    ),
    (
        {"agents": [{**PAIR[0], "vllm_importance_sampling_clip_min": 3}]},
        ["clip_min (3.0) must be less", "clip_max (3.0)"],
    ),
    (
        {"agents": [{**PAIR[0], f"{CORRECTION}mode": "token_truncate", f"{CORRECTION}clip_max": None}]},
        ["vllm_importance_sampling_mode", "set vllm_importance_sampling_clip_max"],
    ),
    (
        {"sampler_ratio_max": 2, "vllm_importance_sampling_clip_max": 3},
        ["`sampler_ratio_max` is the old name of `vllm_importance_sampling_clip_max`, and both are there"],
    ),
    ({"agents": [{**PAIR[0], "num_generations": True}]}, ["agents.0", "num_generations is a number, not true"]),
    ({"task": "gym:chain_sum"}, ["task: expected a section, not 'gym:chain_sum'", "write task.name=gym:chain_sum"]),
    ({"task": "mine.jsonl"}, ["task: expected a section, not 'mine.jsonl'", "write task.train=mine.jsonl"]),
    ({"task": {"name": "aritmetic"}}, ["task.name", "'arithmetic'", "'aritmetic'"]),
    ({"task": {**FILE_TASK, "reward": 3}}, ["task.reward: expected exact, math, module:function", "not 3"]),
    ({"task": {**FILE_TASK, "reward": ["exact", 3]}}, ["task.reward: entry 1: expected exact, math", "not 3"]),
    ({"task": {**FILE_TASK, "reward": ["exact", "soft_overlong"]}}, ["task.reward.1", "needs max_completion_length"]),
    (
        {"task": {**FILE_TASK, "reward": ["exact", {**OVERLONG, "soft_punish_cache": 65}]}},
        ["task.reward.1", "soft_punish_cache of at most that"],
    ),
    (
        {"task": {**FILE_TASK, "reward": [{**OVERLONG, "name": "exact"}]}},
        ["task.reward.0", "soft_punish_cache are for soft_overlong"],
    ),
    ({"task": {**FILE_TASK, "reward": [OVERLONG]}}, ["task", "penalty beside a reward"]),
    # Combinations that make no sense.
    ({"agents": [PAIR[0], PAIR[0]]}, ["every id must be unique", "a, a"]),
    ({"task": {"eval_size": 3}}, ["task: train is missing", "or give name"]),
    ({"task": {**FILE_TASK, "name": "arithmetic"}}, ["task", "either name", "not both"]),
    ({"task": {"train": "train.jsonl"}}, ["task", "reward is missing"]),
    ({"task": {**FILE_TASK, "reward": []}}, ["task", "reward is missing"]),
    ({"task": {"name": "arithmetic", "reward": "exact"}}, ["task", "own verifier"]),
    ({"task": {"name": "arithmetic", "eval": "eval.jsonl"}}, ["task", "own held-out problems"]),
    ({"task": {"name": "arithmetic", "min_operators": 4}}, ["task", "min_operators is larger than max_operators"]),
    ({"task": {"name": "arithmetic", "eval_split": "train"}}, ["task", "eval_split", "validation"]),
    ({"task": FILE_TASK, "keep_best": True}, ["keep_best", "task.eval"]),
    ({"max_steps": 1.5}, ["max_steps: expected a whole number (got 1.5)"]),
    ({"learning_rate": None}, ["learning_rate: expected a number (got None)"]),
    ({"temperature": math.inf}, ["temperature: expected a finite number (got inf)"]),
    ({"temperature": 0}, ["temperature: must be greater than 0 (got 0)"]),
    ({"adam_beta1": 1}, ["adam_beta1: must be less than 1 (got 1)"]),
    ({"overlap": 2}, ["overlap: must be at most 1 (got 2)"]),
    ({"dtype": "bf16"}, ["dtype: expected 'float32' or 'bfloat16' (got 'bf16')"]),
    ({"device": "gpu"}, ["device: expected auto, cpu, cuda or cuda:NUMBER (got 'gpu')"]),
    ({"agents": [{**PAIR[0], "id": "a b"}]}, ["id: expected letters, digits, '.', '_' and '-', first a letter or"]),
    ({"lora": True}, ["lora: expected a section with keys (r, alpha, target_modules) (got True)"]),
    ({"vllm": 0.4}, ["vllm: expected a section of keys and values (got 0.4)"]),
    ({"reward": "math"}, ["unknown key 'reward' (set to 'math'); it belongs to the section task: task.reward"]),
]


@pytest.mark.parametrize(("changes", "fragments"), REFUSED, ids=[str(changes)[:60] for changes, _ in REFUSED])
def test_refused_with_the_place_and_the_value(changes: dict[str, Any], fragments: list[str]) -> None:
    message = refusal(changes)
    assert message.startswith("run.yaml: ")
    for fragment in fragments:
        assert fragment in message
    assert len(message.splitlines()) == 1


def test_every_mistake_is_told_and_a_shared_one_once() -> None:
    message = refusal({"temperature": -1, "sead": 3, "agents": [PAIR[0], {**PAIR[1], "top_k": -2}]})
    assert message.count("temperature") == 1
    assert "sead: unknown key 'sead' (set to 3); did you mean seed?" in message
    assert "agents.1.top_k: must be at least 0 (got -2)" in message
    assert len(message.splitlines()) == 3


def test_a_missing_section_is_named() -> None:
    with pytest.raises(UserError, match=r"^my\.yaml: agents: missing\ntask: missing$"):
        RunConfig.from_dict({"seed": 1}, "my.yaml")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("agents: [", ["not valid YAML"]),
        ("- a\n- b\n", ["keys and values"]),
        ("", ["keys and values"]),
        ("seed: 2026-13-01", ["not valid YAML", "month"]),
        ("1: 2", ["1: Keys should be strings", "agents: missing"]),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        RunConfig.load(path)
    assert str(path) in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_what_is_no_source() -> None:
    for source in (None, 3, ["zoo:llama-weak"]):
        with pytest.raises(UserError, match="Expected a preset, a YAML file or a dict of settings, not "):
            RunConfig.load(source)  # type: ignore[arg-type]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00seed")
    with pytest.raises(UserError, match="not valid YAML"):
        RunConfig.load(path)


def test_a_file_or_preset_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'dmeo' is neither a file nor a preset; did you mean demo\?"):
        RunConfig.load("dmeo")
    with pytest.raises(UserError, match=r"There is no file .*missing\.yaml\. A preset \(demo, "):
        RunConfig.load(tmp_path / "missing.yaml")


def test_the_folder_of_a_run_is_to_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    with pytest.raises(UserError, match="--resume"):
        RunConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("reward", "options", "said"),
    [
        (
            ["math", "my.py:short"],
            {},
            "Answers that are wrong for math may be imitated: other rewards alone reach 1, from",
        ),
        ([{"name": "my.py:form", "weight": 2}, {"name": "math", "weight": 10}], {}, "wrong for math may be imitated"),
        (
            [{"name": "math", "weight": 0.5}],
            {},
            "The weights of the rewards add up to 0.5, and an answer is right from 1",
        ),
        (["math", {"name": "my.py:short", "weight": 0.2}], {}, None),
        ([{"name": f"my.py:{name}", "weight": w} for name, w in (("a", 0.7), ("b", 0.2), ("c", 0.1))], {}, None),
        (["math", "my.py:short"], {"min_reward": 2.0}, None),
        (["math", "my.py:short"], {"when": "never"}, None),
        ("math", {}, None),
    ],
)
def test_rewards_that_do_not_go_with_imitation(reward: Any, options: dict[str, Any], said: str | None) -> None:
    changes = {"task": {**FILE_TASK, "reward": reward}, "algorithm": {"name": "hacpo_robust", "imitation": options}}
    remarks = RunConfig.from_dict({**BASE, **changes}).remarks()
    doubts = [remark for remark in remarks if "imitation.min_reward" in remark]
    assert len(doubts) == (said is not None)
    assert said is None or said in doubts[0]


# --- schedules and groups ------------------------------------------------------------------------------------------


def test_a_band_that_closes_is_refused_unless_asked_for() -> None:
    # 32 prompts of 16 rollouts in updates of 64: 8 updates. The bound of the last, 1 - 0.2 + 7 * 0.03, is above 1.
    tight = {"rollouts_per_update": 64, "algorithm": {"name": "hacpo", "delta": 0.2, "delta_step": 0.03}}
    message = refusal(tight)
    for fragment in ("delta 0.2", "delta_step 0.03", "8 updates", "allow_closed_band", "rollouts_per_update"):
        assert fragment in message
    assert load(tight, "algorithm.allow_closed_band=true").algorithm.name == "hacpo"
    assert load(tight, "algorithm.delta_step=0.025").algorithm.name == "hacpo"
    assert load(tight, "algorithm.delta_step=0").algorithm.name == "hacpo"
    assert load(tight, "algorithm.cross_clip=false").algorithm.name == "hacpo"
    assert load({**tight, "agents": PAIR[:1]}, "num_generations=16").algorithm.name == "hacpo"


def test_passes_over_a_batch_count_as_updates_of_the_schedule() -> None:
    assert load({"rollouts_per_update": 128}).updates_per_step(load().agents[0]) == 4
    assert "12 updates" in refusal({"agents": [PAIR[0], {**PAIR[1], "num_iterations": 3}]})


@pytest.mark.parametrize("name", ["gspo", "grpo", "swarm", "success_gated"])
def test_one_generation_is_refused_where_an_agent_is_compared_with_itself_alone(name: str) -> None:
    message = refusal({"algorithm": {"name": name}, "agents": [PAIR[0], {**PAIR[1], "num_generations": 1}]})
    assert "agents.b.num_generations: 1" in message
    assert "at least 2" in message


@pytest.mark.parametrize("name", ["hacpo", "naive", "ftis", "luffy"])
def test_one_generation_is_enough_where_others_sample_too(name: str) -> None:
    assert load({"algorithm": {"name": name}, "num_generations": 1}).rollouts_per_prompt(load().agents[0]) == 2
    assert "agents.a.num_generations: 1" in refusal({"agents": PAIR[:1], "num_generations": 1})


@pytest.mark.parametrize(
    ("prompts", "generations", "per_update", "algorithm", "updates"),
    [
        (32, [8, 8], 128, "gspo", [2, 2]),
        (32, [8, 8], 128, "hacpo", [4, 4]),
        (32, [16, 16], 128, "gspo", [4, 4]),
        (32, [4, 12], 64, "grpo", [2, 6]),
        (32, [4, 12], 64, "naive", [8, 8]),
        (32, [4, 12], 64, "ftis", [8, 8]),
        (32, [8, 8, 8], 128, "swarm", [2, 2, 2]),  # it trains on as many rollouts as gspo
        (32, [4, 12], 64, "swarm", [4, 4]),
        (32, [8, 8, 8, 8], 128, "hacpo", [8, 8, 8, 8]),
        (128, [8, 8], 512, "hacpo", [4, 4]),
        (2, [2, 2], 128, "hacpo", [1, 1]),
        (2, [64, 64], 16, "gspo", [2, 2]),  # never less than one prompt
    ],
)
def test_updates_per_step(
    prompts: int, generations: list[int], per_update: int, algorithm: str, updates: list[int]
) -> None:
    agents = [{"id": f"a{k}", "model": "x", "num_generations": g} for k, g in enumerate(generations)]
    options = {"name": algorithm} | ({"delta_step": 0} if algorithm == "hacpo" else {})
    changes = {"algorithm": options, "agents": agents, "prompts_per_step": prompts, "rollouts_per_update": per_update}
    config = load(changes)
    assert [config.updates_per_step(agent) for agent in config.agents] == updates
    assert config.rollouts_per_step == prompts * sum(generations)


# --- settings of one agent -----------------------------------------------------------------------------------------


def test_an_agents_settings_override_the_runs() -> None:
    own = {
        "learning_rate": 2e-5,
        "num_generations": 4,
        "stop": ["\n"],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    config = load({"learning_rate": 3e-5, "temperature": 0.7, "agents": [PAIR[0], {**PAIR[1], **own}]})
    a, b = config.agents
    assert (a.learning_rate, a.num_generations, a.stop, a.chat_template_kwargs) == (3e-5, 8, [], {})
    assert (b.learning_rate, b.num_generations, b.stop, b.chat_template_kwargs) == tuple(own.values())
    assert a.temperature == b.temperature == 0.7


def test_agents_made_in_python_share_the_runs_settings_too() -> None:
    agents = [AgentConfig(id="a", model="x"), AgentConfig(id="b", model="y", learning_rate=1e-3)]
    config = RunConfig(agents=agents, task=TaskConfig(name="arithmetic"), learning_rate=1e-4)
    assert [agent.learning_rate for agent in config.agents] == [1e-4, 1e-3]


def test_rewards_are_one_name_or_a_list_with_weights() -> None:
    one = load({"task": FILE_TASK}).task.reward
    assert [(reward.name, reward.weight) for reward in one] == [("exact", 1.0)]
    several = load({"task": {**FILE_TASK, "reward": ["math", {"name": "mine:length", "weight": 0.1}]}}).task.reward
    assert [(reward.name, reward.weight) for reward in several] == [("math", 1.0), ("mine:length", 0.1)]


# --- overrides -----------------------------------------------------------------------------------------------------


def test_overrides_reach_nested_keys_and_the_last_one_wins() -> None:
    config = load(
        None,
        "algorithm.alpha=3",
        "algorithm.capability.window=9",
        "task.eval_size=7",
        "seed=1",
        "learning_rate=1e-6",  # text to YAML, a number to us
        "stop=[END, '###']",
        "chat_template_kwargs.enable_thinking=false",
        "seed=2",
        "algorithm.alpha=2",
    )
    assert isinstance(config.algorithm, HACPO)
    assert config.algorithm.alpha == 2.0
    assert config.algorithm.capability.window == 9
    assert config.algorithm.capability.ratio_max == 10.0
    assert config.task.eval_size == 7
    assert config.seed == 2
    assert config.agents[1].learning_rate == 1e-6
    assert config.agents[0].stop == ["END", "###"]
    assert config.agents[0].chat_template_kwargs == {"enable_thinking": False}


def test_overrides_find_agents_by_id_and_by_position() -> None:
    config = load(None, "agents.b.learning_rate=1e-3", "agents.0.model=zoo:llama-plus", "agents.1.num_generations=4")
    a, b = config.agents
    assert (a.model, a.learning_rate, a.num_generations) == ("zoo:llama-plus", 1e-6, 8)
    assert (b.model, b.learning_rate, b.num_generations) == ("zoo:llama-small", 1e-3, 4)


def test_overrides_find_agents_whose_ids_have_dots() -> None:
    config = RunConfig.load("paper-qwen3-1.7b-4b", ["agents.qwen3-1.7b-base.learning_rate=2e-6"])
    assert [agent.learning_rate for agent in config.agents] == [2e-6, 1e-6]
    agents = [{"id": "a", "model": "x"}, {"id": "a.b", "model": "y"}]
    assert [agent.model for agent in load({"agents": agents}, "agents.a.b.model=z").agents] == ["x", "z"]


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("seed", ["'seed'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("seed=[1", ["seed", "not valid YAML"]),
        ("seed=2026-13-01", ["seed", "not valid YAML"]),
        ("sed=1", ["sed: unknown key 'sed' (set to 1); did you mean seed?"]),
        ("algorithm.alhpa=1", ["hacpo has no option 'alhpa' (set to 1); did you mean alpha?"]),
        ("agents.c.model=x", ["agents.c.model: there is no item 'c'", "a, b"]),
        ("agents.2.model=x", ["agents.2.model: there is no item '2'", "a, b"]),
        ("task.name.x=1", ["task.name.x", "'arithmetic'"]),
    ],
)
def test_overrides_that_make_no_sense(override: str, fragments: list[str]) -> None:
    message = refusal(None, override)
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.name=gspo", "algorithm.epsilon=0.1"],
        ["algorithm.epsilon=0.1", "algorithm.name=gspo"],
        ["algorithm=gspo", "algorithm.epsilon=0.1"],
        ["algorithm.name=grpo", "algorithm.epsilon=0.1", "algorithm.name=gspo"],
    ],
)
def test_another_algorithm_starts_from_its_own_defaults(overrides: list[str]) -> None:
    section = {"name": "hacpo", "alpha": 3.0, "epsilon_high": 0.5, "beta": 0.1}
    assert load({"algorithm": section}, *overrides).algorithm == GSPO(epsilon=0.1)


def test_the_same_name_again_changes_nothing() -> None:
    preset = RunConfig.load("paper-qwen3-4b-8b")
    assert RunConfig.load("paper-qwen3-4b-8b", ["algorithm.name=hacpo"]) == preset
    assert RunConfig.load("paper-qwen3-4b-8b", ["algorithm.name=gspo", "algorithm.name=hacpo"]) == preset


def test_options_without_a_name_are_the_usual_algorithms() -> None:
    assert load({"algorithm": {}}, "algorithm.beta=0.04").algorithm == RobustHACPO(beta=0.04)
    assert load({"algorithm": {"beta": 0.04}}, "algorithm.name=hacpo_robust").algorithm == RobustHACPO(beta=0.04)


def test_another_algorithm_for_a_section_that_is_only_a_name() -> None:
    assert load({"algorithm": "gspo"}, "algorithm.name=grpo").algorithm == ALGORITHMS["grpo"]()


def test_overrides_leave_the_data_they_are_applied_to_alone() -> None:
    data = {"agents": [{"id": "a", "model": "x"}], "task": {"name": "arithmetic"}}
    apply_overrides(data, ["agents.a.model=y", "task.eval_size=3"])
    assert data == {"agents": [{"id": "a", "model": "x"}], "task": {"name": "arithmetic"}}


# --- the resolved config -------------------------------------------------------------------------------------------

ODD = {
    "agents": [
        {
            **PAIR[0],
            "system_prompt": "Denk nach: 'ja' – \"nein\" 🦙\n\ttab\x1b[31m #no comment",
            "stop": ["\n\n", "é", "1e-6"],
        },
        {**PAIR[1], "learning_rate": 1 / 3, "chat_template_kwargs": {"enable_thinking": False, "n": [1, {"x": None}]}},
    ],
    "task": {
        "train": "a: b.jsonl",
        "eval": "~",
        "reward": [{"name": "math"}, {"name": "m:f", "weight": -0.1}, OVERLONG],
    },
    "algorithm": {
        "name": "hacpo",
        "delta": 0.1 + 0.2,
        "delta_step": 1e-17,
        "capability": {"ratio_max": 1e30},
        "loss_type": "dr_grpo",
        "scale_rewards": False,
        "entropy_coef": 1e-9,
    },
    "save_total_limit": 3,
    "adam_epsilon": 5e-324,
    "output_dir": "runs/ü [red]#1",
}


@pytest.mark.parametrize("changes", [{}, ODD], ids=["plain", "odd"])
def test_the_resolved_config_is_the_config(changes: dict[str, Any], tmp_path: Path) -> None:
    config = load(changes)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.load(path) == config
    assert RunConfig.load(path).to_yaml() == config.to_yaml()


def test_the_resolved_config_names_every_setting() -> None:
    data = resolved(load())
    assert set(data) == set(RunConfig.model_fields)
    assert set(data["task"]) == set(TaskConfig.model_fields)
    assert data["agents"] == PAIR


# --- presets -------------------------------------------------------------------------------------------------------


def test_the_presets() -> None:
    assert preset_names() == sorted([*ZOO_PRESETS, *PAPER])


@pytest.mark.parametrize("name", [*ZOO_PRESETS, *PAPER])
def test_every_preset_loads_for_every_algorithm(name: str) -> None:
    config = RunConfig.load(name)
    assert config.algorithm.name == ("hacpo" if name in PAPER else "hacpo_robust")
    assert config.output_dir == f"runs/{name}"
    assert RunConfig.from_dict(resolved(config)) == config
    for algorithm in ALGORITHMS:
        if algorithm != config.algorithm.name:
            assert RunConfig.load(name, [f"algorithm.name={algorithm}"]).algorithm == ALGORITHMS[algorithm]()


@pytest.mark.parametrize("name", ZOO_PRESETS)
def test_zoo_presets_run_the_default_algorithm(name: str) -> None:
    config = RunConfig.load(name)
    assert config.algorithm == RunConfig.model_fields["algorithm"].default
    named = RunConfig.load(name, ["algorithm.alpha=3", "algorithm.name=hacpo"])
    assert named.algorithm == HACPO(alpha=3.0)


@pytest.mark.parametrize("name", ZOO_PRESETS)
def test_zoo_presets_need_nothing_from_elsewhere(name: str) -> None:
    config = RunConfig.load(name)
    assert all(agent.model.startswith("zoo:") for agent in config.agents)
    assert config.task.name == "arithmetic"
    assert len(config.agents) == (3 if name == "team" else 2)


@pytest.mark.parametrize("name", PAPER)
def test_paper_presets_have_the_papers_settings(name: str) -> None:
    config = RunConfig.load(name)
    alpha, delta, delta_step = PAPER[name]
    assert config.algorithm == HACPO(alpha=alpha, delta=delta, delta_step=delta_step, beta=0.001)
    assert config.prompts_per_step == 128
    for agent in config.agents:
        assert (agent.num_generations, agent.temperature, agent.learning_rate) == (8, 1.0, 1e-6)
        assert (agent.max_prompt_length, agent.max_completion_length) == (1024, 4096)
        # A mini-batch of the paper is 64 prompts of 8 rollouts.
        assert config.rollouts_per_update == 64 * 8
        assert config.updates_per_step(agent) == 4


@pytest.mark.parametrize("name", PAPER)
def test_paper_presets_have_the_settings_of_the_authors_scripts(name: str) -> None:
    for agent in RunConfig.load(name).agents:
        assert agent.prompt_suffix == " Let's think step by step and output the final answer within \\boxed{}."
        assert agent.system_prompt is None
        assert agent.chat_template_kwargs["enable_thinking"] is False
        assert (agent.weight_decay, agent.max_grad_norm) == (0.01, 1.0)


@pytest.mark.parametrize("name", PAPER)
def test_paper_presets_say_where_each_setting_comes_from(name: str) -> None:
    """[p]: the paper; [s]: its authors' scripts; our own settings are those without a mark."""
    lines = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    marks = {line.split(":")[0].strip(): re.findall(r"\[([ps])\]", line) for line in lines if not line.startswith("#")}
    from_paper = {"train", "prompts_per_step", "rollouts_per_update", "num_generations", "temperature", "max_steps"}
    from_paper |= {"max_prompt_length", "max_completion_length"}
    from_scripts = {"eval", "prompt_suffix", "chat_template_kwargs", "learning_rate", "weight_decay", "max_grad_norm"}
    assert {key for key, found in marks.items() if "p" in found} == {"algorithm", *from_paper}
    assert {key for key, found in marks.items() if "s" in found} == {"algorithm", *from_scripts}


@pytest.mark.parametrize("name", ["demo", "paper-qwen3-1.7b-4b"])
def test_gspo_twice_makes_the_updates_of_hacpo_for_twice_the_rollouts(name: str) -> None:
    together = RunConfig.load(name)
    generations = together.num_generations
    alone = RunConfig.load(name, ["algorithm.name=gspo"])
    twice = RunConfig.load(name, ["algorithm.name=gspo", f"num_generations={2 * generations}"])
    for k in range(2):
        updates = [config.updates_per_step(config.agents[k]) for config in (alone, twice, together)]
        assert updates == [updates[0], 2 * updates[0], 2 * updates[0]]
    assert together.rollouts_per_step == alone.rollouts_per_step == twice.rollouts_per_step // 2


@pytest.mark.parametrize(
    "ablation",
    [
        "baseline=joint",
        "cross_omega=false",
        "alpha=0",
        "alpha=1",
        "alpha=2",
        "alpha=3",
        "cross_clip=false",
        "delta_step=0",
        "cross_baseline=source",
        "ratio_unit=byte",
        "baseline_guard=false",
        "capability.include_current=false",
        "capability.metric=positive_rate",
    ],
)
def test_every_ablation_is_one_line(ablation: str) -> None:
    config = RunConfig.load("demo", ["algorithm.name=hacpo", f"algorithm.{ablation}"])
    assert (config.algorithm == HACPO()) == (ablation == "alpha=1")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["algorithm.alpha=3"],
            "hacpo_robust has no option 'alpha' (set to 3); it is an option of hacpo: add algorithm.name=hacpo, or",
        ),
        (
            ["algorithm.share=1"],
            "hacpo_robust has no option 'share' (set to 1); it is an option of swarm: add algorithm.name=swarm, or",
        ),
        (
            ["algorithm.name=gspo", "algorithm.cross_weight=1"],
            "gspo has no option 'cross_weight' (set to 1); it is an option of hacpo or hacpo_robust: "
            "add algorithm.name=hacpo or hacpo_robust, or choose from name, beta, loss_type, scale_rewards, "
            "entropy_coef, imitation, epsilon, epsilon_high",
        ),
    ],
)
def test_an_option_of_another_algorithm_says_whose_it_is(overrides: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        RunConfig.load("demo", overrides)
    assert str(caught.value).startswith(f"demo with {' '.join(overrides)}: algorithm: {said}")


def test_a_part_of_imitation_keeps_the_rest_of_the_algorithms_own_defaults() -> None:
    assert parse_algorithm({"name": "rft", "imitation": {"rate": 1.0}}) == RFT(
        imitation=Imitation(when="end", restart=True, rate=1.0)
    )
    assert parse_algorithm({"name": "gspo", "imitation": {"rate": 1.0}}) == GSPO(imitation=Imitation(rate=1.0))


def test_the_old_name_of_the_sampler_correction_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Given by a user, with a warning; in the files of earlier runs, where it may be null, without one."""
    agents = [{**PAIR[0], "sampler_ratio_max": 4}, PAIR[1]]
    with caplog.at_level(logging.WARNING, "hacrl"):
        config = RunConfig.from_dict({**BASE, "agents": agents, "sampler_ratio_max": 2, "output_dir": str(tmp_path)})
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("config: `sampler_ratio_max: X` is now called `vllm_importance_sampling_clip_max: X`")
    assert [agent.vllm_importance_sampling_clip_max for agent in config.agents] == [4.0, 2.0]
    for agent in config.agents:
        assert agent.corrects_sampler
        assert agent.recomputes_logprobs
        assert agent.vllm_importance_sampling_mode == "token_truncate"
    caplog.clear()
    earlier = {**BASE, "agents": agents, "sampler_ratio_max": None}
    (tmp_path / "config.yaml").write_text(json.dumps(earlier), encoding="utf-8")
    config = RunDir(tmp_path).config()
    assert [agent.corrects_sampler for agent in config.agents] == [True, False]
    assert not caplog.records


def test_the_sampler_is_corrected_for_by_default_with_vllm_only() -> None:
    def corrected(**settings: Any) -> tuple[bool, bool]:
        agent = RunConfig.from_dict({**BASE, **settings}).agents[0]
        return agent.corrects_sampler, agent.recomputes_logprobs

    assert corrected() == (False, False)
    assert corrected(dtype="bfloat16") == (False, True)
    assert corrected(engine="vllm") == (True, True)
    assert corrected(engine="vllm", recompute_logprobs=False) == (False, False)
    assert corrected(engine="vllm", vllm_importance_sampling_correction=False) == (False, False)
    assert corrected(vllm_importance_sampling_correction=True) == (True, True)
