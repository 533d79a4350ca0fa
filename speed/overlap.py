"""What `overlap: 1` brings: seconds of a training step with and without it, in one process and by Ray.

    python speed/overlap.py demo algorithm.name=hacpo
    python speed/overlap.py size --verify 0 0.5

Agents share no cores: with Ray each has a process with one thread, in one process a thread. The verifier gives every
second completion a reward of 1, after so many seconds a call (`--verify`; a call for each agent and step). The learning
rate is 0, so that the same is sampled with and without overlap; all else is as in `hacrl train`.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from process import add_process_options, restart_with_environment

REWARD = """
import time

def every_second(completions, **columns):
    time.sleep({seconds})
    return [float(position % 2) for position in range(len(completions))]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a preset or a YAML file")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=8, help="the first two and the last are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--verify", type=float, nargs="+", default=[0.0, 0.5], help="seconds of a call of the verifier")
    parser.add_argument("--execution", nargs="+", default=["local", "ray"])
    parser.add_argument("--json", type=Path)
    add_process_options(parser)
    options = parser.parse_args()
    restart_with_environment(options.malloc, options.threads)

    import torch
    from harness import machine, print_table

    torch.set_num_threads(options.threads)
    title = f"A step of both agents of {options.source} (seconds, medians); {machine()}"  # runs share out the threads
    cases = [(seconds, execution) for seconds in options.verify for execution in options.execution]
    times: dict[tuple[float, str, int], list[float]] = {}
    for _ in range(options.rounds):
        for seconds, execution in cases:
            for overlap in (0, 1):
                found = step_times(options, seconds, execution, overlap)
                times.setdefault((seconds, execution, overlap), []).extend(found)
    medians = {case: statistics.median(found) for case, found in times.items()}
    table = []
    for seconds, execution in cases:
        without, with_overlap = (medians[seconds, execution, overlap] for overlap in (0, 1))
        cells = [f"{without:.3f}", f"{with_overlap:.3f}", f"{1 - with_overlap / without:.0%}"]
        table.append([f"{execution}, verifier {2 * seconds:g} s a step", *cells])
    print_table(title, ["", "overlap: 0", "overlap: 1", "saved"], table)
    if options.json:
        rows = [
            {"verify": seconds, "execution": execution, "overlap": overlap, "step": median}
            for (seconds, execution, overlap), median in medians.items()
        ]
        options.json.write_text(json.dumps({"source": options.source, "medians": rows}) + "\n", encoding="utf-8")


def step_times(options: argparse.Namespace, seconds: float, execution: str, overlap: int) -> list[float]:
    from hacrl.config import RunConfig
    from hacrl.run import train
    from hacrl.tasks.arithmetic import ArithmeticTask

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problems = ArithmeticTask().train(0, 512)
        rows = [json.dumps({"prompt": problem.prompt, "answer": "-"}) + "\n" for problem in problems]
        (folder / "train.jsonl").write_text("".join(rows), encoding="utf-8")
        (folder / "reward.py").write_text(REWARD.format(seconds=seconds), encoding="utf-8")
        task = {"train": str(folder / "train.jsonl"), "reward": f"{folder}/reward.py:every_second"}
        overrides = [*options.overrides, f"task={json.dumps(task)}", f"max_steps={options.steps}", "learning_rate=0"]
        overrides += ["eval_every=0", "save_every=0", f"execution={execution}", f"overlap={overlap}"]
        result = train(RunConfig.load(options.source, [*overrides, f"output_dir={folder}/run"]))
        lines = (result.run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["step_time"] for line in lines[3:-1]]


if __name__ == "__main__":
    main()
