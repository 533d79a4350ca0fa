"""The vLLM engine on real models, by vLLM's CPU build. `make test-vllm` runs these in an environment of their own."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ray

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm.device_allocator.cumem import CuMemAllocator

from hacrl.agents.loading import ZOO
from hacrl.agents.model import AgentModel
from hacrl.config import AgentConfig, RunConfig
from hacrl.config.agent import LoraConfig
from hacrl.decoder import Backbone
from hacrl.errors import UserError
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.vllm import VLLM, Memory, VLLMEngine
from hacrl.run import train
from hacrl.training.run_dir import RunDir

ROOT = Path(__file__).parents[2]
EAGER = {"enforce_eager": True}
PROMPTS = ["12+7=", "3-45+6=", "99+1-2+3="]


LORA = LoraConfig(r=4, alpha=16.0)


class Forgetful(VLLM):
    """vLLM's CPU build cannot sleep. This one loses weights as others do when they sleep."""

    lost = True

    def sleep(self) -> None:
        self.engine.apply_model(erase)
        self.lost = True

    def wake(self) -> bool:
        lost, self.lost = self.lost, False
        return lost


def erase(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.zero_()


class Sampled:
    """A model of the zoo, with or without adapters, with vLLM beside it."""

    def __init__(
        self, name: str, temperature: float = 1.5, lora: LoraConfig | None = None, kind: type[VLLM] = VLLM
    ) -> None:
        folder, self.updates = str(ZOO / name), 0
        self.lora, self.tokenizer = lora, AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        if lora is not None:
            self.model = AgentModel(AgentConfig(id="a", model=f"zoo:{name}", lora=lora), 0, seed=0).model
            self.change()
        self.stop_ids = [self.tokenizer.eos_token_id]
        self.prompts = [self.tokenizer.encode(prompt) for prompt in PROMPTS]
        vllm = kind(folder, "float32", max_length=96, batch_size=64, temperature=temperature, options=EAGER, lora=lora)
        self.engine = VLLMEngine(vllm, self.model, self.tokenizer, self.stop_ids, version=lambda: self.updates)

    @torch.no_grad()
    def change(self) -> None:
        """Change what is trained, as an update would."""
        random = torch.Generator().manual_seed(self.updates)
        for name, parameter in self.model.named_parameters():
            if self.lora is None or ".lora_" in name:
                size = 0.05 * parameter.std() if self.lora is None else 0.1
                parameter += size * torch.randn(parameter.shape, generator=random)

    def native(self) -> NativeEngine:
        return NativeEngine(Backbone(self.model), self.tokenizer, self.stop_ids, 64)

    def logps(self, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits_TV = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return (logits_TV / temperature).log_softmax(-1)[range(len(tokens)), tokens].tolist()


@pytest.fixture(scope="module", params=[("llama-large", None), ("qwen3-bpe", None), ("qwen3-bpe", LORA)], ids=str)
def sampled(request: pytest.FixtureRequest) -> Sampled:
    name, lora = request.param
    return Sampled(name, lora=lora)


def test_greedy_tokens_are_those_of_the_native_engine(sampled: Sampled) -> None:
    params = SamplingParams(1, 40, temperature=0.0)
    ours, theirs = (engine.sample(sampled.prompts, params, 0) for engine in (sampled.native(), sampled.engine))
    for (own,), (other,) in zip(ours, theirs, strict=True):
        assert other.token_ids == own.token_ids
        assert (other.finish_reason, other.ended) == (own.finish_reason, own.ended)


def test_logprobs_are_those_at_the_sampling_temperature(sampled: Sampled) -> None:
    groups = sampled.engine.sample(sampled.prompts, SamplingParams(6, 30, temperature=1.5), seed=3)
    texts = set()
    for prompt, group in zip(sampled.prompts, groups, strict=True):
        assert len(group) == 6
        for completion in group:
            texts.add(tuple(completion.token_ids))
            assert completion.logps == pytest.approx(sampled.logps(prompt, completion.token_ids, 1.5), abs=1e-4)
            assert completion.ended == (completion.token_ids[-1] in sampled.stop_ids)
            assert (completion.finish_reason == "stop") == completion.ended
    assert len(texts) > 6
    assert groups == sampled.engine.sample(sampled.prompts, SamplingParams(6, 30, temperature=1.5), seed=3)
    assert groups != sampled.engine.sample(sampled.prompts, SamplingParams(6, 30, temperature=1.5), seed=4)


def test_a_stop_string_ends_a_completion(sampled: Sampled) -> None:
    params = SamplingParams(2, 30, temperature=1.0, stop=(";",))
    for group in sampled.engine.sample(sampled.prompts, params, seed=1):
        for completion in group:
            text = sampled.tokenizer.decode(completion.token_ids)
            assert ";" not in sampled.tokenizer.decode(completion.token_ids[:-1])
            assert (completion.finish_reason == "stop" and not completion.ended) == (";" in text)
            assert len(completion.logps) == len(completion.token_ids)


def test_an_update_is_seen_at_once_and_checked(sampled: Sampled) -> None:
    before = sampled.engine.sample(sampled.prompts, SamplingParams(1, 20, temperature=0.0), 0)
    sampled.updates += 1
    sampled.change()
    sampled.updates -= 1
    # Not yet told: vLLM still has the old weights, and the check would find out.
    assert sampled.engine.sample(sampled.prompts, SamplingParams(1, 20, temperature=0.0), 0) == before
    with pytest.raises(UserError, match="does not have the learner's weights"):
        sampled.engine._check()
    sampled.updates += 1
    groups = sampled.engine.sample(sampled.prompts, SamplingParams(2, 20, temperature=1.0), 0)
    for prompt, group in zip(sampled.prompts, groups, strict=True):
        for completion in group:
            assert completion.logps == pytest.approx(sampled.logps(prompt, completion.token_ids, 1.0), abs=1e-4)
    test_greedy_tokens_are_those_of_the_native_engine(sampled)


def run_config(output_dir: Path, **changes: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "algorithm": {"name": "hacpo_robust", "imitation": {"when": "never"}},  # whose updates would count too
        "agents": [{"id": "llama", "model": "zoo:llama-large"}, {"id": "qwen", "model": "zoo:qwen3-bpe"}],
        "task": {"name": "arithmetic", "eval_size": 16},
        "engine": "vllm",
        "vllm": EAGER,
        "prompts_per_step": 6,
        "num_generations": 4,
        "rollouts_per_update": 24,
        "max_prompt_length": 32,
        "max_completion_length": 40,
        "learning_rate": 1e-4,
        "max_steps": 3,
        "eval_every": 0,
        "save_every": 0,
        "output_dir": str(output_dir),
    }
    return RunConfig.from_dict({**settings, **changes})


def metrics(run_dir: Path, agents: list[str]) -> list[dict[str, Any]]:
    """Lines of the steps. What vLLM told of its tokens is what the learner finds, in all of them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(line[f"{agent}/logprob_gap_max"] < 1e-4 for line in lines for agent in agents)
    return lines


def test_lost_weights_are_loaded_when_it_wakes() -> None:
    sampled = Sampled("llama-large", temperature=1.0, kind=Forgetful)
    params = SamplingParams(2, 20, temperature=1.0)
    groups = sampled.engine.sample(sampled.prompts, params, 0)
    assert sampled.engine.sample(sampled.prompts, params, 0) == groups
    for prompt, group in zip(sampled.prompts, groups, strict=True):
        for completion in group:
            assert completion.logps == pytest.approx(sampled.logps(prompt, completion.token_ids, 1.0), abs=1e-4)


def test_each_model_sleeps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own table of memory, without a GPU: a model that starts finds it empty, and sees its own memory later."""
    table = CuMemAllocator()
    monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: table)
    first, second = Memory(), Memory()
    for memory, address, size in ((first, 1, 100), (second, 2, 30)):
        with memory.alone():
            assert table.get_current_usage() == 0
            table._python_malloc_callback((0, size, address, 0))
    assert table.get_current_usage() == 130
    with second.alone():
        assert table.get_current_usage() == 30
    del table.pointer_to_data[1]  # as if it was freed
    with first.alone():
        assert table.get_current_usage() == 0
    assert table.get_current_usage() == 30


def test_logprobs_are_those_before_top_p_and_top_k() -> None:
    sampled = Sampled("llama-large", temperature=1.0)
    for limits in ({"top_p": 0.6}, {"top_k": 2}):
        groups = sampled.engine.sample(sampled.prompts, SamplingParams(6, 30, temperature=1.0, **limits), seed=3)
        for prompt, group in zip(sampled.prompts, groups, strict=True):
            for completion in group:
                assert completion.logps == pytest.approx(sampled.logps(prompt, completion.token_ids, 1.0), abs=1e-4)


@pytest.mark.parametrize("settings", [{}, {"lora": LORA, "learning_rate": 1e-3}], ids=["weights", "adapters"])
def test_two_agents_learn_together_with_vllm(settings: dict[str, Any], tmp_path: Path) -> None:
    run_dir = train(run_config(tmp_path / "run", **settings)).run_dir
    agents = ["llama", "qwen"]
    lines = metrics(run_dir, agents)
    for agent in agents:
        assert lines[-1][f"{agent}/num_updates"] == 6
        assert all(
            line[f"{agent}/sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-3) for line in lines
        )
        assert all(line[f"{agent}/sampling/importance_sampling_ratio/clipped"] == 0 for line in lines)


def test_vllm_in_a_process_of_its_own(tmp_path: Path) -> None:
    """One of two agents has it so, and gets the weights of each step there. When it is killed, the agent is lost."""
    run = RunDir(tmp_path / "run")

    def kill() -> None:
        while not run.step_file("rollouts", 2).is_file():
            time.sleep(0.05)
        ray.kill(ray.get_actor("llama:sampler"))

    agents = [
        {"id": "llama", "model": "zoo:llama-large", "resources": {"sampler": {}}},
        {"id": "qwen", "model": "zoo:qwen3-bpe", "engine": "native"},
    ]
    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(UserError, match=r"Agent llama .* was lost: .*--resume"):
        train(run_config(run.path, agents=agents, execution="ray", ray={"on_failure": "stop"}))
    lines = metrics(run.path, ["llama"])
    assert [line["llama/num_updates"] for line in lines] == [2, 4]


def test_the_comparison_on_a_gpu_runs_on_a_cpu_too() -> None:
    """Its agents have threads there, in which vLLM must not work at the same time."""
    sizes = {"shape": "tiny", "tokens": 32, "mean": 20, "prompts": 4, "generations": 4, "steps": 2}
    given = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    command = [sys.executable, str(ROOT / "speed" / "vllm_colocated.py"), *given]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert printed.returncode == 0, printed.stderr
    steps = re.findall(
        r"step (\d), (\w+): .* largest gap ([0-9.e-]+), mean ratio ([0-9.]+), masked ([0-9.]+)", printed.stdout
    )
    assert [(step, agent) for step, agent, *_ in steps] == 2 * [
        (s, agent) for s in "12" for agent in ("first", "second")
    ]
    assert all(float(gap) < 1e-3 and float(ratio) == 1 and float(masked) == 0 for *_, gap, ratio, masked in steps)
