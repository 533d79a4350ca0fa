"""What `hacrl eval` can be asked, and which options go together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.errors import UserError

SAMPLING = ("k", "system_prompt", "max_completion_length", "temperature", "seed", "batch_size", "overrides")
"""Options that say how answers to benchmarks are sampled."""


@dataclass(frozen=True)
class Options:
    """What the command line was given; None: what the run has, or the default."""

    benchmarks: Sequence[str] | None = None
    """None: the held-out problems of a task."""
    data: Path | None = None
    k: int | None = None
    config: str | None = None
    checkpoint: int | None = None
    system_prompt: str | None = None
    max_completion_length: int | None = None
    temperature: float | None = None
    seed: int | None = None
    limit: int | None = None
    batch_size: int | None = None
    output: Path | None = None
    overrides: Sequence[str] = ()
    """key=value for any other setting of an agent."""

    def model_or_run(self, target: str | None) -> str:
        """What is evaluated; UserError if none is given, or if the options do not fit it or each other."""
        if target is None:
            raise UserError("Which model? Give zoo:NAME, a folder, a hub id, or a run.")
        if self.config is not None and (Path(target) / "config.yaml").is_file():
            raise UserError(f"--config is for a model, and {target} is a run: its agents have settings of their own.")
        if self.benchmarks is None:
            self._refuse(("data", *SAMPLING), "needs --benchmarks: the held-out problems are answered as in training.")
        return target

    def folder_to_check(self, target: str | None) -> Path:
        """The data whose answers --check-verifier judges; UserError if other options are there too."""
        if target is not None or self.data is None:
            raise UserError("--check-verifier takes no model, and --data with the folder of the benchmarks' files.")
        why = "has no meaning with --check-verifier: it judges all answers of the data."
        self._refuse((*SAMPLING, "config", "checkpoint", "limit", "output"), why)
        return self.data

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in names:
            if getattr(self, name) not in (None, (), []):
                shown = "KEY=VALUE" if name == "overrides" else f"--{name.replace('_', '-')}"
                raise UserError(f"{shown} {why}")
