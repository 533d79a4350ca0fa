"""Small real runs that many tests need.

HACRL_TEST_PLAIN=1 makes the plain implementation (`fast: false`) the default of every run.
"""

import os

# Before torch and Triton are imported. Kernels run in Triton's interpreter, and no GPU is used: golden numbers are a
# CPU's. Some processors announce bfloat16 instructions that they then refuse.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
# Set by pytest-xdist: rich would take it, when a console is made, for good.
os.environ.pop("COLUMNS", None)

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hacrl.config import RunConfig

# One thread: the tests run beside each other's child processes, and tiny models gain nothing from more.
torch.set_num_threads(1)

FAST = os.environ.get("HACRL_TEST_PLAIN") != "1"

MakeConfig = Callable[..., RunConfig]


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """A run of zoo models that takes seconds; any key may be replaced."""

    def make(*models: str, **changes: Any) -> RunConfig:
        names = models or ("llama-plus", "llama-minus")
        data: dict[str, Any] = {
            "algorithm": {"name": "hacpo"},
            "agents": [{"id": f"agent{k}", "model": f"zoo:{name}"} for k, name in enumerate(names)],
            "task": {"name": "arithmetic", "eval_size": 20},
            "prompts_per_step": 4,
            "rollouts_per_update": 16,
            "num_generations": 4,
            "max_prompt_length": 32,
            "max_completion_length": 40,
            "learning_rate": 1e-4,
            "max_steps": 2,
            "eval_every": 0,
            "save_every": 0,
            "fast": FAST,
            "output_dir": str(tmp_path / "run"),
        }
        return RunConfig.from_dict({**data, **changes})

    return make
