"""What every measuring process has in common: its malloc, its threads, its prompts, its peak memory.

Only the standard library is imported here, so that malloc and threads are set before torch is loaded.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Makes glibc keep freed memory instead of giving it back, so that the kernel need not clear fresh pages each step."""


def add_process_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--malloc", choices=("keep", "default"), default="keep")


def restart_with_environment(malloc: str, threads: int, **extra: str) -> None:
    """Start this very process again with malloc and the threads set; both are read before main() is reached."""
    wanted = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    wanted |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"} | extra
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    environment |= wanted | (KEEP_MEMORY if malloc == "keep" else {})
    if environment != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def read_prompts(path: Path) -> list[Any]:
    """Strings, or lists of token ids (as tuples)."""
    return [prompt if isinstance(prompt, str) else tuple(prompt) for prompt in json.loads(path.read_text("utf-8"))]


def render(tokenizer: Any, prompt: Any) -> list[int]:
    """Token ids of a prompt: through the chat template if there is one. Ids stay as they are."""
    if not isinstance(prompt, str):
        return list(prompt)
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False))


def peak_rss_gib() -> float:
    """Of this process alone: `getrusage` would start from what its parent used."""
    status = Path("/proc/self/status").read_text("ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) / 2**20, 3)


def cpu_seconds() -> tuple[float, float]:
    """CPU time that this process has used, and that all others have used or the host has withheld."""
    own = sum(os.times()[:4])
    # user, nice, system, idle, iowait, irq, softirq, steal
    ticks = [int(field) for field in Path("/proc/stat").read_text("ascii").split(maxsplit=9)[1:9]]
    return own, (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK") - own
