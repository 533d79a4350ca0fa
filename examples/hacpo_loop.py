"""HACPO in one file: algorithm 1 of the paper (arXiv 2603.02604), on a CPU.

    python examples/hacpo_loop.py

Two small models with different architectures and tokenizers learn to add and subtract. Both answer the same prompts,
and each learns from the answers of both. `train`, near the end, is the algorithm; above it are its halves, sampling and
learning. After a minute and a half it prints the share of held-out problems that each model solves (here with seed 0):

    accuracy         before   after
    zoo:llama-plus    51.7%   58.4%
    zoo:neox-pair     44.0%   49.1%

Letters behind a name are its dimensions: K agents, P prompts, N rollouts, T tokens of a completion, L tokens of a whole
text, V tokens of the vocabulary. In formulas k is the learner, and j the source: the agent that sampled the rollout.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl import algorithms
from hacrl.agents.loading import resolve_model
from hacrl.rollouts.retokenize import Dropped, Retokenizer, decode
from hacrl.rollouts.rollout import Rollout
from hacrl.seeding import SHUFFLE, permutation
from hacrl.tasks.arithmetic import ArithmeticTask, verify
from hacrl.tasks.problem import Problem

# HACPO as published.
WINDOW = 5  # K of the paper: capability is the mean performance of this many steps
ALPHA = 1.0  # strength of exponential importance sampling
DELTA, DELTA_STEP = 0.2, 0.025  # stepwise clipping: width of the band at first, and how much each update takes from it
EPSILON, EPSILON_HIGH = 3e-4, 4e-4  # the clip of GSPO, for own rollouts

# Smaller than in the paper, whose models are larger: 128 prompts, 8 completions, 512 rollouts, learning rate 1e-6.
PROMPTS_PER_STEP, NUM_GENERATIONS, ROLLOUTS_PER_UPDATE = 64, 4, 128
LEARNING_RATE, MAX_GRAD_NORM, MAX_COMPLETION_LENGTH = 1e-4, 1.0, 48

Ids = list[list[int]]  # tokens of several texts


class Agent:
    """A model with its own tokenizer and optimizer."""

    def __init__(self, index: int, name: str) -> None:
        folder = resolve_model(name)
        self.index, self.name = index, name
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.end_of_turn: int = self.tokenizer.eos_token_id
        self.retokenizer = Retokenizer(self.tokenizer, self.end_of_turn, MAX_COMPLETION_LENGTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, weight_decay=0.0)

    def render(self, problems: list[Problem]) -> Ids:
        """The tokens of each prompt, in this model's chat template."""
        chats = [[{"role": "user", "content": problem.prompt}] for problem in problems]
        return list(self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False))


# --- sampling --------------------------------------------------------------------------------------
@torch.no_grad()
def generate(agent: Agent, prompts: Ids, **options: Any) -> list[tuple[list[int], list[float]]]:
    """Token ids of completions, with the end of turn if it was sampled, and the log-probability of each token."""
    ids_PL = pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True, padding_side="left")
    mask_PL = pad_sequence([torch.ones(len(ids)).long() for ids in prompts], batch_first=True, padding_side="left")
    options |= {"max_new_tokens": MAX_COMPLETION_LENGTH, "output_logits": True, "return_dict_in_generate": True}
    output = agent.model.generate(ids_PL, attention_mask=mask_PL, **options)
    ids_NT = output.sequences[:, ids_PL.shape[1] :]
    logp_NT = torch.stack(output.logits, dim=1).log_softmax(-1).gather(-1, ids_NT[..., None]).squeeze(-1)
    completions = []
    for ids, logps in zip(ids_NT.tolist(), logp_NT.tolist(), strict=True):
        length = ids.index(agent.end_of_turn) + 1 if agent.end_of_turn in ids else len(ids)
        completions.append((ids[:length], logps[:length]))
    return completions


def sample(agent: Agent, problems: list[Problem], step: int) -> Iterator[Rollout]:
    """`NUM_GENERATIONS` rollouts of each problem. Rollouts are all that agents exchange."""
    prompts = agent.render(problems)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": NUM_GENERATIONS}
    for row, (ids, logps) in enumerate(generate(agent, prompts, **options)):
        position, index = divmod(row, NUM_GENERATIONS)
        ended = ids[-1] == agent.end_of_turn
        content = ids[:-1] if ended else ids
        end = agent.retokenizer.end_of(prompts[position])
        yield Rollout(
            step=step,
            prompt_id=problems[position].id,
            prompt=problems[position].prompt,
            prompt_index=position,
            source=agent.index,
            index=index,
            text=decode(agent.tokenizer, content),
            token_ids=ids,
            logps=logps,
            finish_reason="stop" if ended else "length",
            ended=ended,
            special_inside=not set(content).isdisjoint(agent.tokenizer.all_special_ids),
            vocabulary=agent.retokenizer.vocabulary,
            policy_version=0,  # not needed here
            lead=agent.retokenizer.lead(content, end),
            opened=end.opened,
        )


