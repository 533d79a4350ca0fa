"""The interpreter runs what no GPU would accept, so kernels are compiled for one as well; running them takes a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """With matrix products, loads of 16 bytes and little shared memory."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    compiled = json.loads(ended.stdout)
    kinds = ("attention", "choose", "combine", "decode_attention", "record", "store", "turn", "turn_back")
    assert set(compiled) == {f"_{kind}_kernel" for kind in kinds}
    assert len(compiled["_attention_kernel"]) == 2
    for name, kinds in compiled.items():
        for kind in kinds:
            assert kind["bytes"] > 0
            assert kind["wide"] > 0 or name == "_record_kernel", name
            assert kind["shared"] <= 48 * 1024  # several programs at a time on a multiprocessor
            assert (kind["products"] > 0) == name.endswith("attention_kernel")
