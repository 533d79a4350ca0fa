"""Adapters: what is driven is what PEFT computes, nothing but adapters moves, and agents share one model."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from conftest import FAST, MakeConfig
from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.algorithms import GSPO, HACPO
from hacrl.cli import app
from hacrl.config import AgentConfig, RunConfig
from hacrl.decoder import Backbone
from hacrl.decoder.scoring import Scorer
from hacrl.errors import UserError
from hacrl.evaluation.heldout import evaluate_target
from hacrl.execution import local
from hacrl.learners.lora import Adapter, with_same_weights
from hacrl.run import resumed_config, train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.checkpoint import complete_checkpoints
from hacrl.training.export import export_run
from hacrl.training.plan import plan
from hacrl.training.run_dir import RunDir
from tiny_models import ARCHITECTURES, compute_in_full, distance, gradients, logprobs_one_by_one, tiny

PROMPTS = [[5, 7, 11, 13], [5, 7, 11, 13], [17, 19, 23]]
COMPLETIONS = [[29, 31, 37], [41, 43], [47, 53, 59, 61]]


def agent_config(**settings: Any) -> AgentConfig:
    options = {"log_kl": False, "fast": FAST, "lora": {"r": 4}, "max_completion_length": 20, **settings}
    return AgentConfig(id="a", model=options.pop("model", "zoo:llama-plus"), **options)


def make_agent(index: int = 0, **settings: Any) -> Agent:
    bases, algorithm = settings.pop("bases", None), settings.pop("algorithm", GSPO())
    return Agent(agent_config(**settings), index, algorithm, seed=0, bases=bases)


def shake(parameters: Iterator[nn.Parameter] | list[nn.Parameter], seed: int = 0) -> None:
    """Away from the start, where adapters add nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def opened_from(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run_config(make_config: MakeConfig, **changes: Any) -> RunConfig:
    """Two agents with adapters on one model."""
    agents = [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-plus"}]
    return make_config(**{"agents": agents, "lora": {"r": 4}, "learning_rate": 1e-3, "save_every": 1, **changes})


# --- the driven model ----------------------------------------------------------------------------------


SOME = [("llama", ["v_proj"]), ("qwen3", ["q_proj", "up_proj"]), ("gpt_neox", ["dense"]), ("phi3", ["qkv_proj"])]


@pytest.mark.parametrize(("kind", "layers"), [*((kind, None) for kind in ARCHITECTURES), *SOME])
def test_driven_adapters_have_the_plain_log_probabilities_and_gradients(
    kind: str, layers: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters on some layers only, leaner versions stay in place for the others."""
    model = tiny(kind, torch.float64)
    compute_in_full(model, monkeypatch)
    Adapter(model, agent_config(lora={"r": 4, "target_modules": layers}), "none", seed=0)
    model.to(torch.float64)
    backbone = Backbone(model)
    shake(model.parameters())
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < len(trained) < len(list(model.parameters()))

    with backbone.driven():
        scored = Scorer(backbone)(PROMPTS, COMPLETIONS, 1.5)
    scored.logp_NT.square().sum().backward()
    driven = [g for g, p in zip(gradients(model), model.parameters(), strict=True) if p.requires_grad]
    expected = torch.zeros_like(scored.logp_NT)
    for n, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        logp_TV = logprobs_one_by_one(model, prompt, completion, 1.5)
        expected[n, : len(completion)] = logp_TV[range(len(completion)), completion]
    expected.square().sum().backward()
    plain = [g for g, p in zip(gradients(model), model.parameters(), strict=True) if p.requires_grad]
    assert torch.allclose(scored.logp_NT, expected, atol=1e-9)
    assert distance(driven, plain) < (1e-6 if kind == "cohere" else 1e-8)  # which turns heads in float32


def test_models_on_the_same_weights_join_them_once() -> None:
    """Otherwise each would move them away from the others, and in several threads."""
    base = tiny("llama").requires_grad_(False)
    models = [with_same_weights(base) for _ in range(3)]
    Adapter(models[1], agent_config(lora={"target_modules": ["q_proj"]}), "none", seed=0)
    backbones = [Backbone(model) for model in models]
    places = [parameter.data_ptr() for parameter in base.parameters()]
    for backbone in backbones:
        with backbone.driven():
            pass
        assert backbone.moved == 0
    assert [parameter.data_ptr() for parameter in base.parameters()] == places
    joined = [backbone.lean.joined for backbone in backbones if backbone.lean is not None]
    assert [len(own) for own in joined] == [4, 2, 4]
    assert joined[0][1].weight.data_ptr() == joined[1][0].weight.data_ptr() == joined[2][1].weight.data_ptr()


# --- agents --------------------------------------------------------------------------------------------


def test_agents_share_the_model_and_differ_in_their_adapters() -> None:
    bases: dict[Any, Any] = {}
    first, second = (make_agent(index, bases=bases, log_kl=True) for index in range(2))
    other = make_agent(2, bases=bases, model="zoo:llama-minus")
    assert len(bases) == 2
    base = set(next(iter(bases.values())).parameters())
    for agent in (first, second):
        own = set(agent.model.parameters())
        assert base < own
        assert own - base == set(agent.weights.weights)
        assert not any(parameter.requires_grad for parameter in base)
    assert not base & set(other.model.parameters())
    pairs = list(zip(first.opened.adapter.parameters, second.opened.adapter.parameters, strict=True))
    assert any(not torch.equal(one, two) for one, two in pairs)
    assert not {id(one) for one, _ in pairs} & {id(two) for _, two in pairs}


def test_the_start_of_adapters_is_a_function_of_seed_and_agent() -> None:
    state = torch.get_rng_state()
    first = make_agent()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again = make_agent()
    for one, other in zip(first.opened.adapter.parameters, again.opened.adapter.parameters, strict=True):
        assert torch.equal(one, other)


def test_the_kl_is_to_the_model_without_adapters() -> None:
    """Of which there is no second copy."""
    agent = make_agent(algorithm=HACPO(beta=0.1), log_kl=True)
    with torch.no_grad():
        plain = opened_from(ZOO / "llama-plus")
        ids = [[3, 4], [5, 6], [7, 8]]
        prompts = [[3, 4, 5], [6, 7], [8]]
        start = agent.learner.reference(prompts, ids, 1.0).logp_NT
        expected = torch.stack(
            [logprobs_one_by_one(plain, p, c, 1.0)[range(2), c] for p, c in zip(prompts, ids, strict=True)]
        )
        assert torch.allclose(start.double(), expected, atol=1e-5)
        shake(agent.weights.weights)
        assert torch.equal(agent.learner.reference(prompts, ids, 1.0).logp_NT, start)
        assert not torch.allclose(agent.learner.policy.score(prompts, ids, 1.0).logp_NT, start, atol=1e-3)


# --- runs ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of two agents on one model, checkpoints of each step."""
    agents = [{"id": "a", "model": "zoo:llama-plus"}, {"id": "b", "model": "zoo:llama-plus"}]
    sizes = {"prompts_per_step": 4, "num_generations": 4, "rollouts_per_update": 16, "max_completion_length": 40}
    times = {"max_steps": 3, "eval_every": 0, "save_every": 1, "learning_rate": 1e-3, "fast": FAST, "trace": True}
    data: dict[str, Any] = {"agents": agents, "lora": {"r": 4}, "task": {"name": "arithmetic", "eval_size": 20}}
    data["algorithm"] = {"name": "hacpo_robust", "imitation": {"when": "never"}}  # the optimizer goes on to the end
    data["output_dir"] = str(tmp_path_factory.mktemp("lora") / "run")
    return train(RunConfig.from_dict({**data, **sizes, **times})).run_dir


def without_times(run_dir: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if "time" not in k} for line in RunDir(run_dir).metrics()]


def assert_equal_runs(run_dir: Path, reference: Path) -> None:
    assert without_times(run_dir) == without_times(reference)
    last, expected = (complete_checkpoints(folder)[-1] for folder in (run_dir, reference))
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert len(files) == 2
    for name in files:
        assert (last / name).read_bytes() == (expected / name).read_bytes()


def test_a_run_that_is_continued_is_the_same_to_the_bit(run_dir: Path, tmp_path: Path) -> None:
    config = RunDir.open(run_dir).config()
    shorter = config.model_copy(update={"max_steps": 1, "output_dir": str(tmp_path / "run")})
    train(shorter)
    train(resumed_config(tmp_path / "run", ["max_steps=3"]), resume=True)
    lines, expected = (without_times(folder) for folder in (tmp_path / "run", run_dir))
    for line in lines:  # the shorter run's last step was evaluated
        if line["step"] == 1:
            for name in [name for name in line if "eval" in name]:
                del line[name]
    assert lines == expected
    for path in (run_dir / "checkpoint-3").rglob("*.safetensors"):
        assert (tmp_path / "run" / path.relative_to(run_dir)).read_bytes() == path.read_bytes()


def test_side_by_side_is_one_after_the_other(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents on one model, each in a thread of its own."""
    monkeypatch.setattr(local, "THREADS", 2)
    config = RunDir.open(run_dir).config().model_copy(update={"output_dir": str(tmp_path / "run")})
    assert_equal_runs(train(config).run_dir, run_dir)


def test_offloading_changes_nothing(run_dir: Path, tmp_path: Path) -> None:
    config = RunDir.open(run_dir).config()
    data = config.model_dump(mode="json") | {"optimizer_offload": True, "output_dir": str(tmp_path / "run")}
    for agent in data["agents"]:
        agent["optimizer_offload"] = True
    assert_equal_runs(train(RunConfig.from_dict(data)).run_dir, run_dir)


def test_only_adapters_are_trained_and_saved(run_dir: Path) -> None:
    start, last = (load_file(run_dir / f"checkpoint-{n}/agents/a/adapter_model.safetensors") for n in (1, 3))
    assert all("lora_" in name for name in last)
    assert sum(not torch.equal(start[name], last[name]) for name in last) > len(last) / 2
    assert not list((run_dir / "checkpoint-3").rglob("model.safetensors"))
    state = torch.load(run_dir / "checkpoint-3" / "state" / "a.pt")
    assert len(state["optimizer"]["state"]) == len(last)


def test_a_saved_agent_opens_with_from_pretrained_and_answers_as_it_did(run_dir: Path) -> None:
    folder = run_dir / "checkpoint-3" / "agents" / "a"
    config = RunDir.open(run_dir).config()
    agent = Agent(config.agents[0], 0, config.algorithm, config.seed)
    ids = torch.tensor([[1, 5, 6, 7, 8]])
    with torch.no_grad():
        before = agent.model(ids).logits
        agent.load(folder, run_dir / "checkpoint-3" / "state" / "a.pt")
        trained = agent.model(ids).logits
        assert not torch.allclose(trained, before, atol=1e-2)
        opened = opened_from(folder)
        assert torch.equal(opened(ids).logits, trained)
        assert torch.equal(
            AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(input_ids=ids).logits, trained
        )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems = ArithmeticTask().heldout("test", 20)
    generated = []
    for problem in problems:
        prompt = torch.tensor([agent.reader.prompt_ids(problem)])
        output = opened.generate(prompt, do_sample=False, max_new_tokens=40, pad_token_id=tokenizer.pad_token_id)
        generated.append(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))
    assert agent.answer(problems) == generated


def test_bfloat16(make_config: MakeConfig) -> None:
    """The model is in bfloat16 and has no float32 copy; adapters have one, which is what is saved."""
    config = run_config(make_config, dtype="bfloat16", max_steps=2)
    run = train(config).run_dir
    lines = RunDir(run).metrics()
    assert all(line["a/logprob_gap"] < 0.05 for line in lines if "a/logprob_gap" in line)
    agent = Agent(config.agents[0], 0, config.algorithm, config.seed)
    folder = run / "checkpoint-2"
    agent.load(folder / "agents" / "a", folder / "state" / "a.pt")
    assert {parameter.dtype for parameter in agent.model.parameters()} == {torch.bfloat16}
    saved = load_file(folder / "agents" / "a" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    for name, weight, working in zip(
        agent.opened.adapter.names, agent.weights.weights, agent.weights.working, strict=True
    ):
        assert torch.equal(weight, saved[name.replace(".default.", ".")])
        assert torch.equal(working, weight.bfloat16())
    if FAST:
        assert agent.learner.policy.backbone is not None


# --- folders with adapters as models -------------------------------------------------------------------


def logits(agent: Agent) -> torch.Tensor:
    with torch.no_grad():
        return agent.model(torch.tensor([[1, 5, 6, 7, 8]])).logits


def test_adapters_can_be_trained_further_or_merged(run_dir: Path) -> None:
    folder = run_dir / "checkpoint-3" / "agents" / "a"
    expected = opened_from(folder)(torch.tensor([[1, 5, 6, 7, 8]])).logits
    further = make_agent(model=str(folder), log_kl=True)
    assert torch.equal(logits(further), expected)
    assert {len(weight.shape) for weight in further.weights.weights} == {2}
    start = further.learner.reference([[1, 5, 6]], [[7, 8]], 1.0).logp_NT
    assert torch.allclose(start, further.learner.policy.score([[1, 5, 6]], [[7, 8]], 1.0).logp_NT, atol=1e-5)
    whole = make_agent(model=str(folder), lora=None)
    assert torch.allclose(logits(whole), expected, atol=1e-4)
    assert not [name for name, _ in whole.model.named_parameters() if "lora" in name]


@pytest.mark.parametrize("lora", [{"r": 8}, {"r": 4, "alpha": 16}, {"r": 4, "target_modules": ["q_proj"]}])
def test_adapters_of_another_kind_are_refused(run_dir: Path, lora: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"agents\.a\.lora: .* holds adapters with \w+ .* Set lora to that"):
        make_agent(model=str(run_dir / "checkpoint-3" / "agents" / "a"), lora=lora)


@pytest.mark.parametrize(
    ("option", "value"), [("use_rslora", True), ("use_dora", True), ("alpha_pattern", {"q_proj": 2}), ("bias", "all")]
)
def test_adapters_that_mean_something_else_are_refused(option: str, value: Any, run_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_dir / "checkpoint-3" / "agents" / "a", tmp_path / "a")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), option: value}))
    with pytest.raises(UserError, match=rf"agents\.a\.lora: .* holds adapters with {option} .* merge_and_unload"):
        make_agent(model=str(folder))


def without_its_first(state: dict[str, torch.Tensor]) -> None:
    del state[min(state)]


def with_a_nan(state: dict[str, torch.Tensor]) -> None:
    state[min(state)].view(-1)[0] = torch.nan


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (None, ("adapter_model.safetensors", "could not be loaded")),
        (without_its_first, ("does not match the model", "missing adapter keys")),
        (with_a_nan, ("is not finite", "has numbers that are not finite")),
    ],
)
def test_damaged_adapters_are_told(
    change: Callable[[dict[str, torch.Tensor]], None] | None, messages: tuple[str, str], run_dir: Path, tmp_path: Path
) -> None:
    """Whether they are to be trained further or to become part of their model."""
    folder = Path(shutil.copytree(complete_checkpoints(run_dir)[-1] / "agents" / "a", tmp_path / "adapters"))
    file = folder / "adapter_model.safetensors"
    if change is None:
        file.write_bytes(b"garbage")
    else:
        state = load_file(file)
        change(state)
        save_file(state, file, metadata={"format": "pt"})
    for lora, message in zip(({"r": 4}, None), messages, strict=True):
        with pytest.raises(UserError, match=message) as caught:
            make_agent(model=str(folder), lora=lora)
        assert str(caught.value).startswith("agents.a.")
        assert str(folder) in str(caught.value)


def test_a_run_with_adapters_is_evaluated(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = list(evaluate_target(str(run_dir), "demo", None, None, None))
    assert [row.accuracy for row in rows] == [summary["agents"][name]["final_accuracy"] for name in ("a", "b")]


def test_export(run_dir: Path, tmp_path: Path) -> None:
    folders = [list(export_run(run_dir, tmp_path / name, 3, merge)) for name, merge in (("as", False), ("in", True))]
    source = run_dir / "checkpoint-3" / "agents" / "a"
    expected = opened_from(source)(torch.tensor([[1, 5, 6, 7, 8]])).logits
    (copied, _), (merged, _) = folders
    assert sorted(path.name for path in copied.iterdir()) == sorted(path.name for path in source.iterdir())
    assert not (merged / "adapter_config.json").exists()
    model, report = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.allclose(model.eval()(torch.tensor([[1, 5, 6, 7, 8]])).logits, expected, atol=1e-4)
    assert AutoTokenizer.from_pretrained(merged).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    with pytest.raises(UserError, match="not an empty folder"):
        list(export_run(run_dir, tmp_path / "as", None, False))
    with pytest.raises(UserError, match="no checkpoint of step 9; there are: 1, 2, 3"):
        list(export_run(run_dir, tmp_path / "new", 9, False))


def test_the_command_line_exports(run_dir: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["export", str(run_dir), str(tmp_path / "out"), "--checkpoint", "2", "--merge"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [f"Saved in {tmp_path}/out/{name}" for name in ("a", "b")]
    assert make_agent(model=str(tmp_path / "out" / "b"), lora=None).answer(ArithmeticTask().heldout("test", 2))


# --- mistakes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [["no_such_layer"], ["lm_head"], ["embed_tokens"]])
def test_layers_that_cannot_have_adapters_are_refused(layers: list[str]) -> None:
    with pytest.raises(UserError, match=r"agents\.a\.lora\.target_modules: "):
        make_agent(lora={"target_modules": layers})


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match=r"pip install 'hacrl\[8bit\]'"):
        make_agent(lora=None, optimizer="adamw_8bit")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'hacrl\[lora\]'"):
        make_agent()


def test_mistakes_in_the_config_are_told(make_config: MakeConfig) -> None:
    with pytest.raises(UserError, match=r"lora.rank: unknown key 'rank'.*; choose from r, alpha"):
        run_config(make_config, lora={"rank": 4})
    with pytest.raises(UserError, match="choose one of them"):
        run_config(make_config, optimizer="adamw_8bit", optimizer_offload=True)
    config = run_config(make_config, agents=[{"id": "a", "model": "zoo:llama-plus", "lora": None}] * 1)
    assert config.agents[0].lora is None


# --- memory --------------------------------------------------------------------------------------------


def test_the_plan_knows_adapters_and_offloading(make_config: MakeConfig) -> None:
    gib = 2**30
    first, second = plan(run_config(make_config))
    adapter = sum(weight.numel() for weight in make_agent().weights.weights)
    base = first.parameters
    assert first.adapters == second.adapters == adapter < base
    assert first.memory["weights"] == pytest.approx(4 * (base + adapter) / gib)
    assert second.memory["weights"] == pytest.approx(4 * adapter / gib)
    # Two moments; gradients; copies of their own and their foreign part.
    assert first.memory["optimizer"] == pytest.approx(8 * adapter / gib)
    assert first.memory["gradients"] == pytest.approx(4 * adapter / gib)
    assert first.memory["parts"] == pytest.approx(8 * adapter / gib)
    assert first.host_memory == 0

    whole = plan(run_config(make_config, lora=None, dtype="bfloat16", optimizer_offload=True))[0]
    assert whole.adapters == 0
    # The model and what it started from, in two bytes each. Gradients go to the computer's memory at once.
    assert whole.memory["weights"] == pytest.approx(4 * base / gib)
    assert [whole.memory[name] for name in ("optimizer", "gradients", "parts")] == [0, 0, 0]
    assert whole.host_memory == pytest.approx(16 * base / gib)

    sharded = plan(run_config(make_config, lora=None, fsdp=2))[0]
    # Half of both models, and the whole one to sample from.
    assert sharded.memory["weights"] == pytest.approx((4 + 4) * base / gib)
    resident = sum(sharded.memory[name] for name in ("optimizer", "gradients", "parts"))
    assert resident == pytest.approx((4 + 2 + 4) * base / gib)
