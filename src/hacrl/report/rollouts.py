"""The rollouts of a run for the report: a compressed chunk for each step, as many steps as the file has room for."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

from hacrl.report.collect import rounded, spread
from hacrl.rollouts.lines import RolloutLine, Use, read_rollouts
from hacrl.training.run_dir import RunDir

MAX_TEXT = 20_000
"""Characters of a prompt or an answer; what is longer is cut, and the page says so."""

USE = [name for name in Use.__annotations__ if name != "dropped"]
"""The figures of a learner's use of a rollout, in the order in which a chunk has them."""


class Chunks:
    """The rollouts of one run, a base64 text for each step, compressed when it is first asked for."""

    def __init__(self, run: Path) -> None:
        self.run = RunDir(run)
        self.steps = self.run.steps("rollouts")
        self._made: dict[int, str] = {}

    def chunk(self, step: int) -> str:
        if step not in self._made:
            text = json.dumps(step_data(self.run.step_file("rollouts", step)), separators=(",", ":"))
            packed = gzip.compress(text.encode("ascii"), compresslevel=6, mtime=0)
            self._made[step] = base64.b64encode(packed).decode("ascii")
        return self._made[step]

    def within(self, budget: float) -> list[int]:
        """Steps, evenly spread, as many as fit into so many bytes."""
        if not self.steps:
            return []
        probe = [self.steps[i] for i in spread(len(self.steps), 3)]
        typical = sum(len(self.chunk(step)) for step in probe) / len(probe)
        count = min(len(self.steps), max(int(budget / typical), 1))
        while count:
            chosen = [self.steps[i] for i in spread(len(self.steps), count)]
            size = sum(len(self.chunk(step)) for step in chosen)
            if size <= budget:
                return chosen
            count = min(count - 1, int(count * budget / size))
        return []


def step_data(path: Path) -> dict[str, Any]:
    """The rollouts of one step: prompts once, a list for each rollout.

    A rollout is [prompt, source, index, text, characters cut off, reward, finish reason, tokens, log-probability per
    token, remark, {learner: [advantage, ratio, lower, upper, kept, weight] or a reason for dropping it}].
    """
    prompts: dict[str, list[Any]] = {}
    sources: dict[str, int] = {}
    rollouts = []
    for line in read_rollouts(path):
        prompt = prompt_text(line["prompt"])
        name = line.get("prompt_id", prompt)
        prompts.setdefault(name, [len(prompts), *cut(prompt)])
        tokens, logp_sum = line.get("num_tokens"), line.get("logp_sum")
        rollouts.append(
            [
                prompts[name][0],
                sources.setdefault(line["source"], len(sources)),
                line.get("index"),
                *cut(line["text"]),
                line.get("reward"),
                str(line.get("finish_reason")),
                tokens,
                rounded(logp_sum / tokens) if tokens and logp_sum is not None else None,
                remark(line),
                {learner: use_data(use) for learner, use in line.get("learners", {}).items()},
            ]
        )
    return {"prompts": [rest for _, *rest in prompts.values()], "sources": list(sources), "rollouts": rollouts}


def prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def cut(text: str) -> tuple[str, int]:
    """The text, or its beginning, and how many characters are missing."""
    return text[:MAX_TEXT], max(len(text) - MAX_TEXT, 0)


def remark(line: RolloutLine) -> str | None:
    """What the verifier said beside the reward."""
    if line.get("problem"):
        return cut(f"{line['problem']}: {line.get('detail', '')}")[0]
    if line.get("reward_parts"):
        return cut(f"reward parts: {json.dumps(line['reward_parts'])}")[0]
    return None


def use_data(use: Use) -> str | list[Any]:
    """What a learner made of a rollout: why it was dropped, or its figures in the order of `USE`."""
    return use["dropped"] if "dropped" in use else [rounded(use.get(name)) for name in USE]
