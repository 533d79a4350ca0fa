"""Golden runs: check that a change to the code does not change what hacrl computes.

    make golden                             record all runs if .golden/ is empty; else repeat and compare them
    make golden RECORD=1                    record anew
    make golden RUNS="demo ray"             only these runs
    make golden SOURCE=../old RECORD=1      run the code of another source tree, for example a worktree

Each run is a few steps of tiny models on the CPU, started through the command line. Its metrics, rollouts, traces,
evaluations, summaries and weights must be equal to the recorded ones, to the bit. Recordings hold for one kind of CPU
and one version of torch, so git ignores them. A run that differs leaves its values in .golden/new/, for `diff`.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors

RENAMED: dict[str, str] = {"pair": "team", "pairs": "teams"}
"""Keys, files and folders that were renamed on purpose since the recording: {old: new}.

Each is one or several parts between slashes: {"rollouts": "samples"} reads rollouts/step-000001.jsonl as
samples/step-000001.jsonl; {"clip_ratio/low_mean": "clip/low"} reads the key a/clip_ratio/low_mean as a/clip/low."""

KEYS_IGNORED = re.compile(r"(^|/)(time/.*|step_time|(\w+_)?seconds|peak_memory_gib)$")
"""Keys that differ between any two runs: times and memory."""
FILES_IGNORED = re.compile(r"(^|/)(\.[^/]*|(progress|trainer|(\w+_)?config|tokenizer)\.json)$")
"""Files that are not compared: hidden ones, configs, and what a run keeps to show its progress and to be resumed."""

REPOSITORY = Path(__file__).parents[2]
INPUTS = Path(__file__).parent / "inputs"

# --- the runs ------------------------------------------------------------------------------------------------------

TINY = (
    "prompts_per_step=4 num_generations=4 rollouts_per_update=8 max_completion_length=40 max_steps=3 eval_every=2 "
    "save_every=0 task.eval_size=20 trace=true device=cpu"
)
TRAIN = f"{TINY} output_dir=out"
OPTIONS = (
    "algorithm.beta=0.04 num_iterations=2 temperature=0.9 top_p=0.95 top_k=10 mask_truncated_completions=true "
    "lr_scheduler_type=cosine warmup_steps=1 weight_decay=0.1 micro_batch_size=8 agents.neox-pair.num_generations=6 "
    "eval_samples=2 keep_best=true save_every=1 save_total_limit=1 recompute_logprobs=true "
    "vllm_importance_sampling_correction=true vllm_importance_sampling_mode=token_truncate "
    "vllm_importance_sampling_clip_max=2"
)
INTERRUPTED = "save_every=2 save_final=false"
"""There is no checkpoint of step 3, so a run that is resumed does this step again."""
BENCHMARKS = "--benchmarks gsm8k,aime25 --data data --max-completion-length 40 --system-prompt ''"

ALGORITHMS = ("hacpo", "hacpo_robust", "gspo", "grpo", "naive", "swarm", "success_gated", "luffy", "topr", "rft", "opd")
RUNS: dict[str, list[str]] = {
    "demo": [f"demo --output-dir out {TINY}"],
    "team": [f"train team {TRAIN}"],
    **{name: [f"train model {TRAIN} algorithm.name={name}"] for name in ALGORITHMS},
    "ftis": [f"train demo {TRAIN} algorithm.name=ftis"],
    "imitation-step": [f"train model {TRAIN} algorithm.imitation.when=step algorithm.imitation.memory=2"],
    "imitation-end": [
        f"train model {TRAIN} algorithm.imitation.when=end algorithm.imitation.confidence=1 "
        "algorithm.imitation.batch_size=16"
    ],
    "options": [f"train model {TRAIN} algorithm.name=hacpo {OPTIONS}"],
    "dynamic": [f"train demo {TRAIN} dynamic_sampling=true num_generations=2"],
    "mixture": [f"train mixture.yaml {TRAIN}"],
    "resume": [f"train model {TRAIN} {INTERRUPTED}", "train out --resume max_steps=5 save_final=true"],
    "overlap": [f"train model {TRAIN} {INTERRUPTED} overlap=1", "train out --resume max_steps=4 save_final=true"],
    "ray": [f"train model {TRAIN} execution=ray"],
    "fsdp": [f"train model {TRAIN} agents.llama-plus.fsdp=2"],
    "lora": [f"train model {TRAIN} lora.r=4", "export out out/merged --merge"],
    "bfloat16": [f"train model {TRAIN} dtype=bfloat16"],
    "plain": [f"train model {TRAIN} fast=false"],
    "warmup": ["warmup warmup.yaml output_dir=out", "rm -r out/checkpoint-3 out/summary.json", "warmup out --resume"],
    "eval-heldout": [
        "eval zoo:qwen3-bpe --problems 20 --output out/model.jsonl",
        f"train demo {TINY} max_steps=1 output_dir=out/run",
        "eval out/run --problems 20 --output out/run.jsonl",
    ],
    "eval-benchmark": [
        f"eval zoo:qwen3-bpe {BENCHMARKS} --k 3 --output out/model",
        f"train demo {TINY} max_steps=1 output_dir=out/run",
        f"eval out/run {BENCHMARKS} --k 1",
        "eval --check-verifier --data data",
    ],
    "study": ["study study.yaml --output-dir out --jobs 1"],
}
"""The commands of each run, without `hacrl`. They work beside a copy of `inputs` and write into the folder `out`."""

# --- running -------------------------------------------------------------------------------------------------------

Values = dict[tuple[str, int], Any]
"""What a run has written: a JSON value for each file and line, from 1."""


def execute(name: str, source: Path, scratch: Path) -> Values:
    """Run the commands of one golden run in a folder of its own, and read what they have written."""
    folder = scratch / name
    shutil.copytree(INPUTS, folder)
    (folder / "out").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(source / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "200",
    }
    values: Values = {}
    for number, command in enumerate(RUNS[name], 1):
        program = [] if command.startswith("rm ") else [Path(sys.executable).with_name("hacrl")]
        done = subprocess.run(
            [*program, *shlex.split(command)], cwd=folder, env=environment, check=True, capture_output=True, text=True
        )
        if command.startswith("eval") and "--benchmarks" not in command:  # these results are in no file
            rows = [line for line in done.stdout.splitlines() if "│" in line]  # no signs of life of a slow machine
            values["printed", number] = re.findall(r"\d+\.\d+|\d+", "".join(rows))
    for path in sorted((folder / "out").rglob("*")):
        file = path.relative_to(folder / "out").as_posix()
        if path.is_file() and not FILES_IGNORED.search(file):
            values |= {(file, line): value for line, value in enumerate(read(path), 1)}
    return values


def read(path: Path) -> Iterator[Any]:
    """The JSON values in a file; of weights, the checksum of each tensor."""
    if path.suffix == ".safetensors":
        tensors = sorted(safetensors.deserialize(path.read_bytes()), key=lambda tensor: tensor[0])
        checksums = (hashlib.sha256(tensor["data"]).hexdigest() for _, tensor in tensors)
        yield {name: f"{t['dtype']} {t['shape']} {own}" for (name, t), own in zip(tensors, checksums, strict=True)}
    elif path.suffix == ".jsonl":
        yield from (timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line)
    elif path.suffix == ".json":
        yield timeless(json.loads(path.read_text(encoding="utf-8")))


def timeless(value: Any) -> Any:
    """The value without the keys that differ between any two runs."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if not KEYS_IGNORED.search(key)}
    return [timeless(item) for item in value] if isinstance(value, list) else value


