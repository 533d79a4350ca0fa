"""Whether a run fits: what agents need together, and a change that is enough and no larger than needed."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from hacrl.cli import main
from hacrl.config import RunConfig
from hacrl.config.settings import apply_overrides
from hacrl.training import fit
from hacrl.training.fit import COMPUTER, GPUS, USABLE, Memories, Need, computer_gib
from hacrl.training.plan import plan

QWEN3_17B = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16}
QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Folders with the shapes of Qwen3-1.7B and 4B, and no weights."""
    common = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True}
    for name, shape in (("small", QWEN3_17B), ("large", QWEN3_4B)):
        Qwen3Config(**common, **shape).save_pretrained(tmp_path / name)
    return [str(tmp_path / name) for name in ("small", "large")]


def config_of(models: list[str], **settings: Any) -> RunConfig:
    base = {
        "algorithm": {"name": "hacpo"},
        "agents": [{"id": Path(model).name, "model": model} for model in models],
        "task": {"name": "arithmetic"},
        "prompts_per_step": 16,
        "num_generations": 8,
        "max_prompt_length": 256,
        "max_completion_length": 1024,
        "dtype": "bfloat16",
    }
    return RunConfig.from_dict({**base, **settings})


def verdicts(config: RunConfig, gpu: str | None) -> dict[str, str]:
    return {f"{'+'.join(need.agents)} on {need.place}": need.verdict for need in Memories(gpu).needs(config)}


def changed(config: RunConfig, changes: list[str]) -> RunConfig:
    return RunConfig.from_dict(apply_overrides(config.to_dict(), changes))


def fits(config: RunConfig, gpu: str | None = None) -> bool:
    return all(need.fits for need in Memories(gpu).needs(config))


def test_agents_that_share_a_gpu_are_added_up_and_work_in_turns(models: list[str]) -> None:
    """Weights, moments and float32 weights of both stay: 14 bytes a parameter, and 4 of gradients while one learns."""
    settings = {"num_generations": 2, "max_completion_length": 100}
    small, large, together = Memories("h200").needs(config_of(models, device="cuda", **settings))
    rows, idle, turns = plan(config_of(models, device="cuda", **settings)), 0.0, []
    for row, need in zip(rows, (small, large), strict=True):
        idle += 14 * row.parameters / 2**30
        passes = row.memory["activations"] + row.memory["logits"]
        turns.append(4 * row.parameters / 2**30 + passes)
        assert need.planned == pytest.approx(sum(row.memory.values()), rel=1e-6)
        assert need.planned == pytest.approx(18 * row.parameters / 2**30 + row.memory["cache"] + passes)
    assert together.agents == ["small", "large"]
    caches = sum(row.memory["cache"] for row in rows)
    assert idle > GPUS["h200"] / 2  # so nothing is kept that is not needed: not even caches
    assert together.planned == pytest.approx(idle + max(turns))
    assert together.planned < idle + caches + max(turns)
    assert idle < together.least < together.planned
    assert together.there == GPUS["h200"]


def test_idle_agents_move_what_only_learning_needs(models: list[str]) -> None:
    config = config_of(models, device="cuda")
    rows, moving = plan(config), config_of(models, device="cuda", offload_idle=True)
    one = max(18 * row.parameters / 2**30 + row.least_pass for row in rows)
    assert Memories("h200").needs(moving)[2].least == pytest.approx(one + 2 * rows[0].parameters / 2**30)
    assert [row.host_memory for row in plan(moving)] == pytest.approx([12 * row.parameters / 2**30 for row in rows])
    low = plan(config_of(models, device="cuda", gradient_dtype="bfloat16"))
    for row, own in zip(rows, low, strict=True):
        assert sum(row.memory.values()) - sum(own.memory.values()) == pytest.approx(2 * row.parameters / 2**30)


