"""The example with TRL's GRPOTrainer, on the real TRL: its loss is ours, and the example runs as its README says.

`make test-trl` keeps the folder tests out of the search path: TRL would take tests/vllm for an installed vLLM.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl" / "grpo_partner.py"
PROMPTS, STEPS = 6, 2


def load(path: Path) -> Any:
    """Import a file that is not in the search path."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load(ROOT / "tests" / "reference.py")
grpo_partner = load(EXAMPLE)


class Recorded(grpo_partner.PartnerTrainer):
    """Keeps each batch with its loss, the rewards, and the learner's log-probabilities from passes without padding."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.updates: list[tuple[list[Any], list[float | None], float]] = []
        super().__init__(*args, **options)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = super()._generate_and_score_completions(inputs)
        batch["row"] = torch.arange(len(self.reward_N))  # TRL shuffles the rows
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        rollouts = []
        for position, row in enumerate(inputs["row"].tolist()):
            prompt = inputs["prompt_ids"][position][inputs["prompt_mask"][position].bool()]
            completion = inputs["completion_ids"][position][inputs["completion_mask"][position].bool()]
            with torch.no_grad():
                logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
            logps = logits.double().log_softmax(-1).gather(-1, completion[:, None]).squeeze(-1)
            old = inputs["sampling_per_token_logps"][position][: inputs["old_length"][position]]
            rollouts.append(
                reference.Rollout(
                    source=int(inputs["source"][position]),
                    prompt=row // (2 * grpo_partner.NUM_GENERATIONS),
                    reward=float(self.reward_N[row]),
                    old_logps=tuple(old.tolist()),
                    logps=tuple(logps.tolist()),
                    dropped=not inputs["kept"][position],
                )
            )
        self.updates.append((rollouts, self.tracker.capabilities(), float(loss.detach())))
        return loss


@pytest.mark.parametrize("partner", ["zoo:llama-minus", "zoo:neox-pair"])
@pytest.mark.parametrize("algorithm", ["hacpo_robust", "hacpo", "naive", "topr"])
def test_the_loss_inside_trl_is_that_of_the_reference(
    algorithm: str, partner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference gets tokens, rewards and log-probabilities, and makes advantages, omega and loss by itself."""
    monkeypatch.setattr(grpo_partner, "PartnerTrainer", Recorded)
    torch.manual_seed(3)
    arguments = ["--algorithm", algorithm, "--partner", partner, "--prompts", str(PROMPTS), "--steps", str(STEPS)]
    trainer = grpo_partner.make_trainer(grpo_partner.parse([*arguments, "--output-dir", str(tmp_path)]))
    trainer.train()
    assert len(trainer.updates) == STEPS
    unit = "learner" if algorithm == "hacpo_robust" else "token"  # the default of each algorithm
    for rollouts, capabilities, loss in trainer.updates:
        assert {rollout.source for rollout in rollouts} == {0, 1}
        assert {rollout.reward for rollout in rollouts} == {0.0, 1.0}
        expected = reference.objective(rollouts, 0, capabilities, reference.Options(algorithm, ratio_unit=unit))
        assert loss == pytest.approx(-expected.value, rel=0, abs=1e-6)
        assert any(any(abs(slope) > 0 for slope in row) for row in expected.gradient)


def test_the_model_of_the_trainer_is_the_one_that_samples(tmp_path: Path) -> None:
    trainer = grpo_partner.make_trainer(
        grpo_partner.parse(["--prompts", "4", "--steps", "1", "--output-dir", str(tmp_path)])
    )
    before = trainer.learner.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert trainer.accelerator.unwrap_model(trainer.model) is trainer.learner.model
    assert not torch.equal(before, trainer.learner.model.get_input_embeddings().weight)


def test_the_example_runs_as_its_readme_says(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "2", "--prompts", "4", "--output-dir", str(tmp_path)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1"}
    )
    assert result.returncode == 0, result.stderr
    printed = re.search(r"accuracy of zoo:llama-plus: ([0-9.]+)% before, ([0-9.]+)% after", result.stdout)
    assert printed is not None, result.stdout
    assert float(printed[1]) == 51.7