def accuracy(agent: Agent, problems: list[Problem]) -> float:
    """The share of problems whose greedy answer is right."""
    texts = [decode(agent.tokenizer, ids) for ids, _ in generate(agent, agent.render(problems), do_sample=False)]
    return float(np.mean([verify(text, problem.answer) for text, problem in zip(texts, problems, strict=True)]))


# --- learning --------------------------------------------------------------------------------------
def log_probabilities(agent: Agent, prompts: Ids, completions: Ids) -> tuple[Tensor, Tensor]:
    """log p(completion | prompt) under the agent's model as it is now, and the number of tokens of each completion."""
    texts = [torch.tensor(prompt + completion) for prompt, completion in zip(prompts, completions, strict=True)]
    ids_NL = pad_sequence(texts, batch_first=True)  # padded on the right, where causal attention never looks
    logits_NLV = agent.model(ids_NL[:, :-1]).logits
    logp_NL = logits_NLV.log_softmax(-1).gather(-1, ids_NL[:, 1:, None]).squeeze(-1)
    begin_N = torch.tensor([len(prompt) - 1 for prompt in prompts])  # the last token of a prompt predicts the first
    length_N = torch.tensor([len(completion) for completion in completions])
    position_L = torch.arange(logp_NL.shape[1])
    mask_NL = (position_L >= begin_N[:, None]) & (position_L < (begin_N + length_N)[:, None])
    return torch.where(mask_NL, logp_NL.double(), 0.0).sum(1), length_N


def read(learner: Agent, prompts: Ids, rollouts: list[Rollout]) -> dict[int, list[int]]:
    """Each rollout in the learner's tokens, by row; one that its tokenizer cannot spell exactly is left out."""
    ends = [learner.retokenizer.end_of(prompt) for prompt in prompts]
    tokens = {}
    for row, rollout in enumerate(rollouts):
        own = rollout.source == learner.index
        with suppress(Dropped):
            tokens[row] = rollout.token_ids if own else learner.retokenizer(rollout, ends[rollout.prompt_index])
    return tokens


@dataclass
class Update:
    """The N rollouts of one optimizer update, and what was computed from them."""

    batch: list[Rollout]
    advantage_N: Tensor
    ratio_N: Tensor  # s
    kept_N: Tensor  # whether s lies in the band of foreign rollouts
    weight_N: Tensor  # what a foreign rollout's advantage is multiplied by
    term_N: Tensor  # terms of the objective


