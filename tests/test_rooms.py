"""The rules of the house: which rooms of the package may import which, as docs/architecture.md says."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "hacrl"

ROOMS = [
    "cli",
    "report",
    "study",
    "api",
    "run",
    "live",
    "evaluation",
    "warmup",
    "training",
    "execution",
    "agents",
    "learners",
    "sources",
    "rollouts",
    "decoder",
    "tasks",
    "config",
    "algorithms",
]


def test_arrows_point_one_way() -> None:
    assert " -> ".join(ROOMS) in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in ROOMS:
            continue
        for name in imports(path):
            package, _, rest = name.partition(".")
            imported = rest.partition(".")[0]
            if package == "hacrl" and imported in ROOMS:
                assert ROOMS.index(imported) >= ROOMS.index(room), f"{path} imports {name}"
            if room == "algorithms":
                own = name.startswith("hacrl.algorithms.")
                assert own or package == "torch" or package in sys.stdlib_module_names, f"{path} imports {name}"


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
