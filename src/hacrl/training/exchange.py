"""Checks, before the first step, whether the agents of a run can use each other's rollouts."""

from collections import defaultdict

from hacrl.config import RunConfig
from hacrl.errors import UserError, warn
from hacrl.rollouts.reader import Traits

SUBSTITUTE = (
    "Choose another algorithm, or set algorithm.spread=true, which spreads a source's log-probability evenly over the "
    "learner's tokens and is not the published method."
)


def check_exchange(config: RunConfig, traits: list[Traits], resume: bool) -> None:
    """Raise UserError if the algorithm is not defined between these agents; warn if they drop each other's rollouts.

    A run that was begun with an earlier version continues with a warning.
    """
    if not (config.algorithm.shares_rollouts or config.algorithm.scores_by_others):
        return
    by_vocabulary: defaultdict[str, list[str]] = defaultdict(list)
    by_block: defaultdict[str, list[str]] = defaultdict(list)
    for agent, own in zip(config.agents, traits, strict=True):
        by_vocabulary[own.vocabulary].append(agent.id)
        by_block[own.opened_block].append(agent.id)
    if config.algorithm.compares_tokens and len(by_vocabulary) > 1:
        first, second = [ids[0] for ids in by_vocabulary.values()][:2]
        told = (
            f"algorithm.name: {config.algorithm.name} compares agents token by token, which is not defined between "
            f"{first} and {second}: their tokenizers differ."
        )
        if not resume:
            raise UserError(f"{told} {SUBSTITUTE}")
        warn(told)
    if len(by_block) > 1:
        warn(_unlike_blocks(by_block))


def _unlike_blocks(agents: dict[str, list[str]]) -> str:
    """The warning that agents drop each other's rollouts, because only some of their prompts open a block."""
    told = [f"those of {' and '.join(ids)} {f'with {b}' if b else 'without one'}" for b, ids in agents.items()]
    opener = next(ids[0] for block, ids in agents.items() if block)
    return (
        f"Some prompts end with an open block and others do not: {', '.join(told)}. A completion of the one kind does "
        "not fit behind a prompt of the other, so these agents drop each other's rollouts (unopened_block) and do not "
        f"learn from each other. Set agents.{opener}.chat_template_kwargs={{enable_thinking: false}} if its chat "
        "template knows that, or choose models whose chat templates end alike."
    )
