"""What a run's algorithm says about its own figures."""

from dataclasses import asdict
from typing import Any

from hacrl.algorithms import Explanation
from hacrl.config import parse_algorithm


def explanation_of(section: Any, num_agents: int) -> dict[str, str | None]:
    """The algorithm's sentences; none where this version does not know it, or not all of its options."""
    try:
        algorithm = parse_algorithm(section)
    except ValueError:
        return {**asdict(Explanation()), "imitation": None}
    return {**asdict(algorithm.explain(num_agents)), "imitation": algorithm.imitation.sentence()}
