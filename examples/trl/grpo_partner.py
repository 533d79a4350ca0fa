"""A GRPOTrainer that also learns from the answers of a partner: TRL trains, hacrl.algorithms gives the loss.

    .venv-trl/bin/python examples/trl/grpo_partner.py

`zoo:llama-plus` learns with TRL's GRPOTrainer. Half of each group of answers comes from `zoo:llama-minus`, which knows
another part of the task and does not learn. TRL does the rest: data, rewards, optimizer, logs and checkpoints.

Letters behind a name are its dimensions: N rollouts, T tokens of a completion, K agents. The learner is agent 0, the
partner agent 1.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

from hacrl.algorithms import ALGORITHMS, Algorithm, Sequences
from hacrl.tasks.arithmetic import ArithmeticTask, verify
from hacrl.tasks.problem import Problem

sys.path.insert(0, str(Path(__file__).parents[1]))
import hacpo_loop  # how a model answers, and how its answers are read by another one: see examples/README.md

LEARNER, PARTNER = 0, 1
NUM_GENERATIONS = hacpo_loop.NUM_GENERATIONS  # of each agent; TRL's num_generations counts both


def correct(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """An ordinary reward function of TRL: 1 for a right answer."""
    return [float(verify(chat[0]["content"], gold)) for chat, gold in zip(completions, answer, strict=True)]


class PartnerTrainer(GRPOTrainer):
    """GRPOTrainer with the objective of `algorithm`, on its own answers and on those of `partner`."""

    def __init__(self, model: str, partner: str, algorithm: Algorithm, **options: Any) -> None:
        self.learner, self.partner = hacpo_loop.Agent(LEARNER, model), hacpo_loop.Agent(PARTNER, partner)
        self.algorithm, self.tracker = algorithm, algorithm.tracker(2)
        tokenizer = self.learner.tokenizer
        super().__init__(self.learner.model, rollout_func=self.answers_of_both, processing_class=tokenizer, **options)

    def answers_of_both(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """TRL's `rollout_func`. TRL repeats each prompt; here half a group is the learner's, half the partner's.

        `logprobs` are what the source of a rollout recorded, in its own tokens.
        """
        group = 2 * NUM_GENERATIONS
        texts = [prompt[-1]["content"] for prompt in prompts[::group]]
        problems = [Problem(id=text, prompt=text, answer="", columns={}) for text in texts]
        self.learner.model.eval()
        sampled = [list(hacpo_loop.sample(agent, problems, step=0)) for agent in (self.learner, self.partner)]
        self.learner.model.train()

        rendered = self.learner.render(problems)
        rollouts = [
            rollout
            for position in range(len(problems))
            for own in sampled
            for rollout in own[position * NUM_GENERATIONS : (position + 1) * NUM_GENERATIONS]
        ]
        self.source_N = torch.tensor([rollout.source for rollout in rollouts])
        self.bytes_N = torch.tensor([len(rollout.text.encode()) for rollout in rollouts])
        self.old_length_N = torch.tensor([rollout.num_tokens for rollout in rollouts])
        tokens = hacpo_loop.read(self.learner, rendered, rollouts)
        self.kept_N = torch.tensor([row in tokens for row in range(len(rollouts))])
        return {
            "prompt_ids": [rendered[rollout.prompt_index] for rollout in rollouts],
            # What cannot be spelled exactly in the learner's tokens is rewarded, but the loss leaves it out.
            "completion_ids": [tokens.get(row) or self.spell(rollout.text) for row, rollout in enumerate(rollouts)],
            "logprobs": [rollout.logps for rollout in rollouts],
        }

    def spell(self, text: str) -> list[int]:
        """Tokens that decode to this text, with the end of turn, so that there is at least one."""
        ids: list[int] = self.learner.tokenizer(text, add_special_tokens=False).input_ids
        return [*ids, self.learner.end_of_turn]

    def _calculate_rewards(self, *args: Any) -> Tensor:
        """Keep the rewards: TRL hands on only the advantages it makes from them."""
        rewards: Tensor = super()._calculate_rewards(*args)
        self.reward_N = (rewards * self.reward_weights.to(rewards)).nansum(1).double()
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Replace TRL's advantages, and add what the loss needs to know of each rollout."""
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        reward_N, source_N = self.reward_N, self.source_N
        prompt_N = torch.arange(len(reward_N)) // (2 * NUM_GENERATIONS)
        self.tracker.update([self.algorithm.performance(reward_N[source_N == k]) for k in (LEARNER, PARTNER)])
        omega_KK = self.algorithm.omega(self.tracker.capabilities())
        advantages = self.algorithm.advantages(reward_N, prompt_N, source_N, LEARNER, omega_KK)
        batch["advantages"] = advantages.advantage_N
        batch["omega"] = self.algorithm.coefficients(source_N, LEARNER, omega_KK)
        batch |= {"source": source_N, "bytes": self.bytes_N, "old_length": self.old_length_N, "kept": self.kept_N}
        for k, name in ((LEARNER, "learner"), (PARTNER, "partner")):
            self._metrics["train"][f"reward_{name}"].append(float(reward_N[source_N == k].mean()))
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        """The loss of `hacrl.algorithms` in place of TRL's, for one update of whole groups."""
        inputs = {name: value[inputs["kept"]] for name, value in inputs.items() if value.ndim}
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logp_NT, _, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, inputs["completion_ids"].shape[1]
        )
        source_N, sampled_NT = inputs["source"], inputs["sampling_per_token_logps"]
        sequences = Sequences(
            logp_NT=logp_NT.double(),
            mask_NT=inputs["completion_mask"].bool(),
            old_logp_N=sampled_NT.double().sum(1),  # padded with 0
            old_length_N=inputs["old_length"],
            bytes_N=inputs["bytes"],
            own_N=source_N == LEARNER,
            advantage_N=inputs["advantages"],
            omega_N=inputs["omega"],
            old_logp_NT=logp_NT.detach().double(),  # read by grpo and ftis only, which need it from the source
        )
        terms = self.algorithm.terms(sequences, update=0)  # each generation makes one update
        return -(terms.objective_N * self.algorithm.mean_weights(source_N, LEARNER)).sum()