def test_verdicts(models: list[str]) -> None:
    config = config_of(models)
    assert verdicts(config, "h200") == {
        "small on cuda:0": "fits",
        "large on cuda:0": "fits, with smaller passes",
        "small+large on cuda:0": "fits, with smaller passes",
    }
    apart = changed(config, ["agents.large.device=cuda:1"])
    assert verdicts(apart, "h200") == {"small on cuda:0": "fits", "large on cuda:1": "fits, with smaller passes"}
    by_ray = config_of(models, execution="ray")
    assert list(verdicts(by_ray, "h200")) == ["small on GPU of small", "large on GPU of large"]
    half = Memories("h200").needs(config_of(models, execution="ray", resources={"num_gpus": 0.5}))
    assert {need.there for need in half} == {GPUS["h200"] / 2}
    assert list(verdicts(config_of(models, device="cuda", fsdp=2), "h200"))[2:] == [
        "small+large on cuda:0",
        "small+large on cuda:1",
    ]


def test_a_memory_is_not_filled_to_the_brim() -> None:
    assert Need(["a"], "cuda:0", USABLE * 10, 1, 10).verdict == "fits"
    assert Need(["a"], "cuda:0", USABLE * 10 + 0.01, 1, 10).verdict == "fits, with smaller passes"
    assert Need(["a"], "cuda:0", 20, USABLE * 10 + 0.01, 10).verdict == "does not fit"
    assert Need(["a"], "cuda:0", 20, 20, None).verdict == "not known"


def test_passes_of_fsdp_do_not_get_smaller(models: list[str]) -> None:
    config = config_of(models[1:], algorithm={"name": "gspo"}, device="cuda", fsdp=2)
    need = Memories("h200").needs(config)[0]
    assert need.least == pytest.approx(need.planned - plan(config)[0].memory["cache"])


def test_vllm_takes_its_share(models: list[str]) -> None:
    own = Memories("h200").needs(config_of(models[:1], device="cuda"))[0]
    for options, share in (({}, 0.3), ({"gpu_memory_utilization": 0.4}, 0.4)):
        need = Memories("h200").needs(config_of(models[:1], device="cuda", engine="vllm", vllm=options))[0]
        assert need.planned == pytest.approx(own.planned + share * GPUS["h200"])


@pytest.mark.parametrize(
    ("gpu", "settings", "changes"),
    [
        ("h200", {}, []),
        ("h200", {"max_completion_length": 4096}, []),
        ("h200", {"sampling_batch_size": 64, "log_kl": True, "optimizer_offload": True}, []),
        ("h100", {}, ["agents.large.device=cuda:1"]),
        ("h100", {"max_completion_length": 2048}, ["agents.large.device=cuda:1"]),
        ("4090", {}, ["optimizer_offload=true"]),
        ("l40s", {"dtype": "float32", "lora": {"r": 16}}, []),
        ("l40s", {"max_completion_length": 2048}, ["optimizer_offload=true"]),  # not fsdp=8
        ("4090", {"dtype": "float32", "lora": {"r": 16}, "sampling_batch_size": 8}, ["agents.large.device=cuda:1"]),
    ],
)
def test_a_change_that_is_enough(models: list[str], gpu: str, settings: dict[str, Any], changes: list[str]) -> None:
    config = config_of(models, **settings)
    assert fits(config, gpu) == (not changes)
    assert Memories(gpu).smallest_change(config) == changes
    assert fits(changed(config, changes), gpu)


def test_sampling_falls_back_to_one_completion_at_a_time(models: list[str]) -> None:
    config = config_of(models, device="cuda", max_completion_length=20_000)
    rows, together = plan(config), Memories("h200").needs(config)[2]
    assert sum(row.memory["cache"] for row in rows) > GPUS["h200"]
    for row, layers in zip(rows, (28, 36), strict=True):  # keys and values of 8 heads of 128, two bytes each
        assert row.least_cache * 2**30 == layers * 2 * 8 * 128 * 2 * 20_256
    assert together.verdict == "fits, with smaller passes"


