"""How much memory a policy takes for granted."""

from pathlib import Path

import pytest
import torch

from hacrl.decoder.policy import free_bytes


def test_memory_of_cached_files_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("hacrl.decoder.policy.MEMINFO", meminfo)
    assert free_bytes(torch.device("cpu")) == 4e9
    meminfo.write_text("MemTotal:  24000 kB\nMemFree:  100 kB\nMemAvailable:  5000 kB\nCached:  4900 kB\n", "ascii")
    assert free_bytes(torch.device("cpu")) == 5000 * 1024
