"""Agents in one process."""

import threading
from typing import Any

import pytest
import torch

from conftest import MakeConfig
from hacrl.decoder.parallel import side_by_side
from hacrl.execution import local
from hacrl.execution.local import LocalExecutor


def test_an_agent_keeps_its_threads_whatever_another_one_does(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of one thread each, of the first agent, while the second asks torch for the first time."""
    monkeypatch.setattr(local, "THREADS", 4)
    working, asked = threading.Event(), threading.Event()

    def work(item: int, counts: bool) -> int:
        working.set()
        assert asked.wait(60)
        return torch.get_num_threads()

    def ask(*_: Any) -> int:
        assert working.wait(60)
        try:
            return torch.get_num_threads()
        finally:
            asked.set()

    try:
        executor = LocalExecutor(make_config())
        monkeypatch.setattr(executor.agents[0], "answer", lambda *_: side_by_side(work, [(0, True), (1, True)], 2))
        monkeypatch.setattr(executor.agents[1], "answer", ask)
        assert [answer.value for answer in executor.answer([])] == [[1, 1], 2]
    finally:
        torch.set_num_threads(1)
