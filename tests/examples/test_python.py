"""The example of training from Python runs as its page says, and continues."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "python" / "train_from_python.py"


def run(folder: Path, *options: str) -> str:
    """What the script prints; it is called from another folder than its own, with one thread."""
    command = [sys.executable, str(SCRIPT), "--output", "run", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_script(tmp_path: Path) -> None:
    printed = run(tmp_path, "--max-steps", "1")
    for agent in ("llama-plus", "llama-minus"):
        assert re.search(rf"^{agent}: 0\.\d{{3}} -> 0\.\d{{3}} on held-out problems$", printed, re.MULTILINE)
    assert re.search(r"checkpoint-1/agents/llama-minus answers 47\+38-19=47[-+]\S+#-?\d+$", printed, re.MULTILINE)
    assert "also occur in the training data" not in printed
    before = re.findall(r"^llama-plus: (\S+) ->", printed, re.MULTILINE)
    page = (SCRIPT.parent / "README.md").read_text(encoding="utf-8")
    assert f"| llama-plus | {before[0]} |" in page

    continued = run(tmp_path, "--max-steps", "2", "--resume")
    assert "step 2/2" in continued
    assert "step 1/2" not in continued
