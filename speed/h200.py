"""Runs the measurements of docs/speed.md and docs/scaling.md that need a large GPU, in parts of less than ten minutes.

    python speed/h200.py --list                          # the parts, how long each takes at most, and what it needs
    python speed/h200.py RESULTS check lengths cache     # these parts, one after the other

Each part prints its tables, and writes them to RESULTS/PART.log and its figures to RESULTS/PART.json. A part that takes
longer than its time is stopped. `check` comes first: if the engine with a cache in blocks is wrong, its times mean
nothing, so the parts that time it are not run after a `check` that failed. Nothing is downloaded: weights are random.

Needed are a GPU with 139 GiB, torch with CUDA, transformers, Triton and hacrl's dependencies; where a part says so also
vLLM 0.24 to 0.32 and TRL 1.16, for this Python, for example in a folder on PYTHONPATH. After a change of the engine or
of vLLM's options, `--vllm-option` is passed to vllm.LLM of the parts that sample with it alone.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAMPLING = "sampling.py {shape} --vllm-python {python} {vllm} --prompt-tokens 128"
LONG, UNEQUAL, EQUAL, EQUAL_MANY = "128x8x8192~1500", "64x8x4096~720", "32x8x512", "128x8x512"
MEMORY = "memory.py {shape} --prompts 16 --generations 8 --mean 720 --most 4096"


@dataclass(frozen=True)
class Part:
    what: str
    minutes: float
    """At most, model and start-up included."""
    command: str
    """A script of this folder and its arguments, to which a file for the figures is added."""
    needs: str = ""
    checked: bool = True
    """Whether it is left out if the check has failed."""


def sampling(shape: str, arguments: str) -> str:
    return f"{SAMPLING.replace('{shape}', shape)} {arguments}"


def memory(shapes: str, arguments: str) -> str:
    return f"{MEMORY.replace('{shape}', shapes)} {arguments}"


PARTS = {
    "check": Part("the engine with blocks against the plain one", 5, "check_paged.py", checked=False),
    "lengths": Part(
        "sampling 1.7B: lengths 1,500 on average, 720, and equal ones", 9.9,
        sampling("qwen3-1.7b", f"--work {LONG} {UNEQUAL} {EQUAL} {EQUAL_MANY} --warmup 0 --repeats 1 "
                 "--engines paged vllm"), "vLLM"),
    "cache": Part(
        "sampling 1.7B, lengths 720 on average, with 10 GiB of cache", 7,
        sampling("qwen3-1.7b", f"--work {UNEQUAL} --repeats 1 --cache-gib 10 --engines paged vllm"), "vLLM"),
    "equal": Part(
        "sampling 1.7B, equal lengths, with and without blocks", 4,
        sampling("qwen3-1.7b", f"--work {EQUAL} {EQUAL_MANY} --repeats 1 --engines paged graphed")),
    "small": Part(
        "sampling SmolLM2, equal lengths, with and without blocks", 3,
        "sampling.py smollm2 --work 32x8x128 128x8x128 --engines paged graphed"),
    "hacpo": Part(
        "HACPO steps of 1.7B + 4B, 16 x 8, mean 720, at most 4,096", 9.5,
        memory("qwen3-1.7b qwen3-4b", "--algorithms hacpo")),
    "default": Part(
        "steps of the default algorithm of 1.7B + 4B", 9.5,
        memory("qwen3-1.7b qwen3-4b", "--algorithms hacpo_robust --set algorithm.imitation.when=never"),
        ),
    "lora": Part(
        "8B with LoRA, at most 4,096 tokens", 9.5,
        memory("qwen3-8b", "--algorithms gspo --steps 2 --set lora.r=16")),
    "fit": Part(
        "equal lengths, to fit the constants of --dry-run: 0.6B and 1.7B", 5,
        "memory.py qwen3-0.6b qwen3-1.7b --algorithms gspo --mean 1e9 --most 512 --steps 2", checked=False),
    "fit-check": Part(
        "equal lengths, to check these constants on a shape that was not fitted: 4B", 4,
        "memory.py qwen3-4b --algorithms gspo --mean 1e9 --most 512 --steps 2", checked=False),
    "trl": Part(
        "a GSPO cycle of 0.6B, 32 x 8, mean 430, at most 1,024, against TRL", 7,
        "cycle.py qwen3-0.6b --prompts 32 --tokens 1024 --mean 430 --cycles 2 --rounds 1 --micro-batch 16 "
        "--colocate 0.3 --trl-python {python}", "TRL, vLLM"),
    "trl-large": Part(
        "a GSPO cycle of 1.7B, 32 x 8, mean 720, at most 4,096, against TRL", 9.5,
        "cycle.py qwen3-1.7b --prompts 32 --tokens 4096 --mean 720 --cycles 1 --rounds 1 --micro-batch 4 "
        "--colocate 0.3 --trl-python {python}", "TRL, vLLM"),
    "sleep": Part(
        "vLLM beside two agents of 0.6B: memory that sleeping gives back, LoRA", 9.5, "vllm_colocated.py", "vLLM",
        checked=False),
}  # fmt: skip
WRITES_NO_JSON = ("sleep",)


def table() -> str:
    width = max(map(len, PARTS))
    lines = [f"  {name:{width}}  {part.minutes:4g} min  {part.what}" for name, part in PARTS.items()]
    needs = [f" ({part.needs})" if part.needs else "" for part in PARTS.values()]
    total = sum(part.minutes for part in PARTS.values())
    return "\n".join([*map("".join, zip(lines, needs, strict=True)), f"  {'all':{width}}  {total:4g} min"])


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"parts:\n{table()}", formatter_class=form)
    parser.add_argument("folder", type=Path, nargs="?", help="results are written here")
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM and TRL")
    parser.add_argument("--vllm-option", nargs="*", default=[], metavar="KEY=JSON")
    parser.add_argument("--shape", help="this shape in place of each part's: tiny, to try the commands")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in PARTS]
    if options.list or options.folder is None or unknown:
        said = f"Unknown: {', '.join(unknown)}. " if unknown else ""
        sys.exit(f"{said}Parts, with the most minutes that each takes:\n{table()}")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in options.parts or PARTS if not run(name, PARTS[name], options)]
    if failed:
        sys.exit(f"Failed, or not run: {', '.join(failed)}. See {options.folder}/PART.log.")


def run(name: str, part: Part, options: argparse.Namespace) -> bool:
    """Run one part; returns whether it was run and ended well."""
    verdict = options.folder / "check.rc"
    if part.checked and verdict.is_file() and verdict.read_text("ascii") != "0":
        print(f"== {name}: left out, because the check has failed", flush=True)
        return False
    vllm = ["--vllm-option", *options.vllm_option] if options.vllm_option else []
    words = [word for word in part.command.split() if word not in ("{vllm}",)]
    words = [word.replace("{python}", options.python) for word in words]
    if options.shape:
        words = [options.shape if word.startswith(("qwen3-", "smollm2")) else word for word in words]
    if "{vllm}" in part.command:
        words += vllm
    if name not in WRITES_NO_JSON:
        words += ["--json", str((options.folder / f"{name}.json").resolve())]
    command = [sys.executable, str(ROOT / "speed" / words[0]), *words[1:]]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "120"}
    print(f"== {name}: {part.what}, at most {part.minutes:g} minutes\n$ {' '.join(command)}", flush=True)
    start, log = time.monotonic(), options.folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = child.wait(timeout=60 * part.minutes)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            code = child.wait()
    if name == "check":
        verdict.write_text(str(code), encoding="ascii")
    shown = log.read_text("utf-8").splitlines()
    print("\n".join(line for line in shown[-60:] if not line.startswith("$ ")), flush=True)
    print(f"== {name}: {'done' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - start:.0f} s", flush=True)
    (options.folder / "parts.jsonl").open("a").write(
        json.dumps({"part": name, "rc": code, "seconds": time.monotonic() - start}) + "\n"
    )
    return code == 0


if __name__ == "__main__":
    main()
