"""Run and study folders in the formats of the docs, written by hand: no model, any size, the same every time."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

TWO = ("north", "south")
FOUR = ("north", "south", "east", "west")


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def write_config(folder: Path, agents: Sequence[str], algorithm: str = "hacpo", steps: int = 10, seed: int = 0) -> None:
    config = {
        "algorithm": {"name": algorithm},
        "agents": [{"id": agent, "model": f"zoo:{agent}"} for agent in agents],
        "task": {"name": "arithmetic"},
        "max_steps": steps,
        "seed": seed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")


def metrics(
    agents: Sequence[str], steps: int, shares: bool, rollouts: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Curves with the shape of real ones: accuracies rise, ratios come closer to 1."""
    lines: list[dict[str, Any]] = [
        {"step": 0, **{f"{agent}/eval_accuracy": 0.4 + 0.05 * k for k, agent in enumerate(agents)}}
    ]
    clock = 0.0
    for step in range(1, steps + 1):
        done = step / steps
        line: dict[str, Any] = {"step": step, "time/verify": 0.01}
        strength = [0.35 + 0.06 * k + (0.3 - 0.03 * k) * (1 - np.exp(-2.5 * done)) for k in range(len(agents))]
        for k, agent in enumerate(agents):
            line |= {
                f"{agent}/time/sample": 0.5 + 0.1 * rng.random(),
                f"{agent}/time/learn": 0.8 + 0.1 * rng.random(),
                f"{agent}/time/tokens_per_second": 9_000.0,
                f"{agent}/reward": float(np.clip(strength[k] + 0.04 * rng.normal(), 0, 1)),
                f"{agent}/capability": strength[k],
                f"{agent}/num_rollouts": step * rollouts,
                f"{agent}/num_tokens": step * rollouts * 25,
                f"{agent}/num_updates": step * (2 if shares else 1),
                f"{agent}/tokens_trained": rollouts * 30.0,
                f"{agent}/gradient_mass": 0.8 + 0.2 * rng.random(),
                f"{agent}/unverified": int(step % 5 == 0) * 2,
                f"{agent}/verifier_errors": 0,
                f"{agent}/verifier_timeouts": int(step % 5 == 0),
                f"{agent}/dropped": 0,
            }
            if step % 5 == 0 or step == steps:
                line[f"{agent}/eval_accuracy"] = float(np.clip(strength[k] + 0.08 + 0.01 * rng.normal(), 0, 1))
                line[f"{agent}/time/eval"] = 0.4
            if not shares:
                continue
            line[f"{agent}/grad_cosine"] = 0.25 + 0.15 * rng.normal()
            for j, source in enumerate(agents):
                if j == k:
                    continue
                middle = 0.86 + 0.06 * done - 0.02 * abs(k - j)
                wide = 0.16 - 0.05 * done
                pair = {
                    "ratio_mean": middle,
                    **{
                        f"ratio_q{q:02d}": middle + wide * z
                        for q, z in ((5, -1.6), (25, -0.6), (50, 0.05), (75, 0.5), (95, 1.0))
                    },
                    "lower_mean": 0.81,
                    "upper_mean": 1.0,
                    "kept": 0.7,
                    "kept_positive": 0.78 + 0.04 * rng.normal(),
                    "kept_negative": 0.55 + 0.05 * rng.normal(),
                    "gradient_mass": 0.4 + 0.3 * rng.random() + 0.1 * j,
                    "omega": strength[j] / strength[k],
                    "dropped": 1,
                    "dropped/too_long": 1,
                }
                line |= {f"{agent}/from_{source}/{name}": value for name, value in pair.items()}
        line["step_time"] = max(line[f"{agent}/time/sample"] + line[f"{agent}/time/learn"] for agent in agents) + 0.1
        clock += line["step_time"]
        line["time/elapsed"] = clock
        lines.append(line)
    return lines


def rollout_lines(
    agents: Sequence[str], step: int, prompts: int, generations: int, shares: bool, rng: np.random.Generator
) -> list[dict[str, Any]]:
    lines = []
    for k, agent in enumerate(agents):
        for p in range(prompts):
            a, b, c = (int(n) for n in np.random.default_rng([step, p]).integers(10, 99, 3))
            for index in range(generations):
                right = bool(rng.random() < 0.5 + 0.05 * k)
                answer = a + b - c + (0 if right else int(rng.integers(1, 9)))
                reward = None if step == 2 and p == 0 and index == 0 else float(right)
                line: dict[str, Any] = {
                    "step": step,
                    "prompt_id": f"{a}+{b}-{c}=",
                    "source": agent,
                    "index": index,
                    "prompt": f"{a}+{b}-{c}=",
                    "text": f"{a}+{b}={a + b};{a + b}-{c}={answer};#{answer}",
                    "reward": reward,
                    "finish_reason": "stop",
                    "num_tokens": 24,
                    "logp_sum": -3.6 - float(rng.random()),
                    "policy_version": 2 * step,
                    "learners": {},
                }
                if reward is None:
                    line |= {"problem": "timeout", "detail": "no answer within 10 s"}
                else:
                    for learner in agents if shares else [agent]:
                        ratio = 1.0 if learner == agent else float(rng.normal(0.9, 0.08))
                        lower, upper = (0.9997, 1.0004) if learner == agent else (0.8, 1.0)
                        line["learners"][learner] = {
                            "advantage": 0.8 if right else -0.9,
                            "ratio": ratio,
                            "lower": lower,
                            "upper": upper,
                            "kept": lower <= ratio <= upper,
                            "weight": ratio,
                        }
                lines.append(line)
    return lines