def learn(
    learner: Agent, prompts: Ids, rollouts: list[Rollout], advantage_N: Tensor, omega_N: Tensor, order: list[int]
) -> Iterator[Update]:
    """Updates, each from the next few prompts in `order` with the rollouts of all agents; u counts them."""
    tokens = read(learner, prompts, rollouts)
    for u, minibatch in enumerate(np.array_split(order, len(rollouts) // ROLLOUTS_PER_UPDATE)):
        rows = [row for row in tokens if rollouts[row].prompt_index in minibatch]
        batch = [rollouts[row] for row in rows]
        source_N = torch.tensor([rollout.source for rollout in batch])

        # The ratio s = exp(log p_k / length_k - log p_j / length_j), with log p_j as the source recorded it.
        prompts_N = [prompts[rollout.prompt_index] for rollout in batch]
        logp_N, length_N = log_probabilities(learner, prompts_N, [tokens[row] for row in rows])
        old_logp_N = torch.tensor([rollout.logp_sum for rollout in batch], dtype=torch.float64)
        old_length_N = torch.tensor([rollout.num_tokens for rollout in batch])
        ratio_N = algorithms.sequence_log_ratio(logp_N, length_N, old_logp_N, old_length_N).exp()

        # Own rollouts, as in GSPO: min(s A, clip(s) A).
        own_term_N, _ = algorithms.clipped_minimum(ratio_N, advantage_N[rows], EPSILON, EPSILON_HIGH)
        # Stepwise clipping: s is clipped to [1 - delta + u delta_step, 1]; what lies outside has no gradient.
        clipped_N, kept_N = algorithms.stepwise_clip(ratio_N, algorithms.stepwise_lower_bound(u, DELTA, DELTA_STEP))
        # Exponential importance sampling: s stopgrad(s)^alpha. The less likely for the learner, the less it counts.
        # Model capabilities discrepancy coefficient: omega(j, k), so that a stronger source counts for more.
        weight_N = algorithms.exponential_ratio(clipped_N, ALPHA) * omega_N[rows]
        term_N = torch.where(source_N == learner.index, own_term_N, weight_N * advantage_N[rows])

        # The objective is the mean over own rollouts plus the mean over those of each other agent.
        objective = torch.stack([term_N[source_N == j].mean() for j in source_N.unique()]).sum()
        learner.optimizer.zero_grad()
        (-objective).backward()
        torch.nn.utils.clip_grad_norm_(learner.model.parameters(), MAX_GRAD_NORM)
        learner.optimizer.step()
        yield Update(batch, advantage_N[rows], ratio_N.detach(), kept_N, weight_N.detach(), term_N.detach())


# --- algorithm 1 -----------------------------------------------------------------------------------
def train(
    agents: list[Agent], steps: int, seed: int, sample: Callable[..., Iterable[Rollout]] = sample
) -> Iterator[tuple[list[float], list[list[Update]]]]:
    """Algorithm 1. For each step, yields the performance P_t and the updates of each agent."""
    task = ArithmeticTask(seed)
    performance_TK: list[list[float]] = []  # P_t of each agent, step by step
    for step in range(1, steps + 1):
        # Each agent answers the same prompts, and the verifier scores each answer: 1 if it is right, else 0.
        problems = task.train(PROMPTS_PER_STEP * (step - 1), PROMPTS_PER_STEP)
        rollouts = [rollout for agent in agents for rollout in sample(agent, problems, step)]
        reward_N = torch.tensor([verify(r.text, problems[r.prompt_index].answer) for r in rollouts]).double()
        prompt_N = torch.tensor([rollout.prompt_index for rollout in rollouts])
        source_N = torch.tensor([rollout.source for rollout in rollouts])

        # Capability: P_t is the mean reward of this step, C_t the mean of the last P_t; omega(k, j) = C_k / C_j.
        performance_TK.append([float(reward_N[source_N == agent.index].mean()) for agent in agents])
        capability_K = np.mean(performance_TK[-WINDOW:], axis=0).tolist()
        omega_KK = algorithms.capability_ratios(capability_K)

        order = permutation(PROMPTS_PER_STEP, seed, SHUFFLE, step, 0)  # the same mini-batches for each learner
        updates_K = []
        for agent in agents:
            # Agent-capability-aware advantage estimation: A = (R - mu_k) / sigma, for each prompt. mu_k is the mean of
            # the rewards of all agents, each times omega(k, j): as if the learner itself had answered.
            advantages = algorithms.capability_advantages(reward_N, prompt_N, source_N, agent.index, omega_KK)
            omega_N = omega_KK[source_N, agent.index]
            agent.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - (step - 1) / steps)
            updates_K.append(
                list(learn(agent, agent.render(problems), rollouts, advantages.advantage_N, omega_N, order))
            )
        yield performance_TK[-1], updates_K


def main() -> None:
    parser = argparse.ArgumentParser(description="HACPO in one file.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=["zoo:llama-plus", "zoo:neox-pair"])
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # more of them only wait for each other in models this small
    agents = [Agent(index, name) for index, name in enumerate(options.models)]
    heldout = ArithmeticTask().heldout("test", 1000)
    before = [accuracy(agent, heldout) for agent in agents]
    print("step  agent            reward     s  kept")
    for step, (performance_K, updates_K) in enumerate(train(agents, options.steps, options.seed), 1):
        for agent, reward, updates in zip(agents, performance_K, updates_K, strict=True):
            rows = [row for update in updates for row in zip(update.batch, update.ratio_N, update.kept_N, strict=True)]
            foreign = [(float(ratio), float(kept)) for rollout, ratio, kept in rows if rollout.source != agent.index]
            ratio, kept = np.mean(foreign or [(np.nan, np.nan)], axis=0)
            print(f"{step:4}  {agent.name:15}  {reward:6.2f}  {ratio:.2f}  {kept:4.0%}", flush=True)
    print("\naccuracy         before   after")
    for agent, start in zip(agents, before, strict=True):
        print(f"{agent.name:15}  {start:6.1%}  {accuracy(agent, heldout):6.1%}")


if __name__ == "__main__":
    main()
