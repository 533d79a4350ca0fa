"""Where foreign rollouts push a learner of the zoo, compared with its own policy gradient.

    python docs/results/imitation/gradients.py [--prompts 64] [--completions 64]

Both agents of the pair `state` sample many completions of the same prompts before any training. The learner's own
rollouts give its policy gradient: the sum of A log p / len, A = (R - J) / sigma, J being its mean reward on the prompt.
Each row of the table uses the partner's rollouts with other weights; it has the cosine of that gradient with the own
one, its length over the own one's, and the sum of its weights (0: as much is pushed up as down).
"""

import argparse

import torch
from torch import Tensor

from hacrl.agents.agent import Agent
from hacrl.algorithms import GSPO
from hacrl.algorithms.advantage import mean_by
from hacrl.config import AgentConfig
from hacrl.config.task import TaskConfig
from hacrl.tasks import build_task

PAIR = ("llama-plus", "llama-minus")


def make_agent(index: int, completions: int) -> Agent:
    config = AgentConfig(
        id=PAIR[index], model=f"zoo:{PAIR[index]}", num_generations=completions, max_completion_length=48, log_kl=False
    )
    return Agent(config, index, GSPO(), seed=0)


def gradient(agent: Agent, rollouts: list, weight_N: Tensor) -> Tensor:
    """The gradient of the weighted sum of log p / len."""
    agent.model.zero_grad()
    prompts = [agent.reader.render(rollout.prompt) for rollout in rollouts]
    for start in range(0, len(rollouts), 512):
        part = slice(start, start + 512)
        if not weight_N[part].any():
            continue
        scored = agent.learner.policy.score(prompts[part], [r.token_ids for r in rollouts[part]], 1.0)
        mean_N = scored.logp_NT.sum(1) / scored.mask_NT.sum(1)
        (mean_N.double() * weight_N[part]).sum().backward()
    return torch.cat([p.grad.flatten() for p in agent.model.parameters() if p.grad is not None]).double()


def log_probabilities(agent: Agent, rollouts: list) -> Tensor:
    """log p of whole answers, those included that the retokenizer would drop."""
    found = []
    prompts = [agent.reader.render(rollout.prompt) for rollout in rollouts]
    with torch.no_grad():
        for start in range(0, len(rollouts), 512):
            part = slice(start, start + 512)
            scored = agent.learner.policy.score(prompts[part], [r.token_ids for r in rollouts[part]], 1.0)
            found.append(scored.logp_NT.double().sum(1))
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--completions", type=int, default=64)
    options = parser.parse_args()
    agents = [make_agent(index, options.completions) for index in (0, 1)]
    task, _ = build_task(TaskConfig(name="arithmetic", eval_size=1), 0)
    with task.verifier:
        problems = task.train(0, options.prompts)
        rollouts = [agent.sample(problems, 1, 0) for agent in agents]
        for own in rollouts:
            verdicts = task.score([problems[r.prompt_index] for r in own], [r.text for r in own])
            for rollout, verdict in zip(own, verdicts, strict=True):
                rollout.reward = verdict.reward
    for learner in (0, 1):
        report(agents[learner], rollouts[learner], rollouts[1 - learner])


def report(agent: Agent, own: list, foreign: list) -> None:
    own_N, foreign_N = (torch.tensor([r.reward for r in rollouts], dtype=torch.float64) for rollouts in (own, foreign))
    # Both agents have as many rollouts of each prompt, in the order of prompts: one numbering holds for both.
    prompt_N = torch.tensor([rollout.prompt_index for rollout in own])
    own_mean_N, source_mean_N = (
        mean_by(r_N, prompt_N, int(prompt_N.max()) + 1)[prompt_N] for r_N in (own_N, foreign_N)
    )
    mean_N = (own_mean_N + source_mean_N) / 2
    sigma_N = (mean_N * (1 - mean_N)).sqrt() + 1e-6
    logp_N = log_probabilities(agent, foreign)
    old_N = torch.tensor([r.logp_sum for r in foreign], dtype=torch.float64)
    length_N = torch.tensor([r.num_tokens for r in foreign], dtype=torch.float64)
    s_N = ((logp_N - old_N) / length_N).exp().clamp(max=1)
    exact_N = (logp_N - old_N).exp()
    right_N = foreign_N > own_mean_N
    centred_N = (foreign_N - own_mean_N) / sigma_N
    own_A_N = (own_N - own_mean_N) / sigma_N
    half_N = torch.arange(len(own)) % 2 == 0
    first, second = (gradient(agent, own, own_A_N * half) for half in (half_N, ~half_N))
    whole = first + second
    behind_N = own_mean_N < source_mean_N
    rows = {
        "own, half against half": None,
        "right": centred_N * s_N * right_N,
        "all": centred_N * s_N,
        "wrong": centred_N * s_N * ~right_N,
        "wrong, where the learner is ahead": centred_N * s_N * (~right_N & ~behind_N),
        "wrong, where the source is ahead": centred_N * s_N * (~right_N & behind_N),
        "all, centred at the source's mean": (foreign_N - source_mean_N) / sigma_N * s_N,
        "all, wrong with the exact ratio, at most 1": centred_N * torch.where(right_N, s_N, exact_N.clamp(max=1)),
        "all, both with the exact ratio, at most 1": centred_N * exact_N.clamp(max=1),
        "all, both with the exact ratio": centred_N * exact_N,
        "every answer alike (the source's style)": s_N / sigma_N.clamp(min=0.1),
    }
    print(
        f"\n{agent.config.id}: mean reward {own_N.mean():.3f}, partner {foreign_N.mean():.3f}, mean s {s_N.mean():.3f}"
    )
    print(f"| {'rollouts of the partner':45} | cosine | length | sum of weights |\n|---|---|---|---|")
    for name, weight_N in rows.items():
        if weight_N is None:
            print(f"| {name:45} | {torch.cosine_similarity(first, second, 0):+.3f} | | |")
            continue
        found = gradient(agent, foreign, weight_N)
        cosine, length = torch.cosine_similarity(found, whole, 0), found.norm() / whole.norm()
        print(
            f"| {name:45} | {cosine:+.3f} | {length:.2f} | {weight_N.sum() / weight_N.abs().sum():+.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