# --- recordings ----------------------------------------------------------------------------------------------------


def write(path: Path, origin: str, values: Values) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"file": file, "line": line, "value": value} for (file, line), value in values.items()]
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [origin, *lines]), encoding="utf-8")


def recorded(path: Path) -> tuple[str, Values]:
    """Where a recording comes from, and its values under their present names."""
    origin, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line)
    return origin, {(renamed(line["file"]), line["line"]): with_new_names(line["value"]) for line in lines}


def with_new_names(value: Any) -> Any:
    if isinstance(value, dict):
        return {renamed(key): with_new_names(item) for key, item in value.items()}
    return [with_new_names(item) for item in value] if isinstance(value, list) else value


def renamed(text: str) -> str:
    old_names = "|".join(map(re.escape, RENAMED))
    return re.sub(rf"(?<![^/])({old_names})(?![^/])", lambda match: RENAMED.get(match[0], match[0]), text)


def origin_of(source: Path) -> str:
    """What a recording depends on: the commit, the kind of CPU and the version of torch."""
    git = ["git", "-C", str(source), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    cpus = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return f"commit {commit}, {cpus[0] if cpus else 'unknown CPU'}, torch {version('torch')}"


# --- comparing -----------------------------------------------------------------------------------------------------


def differences(old: Values, new: Values) -> list[str]:
    """One sentence for each value that differs; weights come last, because all else says more about the cause."""
    found = []
    for place in sorted(old.keys() | new.keys(), key=lambda place: (place[0].endswith(".safetensors"), place)):
        where = f"{place[0]}, line {place[1]}"
        if place not in old or place not in new:
            found.append(f"{where}: {'not recorded' if place not in old else 'missing now'}")
            continue
        before, after = dict(leaves(old[place])), dict(leaves(new[place]))
        for key in [*before, *(key for key in after if key not in before)]:
            then, now = (json.dumps(own[key]) if key in own else "missing" for own in (before, after))
            if then != now:
                found.append(f"{where}, {key}: recorded {then:.90}, now {now:.90}")
    return found


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts in a JSON value, each with its place there."""
    if isinstance(value, dict | list) and value:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{key} > {name}" if key else str(name))
    else:
        yield key, value


def check(name: str, source: Path, scratch: Path, golden: Path, record: bool) -> bool:
    """Do one run, record or compare it, and print a line; False if it failed or differs."""
    began, file = time.perf_counter(), golden / f"{name}.jsonl"
    try:
        values = execute(name, source, scratch)
    except subprocess.CalledProcessError as error:
        told = error.stdout[-500:] + error.stderr[-1500:]
        print(
            f"{name:15} failed: exit code {error.returncode} of {shlex.join(map(str, error.cmd))}\n{told}", flush=True
        )
        return False
    found: list[str] = []
    if record:
        write(file, origin_of(source), values)
        result = f"recorded, {len(values)} lines"
    elif not file.is_file():
        found, result = ["everything"], "has no recording: add one with RECORD=1"
    else:
        origin, old = recorded(file)
        found = differences(old, values)
        result = f"differs in {len(found)} values from {origin}; first: {found[0]}" if found else "same"
    if found:
        write(source / ".golden/new" / file.name, origin_of(source), values)
    print(f"{name:15} {result} ({time.perf_counter() - began:.0f} s)", flush=True)
    return not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"default: all of {', '.join(RUNS)}")
    parser.add_argument("--record", action="store_true", help="record anew")
    parser.add_argument("--source", type=Path, default=REPOSITORY, help="the source tree that runs; default: this one")
    parser.add_argument("--golden", type=Path, default=REPOSITORY / ".golden", help="folder of the recordings")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at the same time")
    given = parser.parse_args()
    if unknown := set(given.runs) - RUNS.keys():
        parser.error(f"unknown run {', '.join(sorted(unknown))}; choose from {', '.join(RUNS)}")
    source, golden = given.source.resolve(), given.golden.resolve()
    if not (source / "src/hacrl").is_dir():
        parser.error(f"{source} has no folder src/hacrl")
    record = given.record or not any(golden.glob("*.jsonl"))
    print(f"{'Recording' if record else 'Comparing'} {source}: {origin_of(source)}", flush=True)
    shutil.rmtree(source / ".golden/new", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch, ThreadPoolExecutor(given.jobs) as threads:
        results = list(threads.map(lambda name: check(name, source, Path(scratch), golden, record), given.runs or RUNS))
    print(f"{sum(results)} of {len(results)} runs are {'recorded in' if record else 'the same as in'} {golden}")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
