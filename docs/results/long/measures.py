"""Diversity of answers, and accuracy against cost, from finished runs.

    python docs/results/long/measures.py pass RUN... --k 16     # pass@k, entropy, length, distinct right answers
    python docs/results/long/measures.py curve RUN...           # accuracy against rollouts, tokens and GPU-seconds

RUN is the folder of a run, or of a study. `pass` samples k answers to each held-out problem from each run's newest
checkpoint; with `--start` also from the models that the run began with. Entropy is minus the mean log-probability of
the sampled tokens. `curve` needs `eval_every`.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from criteria import label, percent, runs_in, table

from hacrl.config import AgentConfig, RunConfig
from hacrl.evaluation.answers import Answerer
from hacrl.evaluation.figures import by_problem
from hacrl.evaluation.subjects import evaluated_agents
from hacrl.rollouts.retokenize import decode
from hacrl.tasks import build_task
from hacrl.tasks.problem import Problem
from hacrl.training.records import read_study
from hacrl.training.run_dir import RunDir

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["pass", "curve"])
    parser.add_argument("folders", type=Path, nargs="+", help="runs, or studies")
    parser.add_argument("--k", type=int, default=16, help="answers to each problem")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems")
    parser.add_argument("--start", action="store_true", help="also measure the models that the runs began with")
    asked = parser.parse_args()
    runs = [path for folder in asked.folders for path in runs_in(folder)]
    if asked.what == "curve":
        print(table("run, step", dict(row for run in runs for row in curve(run))))
        return
    rows = [row for run in runs for row in diversity(run, asked.k, asked.problems, asked.start)]
    print(table("agent", dict(rows)))


# --- diversity -------------------------------------------------------------------------------------


def diversity(run: Path, k: int, count: int, start: bool) -> Iterator[tuple[str, Row]]:
    """A row for each agent at the newest checkpoint of a run and, if asked for, as it began."""
    config, trained = evaluated_agents(str(run), "", None)
    task, _ = build_task(config.task.model_copy(update={"eval_size": count}), config.seed)
    with task.verifier:
        for first, last in zip(config.agents, trained, strict=True):
            for when, agent in [("start", first), ("end", last)] if start else [("end", last)]:
                yield f"{label(run)}: {agent.id}, {when}", measure(agent, config, task.eval_problems, k, task.score)


def measure(agent: AgentConfig, config: RunConfig, problems: Sequence[Problem], k: int, score: Any) -> Row:
    """Sample k answers to each problem as in training, and judge them."""
    answerer = Answerer(agent)
    asked = [problem for problem in problems for _ in range(k)]
    found = answerer.complete([answerer.prompt_ids(problem) for problem in asked], agent.temperature, config.seed)
    texts = [decode(answerer.source.reader.tokenizer, own.content_ids) for own in found]
    rewards = [verdict.reward for verdict in score(asked, texts)]
    correct_PK = np.array([np.nan if reward is None else reward for reward in rewards]).reshape(-1, k)
    lengths = [len(own.token_ids) for own in found]
    row = {name: percent(np.nanmean(values)) for name, values in by_problem(correct_PK).items() if "best" not in name}
    return row | {
        "entropy": f"{-sum(sum(own.logps) for own in found) / sum(lengths):.3f}",
        "tokens": f"{fmean(lengths):.0f}",
        "cut off": percent(fmean(own.finish_reason == "length" for own in found)),
        "distinct right": percent(distinct(texts, correct_PK)),
    }


def distinct(texts: Sequence[str], correct_PK: np.ndarray) -> float:
    """Different right answers of a problem over its right answers: the mean over problems that have two or more."""
    k = correct_PK.shape[1]
    shares = []
    for p, correct_K in enumerate(correct_PK):
        right = [text for text, correct in zip(texts[p * k : (p + 1) * k], correct_K, strict=True) if correct == 1]
        if len(right) > 1:
            shares.append(len(set(right)) / len(right))
    return fmean(shares) if shares else np.nan


# --- accuracy against cost -------------------------------------------------------------------------


def curve(run: Path) -> Iterator[tuple[str, Row]]:
    """A row for each evaluation of a run: mean accuracy of its agents, and what all of them had cost by then."""
    lines = RunDir(run).metrics()
    ids = [agent.id for agent in RunDir(run).config().agents]
    gpu_share = share_of_gpu(run, lines)
    trained = 0.0
    for line in lines:
        trained += sum(line.get(f"{agent}/tokens_trained", 0) for agent in ids)
        trained += sum(line.get(f"{agent}/imitation/tokens", 0) for agent in ids)
        accuracies = [line[f"{agent}/eval_accuracy"] for agent in ids if f"{agent}/eval_accuracy" in line]
        if accuracies:
            seconds = gpu_share * line.get("time/elapsed", 0.0)
            yield (
                f"{label(run)}, {line['step']}",
                {
                    "accuracy": percent(fmean(accuracies)),
                    "rollouts": f"{sum(line.get(f'{agent}/num_rollouts', 0) for agent in ids):,}",
                    "tokens sampled": f"{sum(line.get(f'{agent}/num_tokens', 0) for agent in ids):,}",
                    "trained": f"{trained:,.0f}",
                    "GPU-seconds": f"{seconds:.0f}",
                },
            )


def share_of_gpu(run: Path, lines: Sequence[Row]) -> float:
    """GPU-seconds of a study's run for each second of its steps; 1 for a run of its own."""
    study = run.parents[3] / "study.json" if len(run.parents) > 3 else Path()
    if not study.is_file():
        return 1.0
    own = next(row for row in read_study(study)["runs"] if row["dir"] == str(run.relative_to(study.parent)))
    return float(own.get("gpu_seconds") or lines[-1]["time/elapsed"]) / lines[-1]["time/elapsed"]


if __name__ == "__main__":
    main()
