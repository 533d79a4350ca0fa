"""How much do two models of the zoo overlap? The ratio s of learner to source, before any training.

    python -m hacrl.agents.zoo.overlap --models models                       # the pairs of the zoo
    python -m hacrl.agents.zoo.overlap --models models llama-plus neox-pair  # every pair among these

Each source samples 8 completions for every prompt at temperature 1, each learner scores them. Prints

    models     greedy and sampled accuracy, greedy accuracy on chains of mostly + and mostly -, tokens a
               completion
    pairs      s = exp(logp_learner / tokens_learner - logp_source / tokens_source): mean, 5/50/95 % quantiles,
               and the share within [0.8, 1], for all completions, the right ones and the wrong ones; then the
               mean and the share when both sums are divided by the bytes of the text instead
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from hacrl.agents.zoo.train import MAX_COMPLETION_LENGTH, PAIRS, rewards
from hacrl.tasks.arithmetic import ArithmeticTask, verify
from hacrl.tasks.problem import Problem

LOWER, UPPER = 0.8, 1.0
BATCH_SIZE = 512


@dataclass
class Completion:
    problem: Problem
    text: str
    ended: bool
    right: bool


class Model:
    def __init__(self, folder: Path, device: str) -> None:
        self.tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.to(device).eval()

    def sample(self, problems: list[Problem], num_generations: int) -> tuple[list[Completion], np.ndarray]:
        """Completions, and their log-probability sums and token counts (completions x 2)."""
        repeated = [problem for problem in problems for _ in range(num_generations)]
        completions, tokens = [], []
        for batch in batches(repeated):
            prompts = [f"{self.tokenizer.bos_token}{problem.prompt}" for problem in batch]
            inputs = self.tokenizer(prompts, padding=True, return_tensors="pt").to(self.model.device)
            ids_BT = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_COMPLETION_LENGTH,
            )[:, inputs["input_ids"].shape[1] :]
            for problem, row in zip(batch, ids_BT.tolist(), strict=True):
                ended = self.tokenizer.eos_token_id in row
                ids = row[: row.index(self.tokenizer.eos_token_id) + 1] if ended else row
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                completions.append(Completion(problem, text, ended, verify(text, problem.answer) == 1.0))
                tokens.append(ids)
        return completions, self.score(completions, tokens)

    def read(self, completions: list[Completion]) -> np.ndarray:
        """As `sample`, for another model's completions, in this model's tokens."""
        ids = self.tokenizer([completion.text for completion in completions])["input_ids"]
        ends = [[self.tokenizer.eos_token_id] if completion.ended else [] for completion in completions]
        return self.score(completions, [content + end for content, end in zip(ids, ends, strict=True)])

    @torch.no_grad()
    def score(self, completions: list[Completion], tokens: list[list[int]]) -> np.ndarray:
        sums: list[float] = []
        for batch in batches(list(zip(completions, tokens, strict=True))):
            prompts = self.tokenizer(
                [f"{self.tokenizer.bos_token}{completion.problem.prompt}" for completion, _ in batch]
            )["input_ids"]
            rows = [prompt + ids for prompt, (_, ids) in zip(prompts, batch, strict=True)]
            length = max(map(len, rows))
            ids_BT = torch.tensor([row + [self.tokenizer.pad_token_id] * (length - len(row)) for row in rows])
            mask_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
            for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
                mask_BT[index, len(prompt) : len(row)] = True
            ids_BT, mask_BT = ids_BT.to(self.model.device), mask_BT.to(self.model.device)
            logp_BTV = self.model(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
            logp_BT = logp_BTV.gather(-1, ids_BT[:, 1:, None]).squeeze(-1)
            sums += torch.where(mask_BT[:, 1:], logp_BT, 0.0).sum(-1).tolist()
        return np.array([sums, [len(ids) for ids in tokens]]).T


def batches(items: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(items), BATCH_SIZE):
        yield items[start : start + BATCH_SIZE]


def describe_model(model: Model, problems: list[Problem], sampled: list[Completion], scores: np.ndarray) -> str:
    right = rewards(model.model, model.tokenizer, problems)
    minus = np.array([problem.columns["num_minus"] / problem.columns["num_operators"] for problem in problems])
    accuracy = np.mean([completion.right for completion in sampled])
    ended = np.mean([completion.ended for completion in sampled])
    return (
        f"{right.mean():>8.3f} {right[minus < 0.5].mean():>8.3f} {right[minus > 0.5].mean():>8.3f} "
        f"{accuracy:>8.3f} {ended:>8.3f} {scores[:, 1].mean():>8.1f}"
    )


def describe_pair(s_N: np.ndarray) -> str:
    if len(s_N) == 0:
        return f"{'none':>39}"
    low, middle, high = np.quantile(s_N, [0.05, 0.5, 0.95])
    kept = np.mean((s_N >= LOWER) & (s_N <= UPPER))
    return f"{len(s_N):>5} {s_N.mean():>6.3f}   {low:.3f} {middle:.3f} {high:.3f} {kept:>6.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how far models of the zoo overlap.")
    parser.add_argument("names", nargs="*", help="models; without any, the pairs of the zoo")
    parser.add_argument("--models", type=Path, required=True, help="the folder of model folders")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--greedy-prompts", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()

    groups = {"given": options.names} if options.names else PAIRS
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    task = ArithmeticTask()
    prompts = task.heldout("validation", options.prompts)
    problems = task.heldout("validation", options.greedy_prompts)
    torch.manual_seed(0)
    models, sampled, scores = {}, {}, {}
    print(f"{'model':<14}{'greedy':>8} {'mostly +':>8} {'mostly -':>8} {'sampled':>8} {'ended':>8} {'tokens':>8}")
    for name in names:
        models[name] = Model(options.models / name, options.device)
        sampled[name], scores[name] = models[name].sample(prompts, options.num_generations)
        print(f"{name:<14}{describe_model(models[name], problems, sampled[name], scores[name])}", flush=True)

    print(f"\n{'learner':<13} {'source':<13} {'of':<5} {'n':>5} {'mean s':>6}   {'5%':<5} {'50%':<5} {'95%':<5} kept")
    shown: set[tuple[str, str]] = set()
    for title, group in groups.items():
        for learner, source in permutations(group, 2):
            if (learner, source) in shown:
                continue
            shown.add((learner, source))
            learned, recorded = models[learner].read(sampled[source]), scores[source]
            s_N = np.exp(learned[:, 0] / learned[:, 1] - recorded[:, 0] / recorded[:, 1])
            right_N = np.array([completion.right for completion in sampled[source]])
            for label, chosen in [("all", right_N | True), ("right", right_N), ("wrong", ~right_N)]:
                names_shown = f"{learner:<13} {source:<13}" if label == "all" else " " * 27
                print(f"{names_shown} {label:<5} {describe_pair(s_N[chosen])}{'' if label != 'all' else '  ' + title}")
            bytes_N = np.array([max(len(completion.text.encode()), 1) for completion in sampled[source]])
            s_N = np.exp((learned[:, 0] - recorded[:, 0]) / bytes_N)
            print(f"{'':<27} bytes {describe_pair(s_N)}", flush=True)


if __name__ == "__main__":
    main()