def test_a_batch_is_no_smaller_than_needed(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where batches do not get smaller by themselves."""
    monkeypatch.setattr(fit, "computer_gib", lambda: GPUS["h100"])
    settings = {"prompts_per_step": 128, "max_completion_length": 4096, "log_kl": False, "device": "cpu"}
    config = config_of(models[:1], **settings, algorithm={"name": "gspo"}, sampling_batch_size=1024)
    (change,) = Memories().smallest_change(config) or []
    name, _, size = change.partition("=")
    assert name == "sampling_batch_size"
    assert fits(changed(config, [change]))
    assert not fits(changed(config, [f"{name}={2 * int(size)}"]))


def test_an_agent_with_settings_of_its_own_is_named(models: list[str]) -> None:
    config = changed(config_of(models, device="cuda"), ["agents.large.device=cuda:1", "agents.large.log_kl=false"])
    changes = Memories("l40s").smallest_change(config)
    assert changes
    assert all(change.startswith("agents.large.") for change in changes)
    assert fits(changed(config, changes), "l40s")


def test_what_nothing_makes_fit(models: list[str]) -> None:
    config = config_of(models * 1, max_prompt_length=500_000, max_completion_length=500_000, dtype="float32")
    assert Memories("4090").smallest_change(config) is None


def test_without_a_gpu_all_agents_are_in_this_computer(models: list[str]) -> None:
    config = config_of(models, device="cpu")
    small, large, together = Memories().needs(config)
    assert {need.place for need in (small, large, together)} == {COMPUTER}
    assert together.planned == pytest.approx(small.planned + large.planned)
    assert together.there == computer_gib() > 0.1
    assert Memories("h200").needs(config)[2].there == computer_gib()  # the config says cpu
    (unknown,) = Memories().needs(config_of(models[:1], device="cuda:7"))
    assert unknown.verdict == "not known"


# --- the command ---------------------------------------------------------------------------------------


DryRun = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> DryRun:
    """`hacrl train` with a config and arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(config: RunConfig, *arguments: str) -> tuple[int, str, str]:
        Path("run.yaml").write_text(config.to_yaml(), encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["hacrl", "train", "run.yaml", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def test_the_dry_run_says_whether_it_fits(dry_run: DryRun, models: list[str]) -> None:
    config = config_of(models)
    code, out, _ = dry_run(config, "--dry-run", "--gpu", "h200")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "139.8" in line]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        ("small", "cuda:0, h200", "fits"),
        ("large", "cuda:0, h200", "fits, with smaller passes"),
        ("small + large", "cuda:0, h200", "fits, with smaller passes"),
    ]
    assert "The settings are valid" in out
    code, out, _ = dry_run(config, "--dry-run", "--gpu", "h100")
    assert code == 0
    assert "The run does not fit: it would with agents.large.device=cuda:1." in out
    assert "The settings are valid" not in out
    assert "device: cuda" not in out  # the config is the one that was given
    code, out, _ = dry_run(config, "agents.large.device=cuda:1", "--dry-run", "--gpu", "h200")
    assert code == 0
    assert "The settings are valid" in out
    assert "does not fit" not in out


def test_the_dry_run_names_the_computer_s_own_memory(dry_run: DryRun) -> None:
    agents = [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-minus"}]
    task = {"name": "arithmetic"}
    config = RunConfig.from_dict({"agents": agents, "task": task, "max_prompt_length": 32, "max_completion_length": 8})
    code, out, _ = dry_run(config, "--dry-run")
    assert code == 0
    assert "a + b │ this computer" in out
    assert "This computer has no GPU: agents are compared with its own memory." in out
    assert "The settings are valid" in out
    code, out, _ = dry_run(config, "device=cuda:7", "--dry-run")
    assert "not known" in out
    assert "This computer does not have these GPUs. Name theirs" in out


def test_errors_of_the_data_come_before_estimates(dry_run: DryRun, models: list[str]) -> None:
    changes = ["task.name=null", "task.train=none.jsonl", "task.reward=exact"]
    code, out, err = dry_run(config_of(models), *changes, "--dry-run")
    assert (code, out) == (2, "")
    assert "There is no data set none.jsonl" in err


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--dry-run", "--gpu", "h20"], "--gpu: unknown GPU 'h20'; did you mean h200?"),
        (["--gpu", "h200"], "--gpu is for --dry-run"),
    ],
)
def test_gpus_that_cannot_be_compared(dry_run: DryRun, models: list[str], arguments: list[str], fragment: str) -> None:
    code, out, err = dry_run(config_of(models), *arguments)
    assert (code, out) == (2, "")
    assert fragment in err