def write_run(
    folder: Path,
    agents: Sequence[str] = TWO,
    steps: int = 10,
    prompts: int = 4,
    generations: int = 3,
    algorithm: str = "hacpo",
    seed: int = 0,
    finished: bool = True,
    bonus: float = 0.0,
) -> Path:
    """A whole run; `bonus` is added to its later accuracies."""
    rng = np.random.default_rng(seed)
    shares = algorithm != "gspo" and len(agents) > 1
    write_config(folder, agents, algorithm, steps, seed)
    lines = metrics(agents, steps, shares, prompts * generations, rng)
    for line in lines[1:]:
        for agent in agents:
            if f"{agent}/eval_accuracy" in line:
                line[f"{agent}/eval_accuracy"] += bonus
    write_lines(folder / "metrics.jsonl", lines)
    for step in range(1, steps + 1):
        rollouts = rollout_lines(agents, step, prompts, generations, shares, rng)
        write_lines(folder / "rollouts" / f"step-{step:06d}.jsonl", rollouts)
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary(agents, lines, algorithm)), encoding="utf-8")
    return folder


def summary(agents: Sequence[str], lines: list[dict[str, Any]], algorithm: str) -> dict[str, Any]:
    end = lines[-1]
    of_agents = {
        agent: {
            "model": f"zoo:{agent}",
            "start_accuracy": lines[0][f"{agent}/eval_accuracy"],
            "final_accuracy": end[f"{agent}/eval_accuracy"],
            "rollouts": end[f"{agent}/num_rollouts"],
            "tokens": end[f"{agent}/num_tokens"],
            "tokens_trained": 4_242,
            "updates": end[f"{agent}/num_updates"],
            "unverified": 0,
            "dropped": 0,
            "nonfinite_updates": 0,
            "sample_seconds": 12.5,
            "learn_seconds": 17.5,
            "peak_memory_gib": None,
        }
        for agent in agents
    }
    whole = {
        name: sum(agent[name] for agent in of_agents.values())
        for name in ("rollouts", "tokens", "tokens_trained", "updates")
    }
    head = {"algorithm": algorithm, "steps": end["step"], "seconds": end["time/elapsed"], "best_step": end["step"]}
    return {**head, **whole, "peak_memory_gib": 1.25, "agents": of_agents}


def write_study(
    folder: Path, teams: Sequence[str] = ("state", "model"), seeds: int = 3, steps: int = 10, failed: str | None = None
) -> Path:
    """A study of three variants; with `failed`, one run more that ended with this error."""
    variants = ("gspo", "gspo_x2", "hacpo")
    runs, agents, accounting, comparisons = [], [], [], []
    rng = np.random.default_rng(7)
    for team in teams:
        for v, variant in enumerate(variants):
            finals: dict[str, dict[str, float]] = {agent: {} for agent in TWO}
            for seed in range(seeds):
                path = folder / "runs" / team / variant / f"seed-{seed}"
                algorithm = "hacpo" if variant == "hacpo" else "gspo"
                write_run(path, TWO, steps, algorithm=algorithm, seed=seed, bonus=0.03 * v + 0.01 * float(rng.normal()))
                told = json.loads((path / "summary.json").read_text(encoding="utf-8"))
                for agent in TWO:
                    finals[agent][str(seed)] = told["agents"][agent]["final_accuracy"]
                place = str(path.relative_to(folder))
                label = {"team": team, "variant": variant, "seed": seed, "dir": place}
                runs.append({**label, "status": "done", "error": None, "summary": told})
            for agent in TWO:
                values = list(finals[agent].values())
                mean = float(np.mean(values))
                few = seeds < 2
                agents.append(
                    {
                        "team": team, "variant": variant, "agent": agent, "start": 0.4, "values": finals[agent],
                        "mean": mean,
                        "low": None if few else mean - 0.02, "high": None if few else mean + 0.02,
                        "accounting": {
                            "rollouts": 120, "tokens": 3_000, "tokens_trained": 4_242, "updates": 20,
                            "sample_seconds": 12.5, "learn_seconds": 17.5, "peak_memory_gib": None,
                        },
                    }
                )  # fmt: skip
            cost = {
                "rollouts": 240 * (1 + (v == 1)),
                "tokens": 6_000,
                "tokens_trained": 8_484,
                "updates": 20 + 20 * (v > 0),
            }
            accounting.append(
                {
                    "team": team,
                    "variant": variant,
                    **cost,
                    "seconds": 95.0,
                    "gpu_seconds": 31.0,
                    "peak_memory_gib": 1.25,
                }
            )
            for agent in [*TWO, "all"] if v else []:
                difference = 0.03 * v + (0.004 if agent == "north" else -0.004)
                comparisons.append(
                    {
                        "team": team, "agent": agent, "variant": variant, "baseline": "gspo", "seeds": seeds,
                        "difference": difference, "low": difference - 0.035, "high": difference + 0.03, "p": 0.25,
                        "p_holm": 0.5, "effect": 1.1 * v, "wins": seeds, "losses": 0,
                        "note": None if seeds > 2 else "two seeds only: chance alone gives this often",
                    }
                )  # fmt: skip
    if failed is not None:
        label = {"team": teams[0], "variant": "hacpo", "seed": seeds, "dir": f"runs/{teams[0]}/hacpo/seed-{seeds}"}
        runs.append({**label, "status": "failed", "error": failed, "summary": None})
    study = {
        "name": "zoo", "title": "Alone or together", "metric": "final_accuracy", "baseline": "gspo",
        "teams": list(teams), "variants": list(variants), "seeds": list(range(seeds)),
        "runs": runs, "agents": agents, "accounting": accounting, "comparisons": comparisons,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(study), encoding="utf-8")
    return folder
