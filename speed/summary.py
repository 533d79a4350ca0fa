"""One table of what `make bench` measured, beside what we want to reach.

python speed/summary.py FOLDER_OF_JSON
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness import machine, print_table


def main() -> None:
    folder = Path(sys.argv[1])
    results = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))}
    rows = [row for name, result in results.items() for row in ROWS[name.partition("-")[0]](result)]
    print_table(f"Measured on this machine: {machine()}", ["what", "ours", "peer", "ratio", "wanted"], rows)


def cycle(result: dict[str, Any]) -> list[list[str]]:
    ours, trl = (result["medians"][name]["total"] for name in ("ours", "TRL"))
    wanted = "2" if result["model"].startswith("zoo:") else "1.5"
    what = f"GSPO cycle, {Path(result['model']).name}, {result['size']}"
    return [[what, f"{ours:.2f} s", f"TRL {trl:.2f} s", f"{trl / ours:.2f}", f">= {wanted}"]]


def sampling(result: dict[str, Any]) -> list[list[str]]:
    ours, wanted, model = result["ours"], {"vllm": ">= 1"}, Path(result["model"]).name
    return [
        [f"sampling, {model}, {work}", f"{rates[ours]:,.0f}/s", f"{name} {rate:,.0f}/s", f"{rates[ours] / rate:.2f}",
         wanted.get(name, "")]
        for work, rates in result["rates"].items() for name, rate in rates.items() if name not in (ours, "floor")
    ]  # fmt: skip


def collaboration(result: dict[str, Any]) -> list[list[str]]:
    medians = result["medians"]
    hacpo = medians["hacpo"]["step"]
    return [
        ["HACPO step of two agents", f"{hacpo:.2f} s", f"{name} {medians[name]['step']:.2f} s",
         f"{hacpo / medians[name]['step']:.2f}", "<= 1.5" if name == "gspo" else ""]
        for name in ("gspo", "gspo, plain", "hacpo, plain")
    ]  # fmt: skip


def growth(result: dict[str, Any]) -> list[list[str]]:
    return [
        [f"growth: {name}", f"{value:.2f}", "", "", "<= 1.1"]
        for part in result.values()
        for name, value in part.items()
        if name.startswith("exponent")
    ]


ROWS = {"cycle": cycle, "sampling": sampling, "collaboration": collaboration, "growth": growth}


if __name__ == "__main__":
    main()