def settings(output_dir: str, prompts_per_step: int, steps: int, seed: int) -> GRPOConfig:
    """One update for each generation, of all its rollouts: the means of the objective are over the whole batch."""
    return GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=prompts_per_step * 2 * NUM_GENERATIONS,
        num_generations=2 * NUM_GENERATIONS,
        max_completion_length=hacpo_loop.MAX_COMPLETION_LENGTH,
        max_steps=steps,
        learning_rate=hacpo_loop.LEARNING_RATE,
        gradient_checkpointing=False,
        logging_steps=10,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        seed=seed,
    )


def make_trainer(options: argparse.Namespace) -> PartnerTrainer:
    problems = ArithmeticTask(options.seed).train(0, options.prompts * options.steps)
    rows = [{"prompt": [{"role": "user", "content": each.prompt}], "answer": each.answer} for each in problems]
    return PartnerTrainer(
        options.model,
        options.partner,
        ALGORITHMS[options.algorithm](),
        reward_funcs=correct,
        args=settings(options.output_dir, options.prompts, options.steps, options.seed),
        train_dataset=Dataset.from_list(rows),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A GRPOTrainer that also learns from a partner.")
    parser.add_argument("--model", default="zoo:llama-plus")
    parser.add_argument("--partner", default="zoo:llama-minus")
    parser.add_argument("--algorithm", choices=("hacpo_robust", "hacpo", "naive", "topr"), default="hacpo_robust")
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", default="runs/trl")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    logging.set_verbosity_error()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # more of them only wait for each other in models this small
    trainer = make_trainer(options)
    heldout = ArithmeticTask().heldout("test", 1000)
    before = hacpo_loop.accuracy(trainer.learner, heldout)
    trainer.train()
    trainer.learner.model.eval()
    print(
        f"accuracy of {options.model}: {before:.1%} before, {hacpo_loop.accuracy(trainer.learner, heldout):.1%} after"
    )


if __name__ == "__main__":
    main()
