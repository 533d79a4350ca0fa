"""The correction for the sampler is TRL's: loss and gradient of the same batch, by TRL's own code and by ours."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hacrl.agents.agent import Agent
from hacrl.agents.loading import ZOO
from hacrl.algorithms import GRPO, GSPO, Algorithm
from hacrl.config import AgentConfig
from hacrl.learners.lesson import Lesson
from hacrl.rollouts.rollout import Rollout
from hacrl.tasks.arithmetic import ArithmeticTask

PROMPTS, G, LONGEST, TEMPERATURE = 3, 4, 12, 1.3
PROBLEMS = ArithmeticTask().heldout("test", PROMPTS)
MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
DEFAULT: dict[str, float | None] = {"clip_max": 3.0, "clip_min": None}
BOUNDS = [DEFAULT, {"clip_max": 1.05, "clip_min": None}, {"clip_max": 1.08, "clip_min": 0.95}]
BOUNDS += [{"clip_max": None, "clip_min": 0.97}]
ALGORITHMS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (GRPO(), {"loss_type": "grpo", "importance_sampling_level": "token"}),
    "grpo, dapo": (GRPO(loss_type="dapo"), {"loss_type": "dapo", "importance_sampling_level": "token"}),
    "gspo": (GSPO(), {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
}


def make_agent(algorithm: Algorithm, **settings: Any) -> Agent:
    options = {"num_generations": G, "max_completion_length": LONGEST, "temperature": TEMPERATURE, "log_kl": False}
    bounds = {"max_logprob_gap": 10.0, "learning_rate": 0.0}
    config = AgentConfig(id="a", model="zoo:llama-plus", **{**options, **bounds, **settings})
    return Agent(config, 0, algorithm, seed=0)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Rollouts whose sampler says something else of each token than the learner, by up to 0.1."""
    random = torch.Generator().manual_seed(0)
    sampled = make_agent(GSPO()).sample(PROBLEMS, step=1, sampling_round=0)
    for rollout in sampled:
        noise = 0.1 * (2 * torch.rand(len(rollout.logps), generator=random) - 1)
        rollout.logps = (torch.tensor(rollout.logps) + noise).tolist()
    return sampled


@pytest.fixture(scope="module")
def trainer(rollouts: list[Rollout], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real GRPOTrainer that is told that vLLM sampled these rollouts."""
    reader = make_agent(GSPO()).reader

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = [reader.prompt_ids(PROBLEMS[rollout.prompt_index]) for rollout in rollouts]
        ids = [rollout.token_ids for rollout in rollouts]
        return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": [rollout.logps for rollout in rollouts]}

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(ZOO / "llama-plus", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(ZOO / "llama-plus"),
        reward_funcs=lambda completions, **_: [float(n % 3 == 0) + n % 2 for n in range(len(completions))],
        args=GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            report_to="none",
            temperature=TEMPERATURE,
            per_device_train_batch_size=len(rollouts),
            num_generations=G,
            max_completion_length=LONGEST,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        rollout_func=rollout_func,
    )
    trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def trl_loss(trainer: Any, settings: dict[str, Any]) -> tuple[float, float, torch.Tensor]:
    """Loss, norm of its gradient, and advantages."""
    for name, value in settings.items():
        assert hasattr(trainer, name)
        setattr(trainer, name, value)
    batch = trainer._generate_and_score_completions([{"prompt": "1+1="} for _ in range(PROMPTS * G)])
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    squares = sum(float(weight.grad.double().square().sum()) for weight in trainer.model.parameters())
    return float(loss.detach()), squares**0.5, batch["advantages"]


CASES = [("grpo", mode, bounds) for mode in MODES for bounds in BOUNDS]
CASES += [(name, mode, BOUNDS[2]) for name in ("grpo, dapo", "gspo") for mode in MODES]


@pytest.mark.parametrize(("name", "mode", "bounds"), CASES, ids=str)
def test_loss_and_gradient_are_those_of_trl(
    name: str, mode: str, bounds: dict[str, float | None], trainer: Any, rollouts: list[Rollout]
) -> None:
    algorithm, options = ALGORITHMS[name]
    settings = {f"vllm_importance_sampling_{key}": value for key, value in {"mode": mode, **bounds}.items()}
    loss, norm, advantage_N = trl_loss(trainer, {**options, **settings})
    agent = make_agent(algorithm, vllm_importance_sampling_correction=True, **settings)
    lesson = Lesson(
        step=1,
        prompts=[problem.prompt for problem in PROBLEMS],
        rollouts=rollouts,
        advantage_N=advantage_N.double(),
        omega_N=torch.ones(len(rollouts), dtype=torch.float64),
        minibatches=[list(range(PROMPTS))],
        learning_rate=0.0,
    )
    metrics = agent.learn(lesson).metrics
    assert abs(loss) > 1e-4
    assert metrics["loss"] == pytest.approx(loss, rel=0, abs=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = metrics["sampling/importance_sampling_ratio/clipped"]
    assert (clipped == 0) if bounds == DEFAULT else (0 < clipped < 1)


def test_names_and_defaults_are_those_of_trl() -> None:
    theirs, ours = GRPOConfig(output_dir="run", use_cpu=True), AgentConfig(id="a", model="m", engine="vllm")
    names = [name for name in AgentConfig.model_fields if name.startswith("vllm_importance_sampling_")]
    assert len(names) == 4
    for name in names:
        if name != "vllm_importance_sampling_correction":
            assert getattr(ours, name) == getattr(theirs, name)
    assert ours.corrects_sampler is theirs.vllm_importance_sampling_correction is True
