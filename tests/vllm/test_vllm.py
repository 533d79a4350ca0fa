"""The vLLM engine on real models, by vLLM's CPU build. `make test-vllm` runs these in an environment of their own."""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ray

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from hacrl.agents.loading import ZOO
from hacrl.config import RunConfig
from hacrl.decoder import Backbone
from hacrl.errors import UserError
from hacrl.rollouts.engine import SamplingParams
from hacrl.rollouts.native import NativeEngine
from hacrl.rollouts.vllm import VLLM, VLLMEngine
from hacrl.run import train
from hacrl.training.run_dir import RunDir

EAGER = {"enforce_eager": True}
PROMPTS = ["12+7=", "3-45+6=", "99+1-2+3="]


class Sampled:
    """A model of the zoo, with vLLM beside it."""

    def __init__(self, name: str, temperature: float = 1.5) -> None:
        folder = str(ZOO / name)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.stop_ids = [self.tokenizer.eos_token_id]
        self.prompts = [self.tokenizer.encode(prompt) for prompt in PROMPTS]
        self.updates = 0
        vllm = VLLM(folder, "float32", max_length=96, batch_size=64, temperature=temperature, options=EAGER)
        self.engine = VLLMEngine(vllm, self.model, self.tokenizer, self.stop_ids, version=lambda: self.updates)

    def native(self) -> NativeEngine:
        return NativeEngine(Backbone(self.model), self.tokenizer, self.stop_ids, 64)

    def logps(self, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits_TV = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        return (logits_TV / temperature).log_softmax(-1)[range(len(tokens)), tokens].tolist()


@pytest.fixture(scope="module", params=["llama-large", "qwen3-bpe"])
def sampled(request: pytest.FixtureRequest) -> Sampled:
    return Sampled(request.param)


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
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in sampled.model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=random)
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


def test_logprobs_are_those_before_top_p_and_top_k() -> None:
    sampled = Sampled("llama-large", temperature=1.0)
    for limits in ({"top_p": 0.6}, {"top_k": 2}):
        groups = sampled.engine.sample(sampled.prompts, SamplingParams(6, 30, temperature=1.0, **limits), seed=3)
        for prompt, group in zip(sampled.prompts, groups, strict=True):
            for completion in group:
                assert completion.logps == pytest.approx(sampled.logps(prompt, completion.token_ids, 1.0), abs=1e-4)


def test_two_agents_learn_together_with_vllm(tmp_path: Path) -> None:
    run_dir = train(run_config(tmp_path / "run")).run_dir
    agents = ["llama", "qwen"]
    assert all(metrics(run_dir, agents)[-1][f"{agent}/num_updates"] == 6 for agent in agents)


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
