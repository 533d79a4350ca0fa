"""Why the capture of a CUDA graph failed, as far as it can be told without a GPU."""

import torch

from hacrl.decoder.scoring import cause_of


def test_the_lack_of_memory_behind_a_failed_capture() -> None:
    """Leaving a capture after an error raises another one, which hides the first."""
    lack = torch.OutOfMemoryError("tried to allocate 20 GiB")
    hidden = RuntimeError("operation failed due to a previous error during capture")
    hidden.__context__ = lack
    assert cause_of(hidden, torch.device("cpu")) is lack
