"""The page docs/results/imitation: its figures are those of the data beside it, and its scripts do what they say."""

import re
from pathlib import Path
from statistics import fmean

import pytest
import torch

from hacrl.algorithms import Algorithm, RobustHACPO, Sequences
from hacrl.config.algorithm import parse_algorithm
from hacrl.config.study import StudyConfig
from hacrl.training.records import read_study

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "imitation"
COLUMNS = ["state", "size", "model", "gap", "team"]


def test_the_final_table_is_that_of_the_data() -> None:
    agents = read_study(PAGE / "final.json")["agents"]
    rows = {"GSPO": "gspo", "GSPO x2": "gspo_x2_twice", "`hacpo_robust`, the default (*ours*)": "ours"}
    rows |= {f"`{name}`": name for name in ("rft", "opd", "naive", "topr")}
    lines = (PAGE / "README.md").read_text(encoding="utf-8").splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("| method | state:"))
    table = {cells[0]: cells[1:] for line in lines[head + 3 : head + 10] if (cells := line.strip("| ").split(" | "))}
    assert set(table) == set(rows)
    for label, cells in table.items():
        written = [float(number) for cell in cells for number in cell.replace("*", "").split(", ")]
        variant = rows[label]
        own = [row for team in COLUMNS for row in agents if (row["variant"], row["team"]) == (variant, team)]
        found = [100 * fmean(value for value in row["values"].values() if value is not None) for row in own]
        assert written == pytest.approx([*found, fmean(found)], abs=0.051), label


@pytest.mark.parametrize("path", sorted(PAGE.glob("*.yaml")), ids=lambda path: path.name)
def test_every_study_can_be_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    asked = re.findall(r"hacrl study (docs/results/imitation/\S+)", path.read_text(encoding="utf-8"))
    assert f"docs/results/imitation/{path.name}" in asked
    for own in (StudyConfig.load(str(path), []).algorithms or {}).values():
        assert isinstance(parse_algorithm((own or {}).get("algorithm", {"name": "gspo"})), Algorithm)


def bounded(**options: object) -> Algorithm:
    return parse_algorithm({"name": f"{PAGE / 'bounded.py'}:Bounded", **options})


def test_the_floor_bounds_what_one_lucky_answer_weighs() -> None:
    """Own rewards 0, one of the source's 1: A = sqrt(8) without the floor, and 2 with a floor of 0.5."""
    rewards_N, source_N = torch.tensor([0.0] * 7 + [1.0], dtype=torch.float64), torch.tensor([0] * 4 + [1] * 4)
    given = (rewards_N, torch.zeros(8, dtype=torch.long), source_N, 0, torch.ones(2, 2))
    plain, floored, open_floor = (
        algorithm.advantages(*given).advantage_N for algorithm in (RobustHACPO(), bounded(floor=0.5), bounded())
    )
    assert float(plain[-1]) == pytest.approx(8**0.5, rel=1e-5)
    assert float(floored[-1]) == pytest.approx(2.0)
    assert not floored[:-1].any()
    assert torch.equal(open_floor, plain)


def test_the_stop_takes_the_gradient_of_likely_foreign_answers() -> None:
    """Three rollouts with s 0.9, 1.0001 and 1.2, once as foreign ones and once as own ones."""
    logp_NT = torch.tensor([0.9, 1.0001, 1.2], dtype=torch.float64).log()[:, None].repeat(1, 4).requires_grad_()
    for own, stopped in ((False, [False, False, True]), (True, [False, False, False])):
        sequences = Sequences(
            logp_NT=logp_NT,
            mask_NT=torch.ones(3, 4, dtype=torch.bool),
            old_logp_N=torch.zeros(3, dtype=torch.float64),
            old_length_N=torch.full((3,), 4.0, dtype=torch.float64),
            bytes_N=torch.full((3,), 4.0, dtype=torch.float64),
            own_N=torch.full((3,), own),
            advantage_N=torch.ones(3, dtype=torch.float64),
            omega_N=torch.ones(3, dtype=torch.float64),
            old_logp_NT=torch.zeros(3, 4, dtype=torch.float64),
        )
        plain, found = RobustHACPO().terms(sequences, 0), bounded(stop=True).terms(sequences, 0)
        assert torch.equal(plain.objective_N, found.objective_N)
        (before_NT,) = torch.autograd.grad(plain.objective_N.sum(), logp_NT)
        (after_NT,) = torch.autograd.grad(found.objective_N.sum(), logp_NT)
        stopped_N = torch.tensor(stopped)
        assert torch.equal(after_NT, before_NT.masked_fill(stopped_N[:, None], 0.0))
        assert torch.equal(found.kept_N, plain.kept_N & ~stopped_N)
