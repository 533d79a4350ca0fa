"""`hacrl eval RUN`: the run's own held-out problems."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from conftest import MakeConfig
from hacrl.agents.agent import Agent
from hacrl.algorithms import GSPO
from hacrl.evaluation.answers import Answerer
from hacrl.evaluation.heldout import evaluate_target
from hacrl.run import train
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.training.run_dir import RunDir, read_jsonl


def test_a_mixture_by_part_as_training_has_it(make_config: MakeConfig, tmp_path: Path) -> None:
    parts = [
        {"id": "plus", "name": "arithmetic", "minus_share": 0.0},
        {"id": "minus", "name": "arithmetic", "minus_share": 1.0, "weight": 3},
    ]
    config = make_config(task={"mixture": parts, "eval_size": 80}, max_steps=1, eval_every=1)
    run = RunDir(train(config, console=Console(file=io.StringIO())).run_dir)
    metrics, output = run.metrics()[-1], tmp_path / "answers.jsonl"
    rows = list(evaluate_target(str(run.path), "", None, None, output))
    found = {(row.agent, row.part): (row.accuracy, row.problems) for row in rows}
    counts = {None: 80, "minus": 60, "plus": 20}
    assert list(found) == [(agent.id, part) for agent in config.agents for part in counts]
    for (agent, part), (accuracy, problems) in found.items():
        name = f"{agent}/eval_accuracy" if part is None else f"{agent}/eval_accuracy/{part}"
        assert accuracy == pytest.approx(metrics[name])
        assert problems == counts[part]
    assert [line["part"] for line in read_jsonl(output)].count("plus") == 2 * counts["plus"]


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_who_only_answers_says_what_an_agent_says(make_config: MakeConfig, lora: dict[str, int] | None) -> None:
    (config,) = make_config("llama-plus", algorithm={"name": "gspo"}, lora=lora).agents
    problems, answerer = ArithmeticTask().train(0, 12), Answerer(config)
    prompts = [answerer.prompt_ids(problem) for problem in problems]
    agent = Agent(config, 0, GSPO(), seed=0)
    assert prompts == [agent.reader.prompt_ids(problem) for problem in problems]
    texts = [answerer.tokenizer.decode(own.content_ids) for own in answerer.complete(prompts, temperature=0.0, seed=0)]
    assert texts == agent.answer(problems)
