"""Where prompts come from and how answers are verified."""

from collections.abc import Callable, Sequence

from hacrl.config import TaskConfig
from hacrl.tasks.arithmetic import ArithmeticTask, arithmetic_reward
from hacrl.tasks.dataset import ProblemStream, load_problems, overlap
from hacrl.tasks.problem import Problem
from hacrl.tasks.verify import Verdict, Verifier


class Task:
    """Training problems by position, held-out problems, and the verifier of both."""

    def __init__(
        self,
        train: Callable[[int, int], list[Problem]],
        eval_problems: list[Problem],
        verifier: Verifier,
        listed: Sequence[Problem] = (),
    ) -> None:
        self.train = train
        self.eval_problems = eval_problems
        self.verifier = verifier
        self.listed = listed
        """Training problems that are known beforehand, for checks before the first step."""

    def score(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[Verdict]:
        names = {name for problem in problems for name in problem.columns}
        columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
        return self.verifier.score([problem.prompt for problem in problems], list(texts), columns)


def build_task(config: TaskConfig, seed: int) -> tuple[Task, list[str]]:
    """The task, and remarks for the user."""
    if config.name == "arithmetic":
        arithmetic = ArithmeticTask(
            seed,
            min_operators=config.min_operators,
            max_operators=config.max_operators,
            max_operand=config.max_operand,
        )
        heldout = arithmetic.heldout("validation" if config.eval_split == "validation" else "test", config.eval_size)
        return Task(arithmetic.train, heldout, Verifier([(arithmetic_reward, 1.0)])), []
    assert config.train is not None
    remarks = []
    problems = load_problems(config.train, split=config.train_split, subset=config.subset, name="train")
    heldout = []
    if config.eval is not None:
        heldout = load_problems(config.eval, split=config.eval_split, subset=config.eval_subset, name="eval")
        shared = overlap(problems, heldout)
        if shared:
            remarks.append(f"{shared} of {len(heldout)} eval prompts also occur in the training data.")
    verifier = Verifier(
        [(reward.name, reward.weight) for reward in config.reward],
        timeout=config.reward_timeout,
        call_timeout=config.reward_call_timeout,
        workers=config.reward_workers,
    )
    return Task(ProblemStream(problems, seed).take, heldout[: config.eval_size], verifier, problems), remarks
