"""The examples of LoRA and Ray, with fewer and smaller steps; what their pages say of the models as they are."""

from pathlib import Path

import pytest

from hacrl.config import RunConfig
from hacrl.run import train

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ["max_steps=1", "prompts_per_step=4", "rollouts_per_update=16", "log_kl=false"]


def accuracy_before(example: str, folder: Path) -> dict[str, float]:
    """Run an example, and return the accuracy of each agent before training in percent."""
    config = RunConfig.load(str(EXAMPLES / example / "run.yaml"), [*SHORT, f"output_dir={folder}"])
    agents = train(config).summary["agents"]
    assert all(agent["updates"] > 0 for agent in agents.values())
    return {name: round(100 * agent["start_accuracy"], 1) for name, agent in agents.items()}


def test_lora(tmp_path: Path) -> None:
    accuracy = accuracy_before("lora", tmp_path / "run")
    assert accuracy == {"narrow": pytest.approx(52.6, abs=0.5), "wide": accuracy["narrow"]}
    assert not list(tmp_path.glob("run/checkpoint-*/agents/*/model.safetensors"))
    assert len(list(tmp_path.glob("run/checkpoint-*/agents/*/adapter_model.safetensors"))) == 2


def test_ray(tmp_path: Path) -> None:
    accuracy = accuracy_before("ray", tmp_path / "run")
    assert accuracy == {"llama-plus": pytest.approx(52.6, abs=0.5), "neox-pair": pytest.approx(42.4, abs=0.5)}
