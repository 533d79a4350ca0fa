"""The plan of a run against what was measured (docs/speed.md), and against the rules of the executors."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from hacrl.config import RunConfig
from hacrl.execution.local import THREADS
from hacrl.training.plan import plan, side_by_side, step_seconds


@pytest.fixture
def smollm2(tmp_path: Path) -> str:
    """A folder with the shape of SmolLM2-135M, and no weights."""
    LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    return str(tmp_path)


def config_of(*models: str, size: tuple[int, int, int, int], **settings: Any) -> RunConfig:
    """`size`: prompts, their tokens, completions of each, their tokens."""
    prompts, prompt, generations, completion = size
    base = {
        "algorithm": {"name": "gspo"},
        "agents": [{"id": f"a{i}", "model": model} for i, model in enumerate(models)],
        "task": {"name": "arithmetic"},
        "prompts_per_step": prompts,
        "max_prompt_length": prompt,
        "num_generations": generations,
        "max_completion_length": completion,
        "sampling_batch_size": 4096,
        "log_kl": False,
    }
    return RunConfig.from_dict({**base, **settings})


GPU = {"dtype": "bfloat16", "device": "cuda:1", "recompute_logprobs": False}
"""A GPU that the machine of the tests need not have: a plan may be for another."""
TWO_CORES = {"device": "cpu", "execution": "ray", "resources": {"num_cpus": 2}}


def test_estimates_are_what_was_measured_on_an_h200(smollm2: str) -> None:
    for prompts, measured in ((32, 196_122), (128, 400_543)):
        (row,) = plan(config_of(smollm2, size=(prompts, 48, 8, 128), **GPU))
        assert prompts * 8 * 128 / row.sampling == pytest.approx(measured, rel=0.05)
    (row,) = plan(config_of(smollm2, size=(32, 1, 2, 192), **GPU))
    assert 64 * 192 / row.learning == pytest.approx(268_048, rel=0.05)
    assert row.device == "1 x H200"


@pytest.mark.parametrize(
    ("model", "size", "sampling", "learning"),
    [("zoo:llama-plus", (32, 10, 8, 64), 0.677, 0.639), ("smollm2", (4, 58, 8, 48), 7.4, 10.3)],
)
def test_estimates_are_what_was_measured_on_two_cores(
    smollm2: str, model: str, size: tuple[int, int, int, int], sampling: float, learning: float
) -> None:
    (row,) = plan(config_of(smollm2 if model == "smollm2" else model, size=size, **TWO_CORES))
    assert row.sampling == pytest.approx(sampling, rel=0.1)
    assert row.learning == pytest.approx(learning, rel=0.1)


def test_the_passes_of_learning(smollm2: str) -> None:
    """Forward and backward count 3; the look at others' rollouts, old log-probabilities and the start 1 each."""
    size = (32, 1, 8, 128)
    own = plan(config_of(smollm2, size=size, **GPU))[0].learning
    prompt, rollouts = 1, 8 * 128  # tokens of a group
    changes: list[tuple[dict[str, Any], float]] = [
        ({"num_iterations": 2}, 2),
        ({"recompute_logprobs": True}, 4 / 3),
        ({"gradient_checkpointing": True}, 4 / 3),
        ({"log_kl": True}, 1 + 1 / 3 / 2),  # in the first of two updates
        ({"algorithm": {"name": "gspo", "beta": 0.1}}, 4 / 3),
        ({"fsdp": 4}, 1 / 4),
    ]
    for change, times in changes:
        assert plan(config_of(smollm2, size=size, **{**GPU, **change}))[0].learning == pytest.approx(times * own)
    three = [smollm2] * 3
    for name, times in (("hacpo", 4), ("hacpo_robust", 3)):  # the second needs no look: it keeps all
        algorithm = {"name": name}
        foreign = times * (prompt + 2 * rollouts) / (3 * (prompt + rollouts))
        row = plan(config_of(*three, size=size, **{**GPU, "algorithm": algorithm}))[0]
        assert row.learning == pytest.approx((1 + foreign) * own)


def test_who_works_at_the_same_time(smollm2: str) -> None:
    agents, size = ("zoo:llama-small", "zoo:llama-large"), (32, 10, 8, 64)
    local = config_of(*agents, size=size, device="cuda")
    by_ray = config_of(*agents, size=size, device="cuda", execution="ray")
    small, large = plan(local)
    assert plan(by_ray) == [small, large]
    every = small.sampling + small.learning + large.sampling + large.learning
    assert step_seconds(local, [small, large]) == pytest.approx(every)
    assert step_seconds(by_ray, [small, large]) == pytest.approx(large.sampling + large.learning)
    two_cores = plan(config_of(*agents, size=size, **TWO_CORES))
    local_cpu = [config_of(smollm2, size=size, device="cpu", fsdp=fsdp) for fsdp in (1, THREADS)]
    alone, sharded = [plan(config)[0] for config in local_cpu]  # the same cores, in one process or in several
    assert alone.device == sharded.device
    assert sharded.learning == pytest.approx(alone.learning)
    assert side_by_side(local) == 1
    assert side_by_side(config_of(*agents, size=size, device="cuda", fsdp=2)) == min(2, THREADS)
    one_core = plan(config_of(*agents, size=size, **{**TWO_CORES, "resources": {"num_cpus": 1}}))
    assert [row.learning for row in one_core] == pytest.approx([2 * row.learning for row in two_cores])


def test_memory_is_what_was_measured_and_what_a_process_holds(smollm2: str) -> None:
    (row,) = plan(config_of(smollm2, size=(32, 1, 2, 192), **GPU))
    passes = sum(row.memory[name] for name in ("weights", "activations", "logits"))
    gradients = row.parameters * 2 / 2**30  # measured without an optimizer
    assert 7.5 < passes + gradients < 1.12 * 7.5  # this model has no norms of queries, which the estimate includes
    (row,) = plan(config_of(smollm2, size=(4, 58, 8, 48), **TWO_CORES))
    assert sum(row.memory.values()) == pytest.approx(4.8, rel=0.05)
    # 30 layers, keys and values of 3 heads of 64, two bytes each; 256 rows of 128 tokens, 32 prompts of 48.
    (row,) = plan(config_of(smollm2, size=(32, 48, 8, 128), **GPU))
    assert row.memory["cache"] * 2**30 == 30 * 2 * 3 * 64 * 2 * (256 * 128 + 32 * 48)
    (part,) = plan(config_of(smollm2, size=(32, 48, 8, 128), fsdp=4, **GPU))
    assert part.memory["cache"] == row.memory["cache"] / 4
    assert part.memory["activations"] == row.memory["activations"] / 4
