"""Workaround for virtual machines that report AMX but crash at the first bfloat16 product."""

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from hacrl.errors import warn

PRODUCT = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
LIMIT, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"


@cache
def avoid_broken_amx() -> None:
    """Try AMX in another process and switch it off if that process crashes. Call this before the first product."""
    cpu = Path("/proc/cpuinfo")
    if LIMIT in os.environ or not cpu.is_file() or "amx_bf16" not in cpu.read_text():
        return
    tried = subprocess.run([sys.executable, "-c", PRODUCT], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if tried.returncode == -signal.SIGILL:
        os.environ[LIMIT] = WITHOUT_AMX
        warn(f"This CPU reports AMX but cannot run it; bfloat16 does without ({LIMIT}={WITHOUT_AMX}).")
