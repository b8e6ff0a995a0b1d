"""Packing a checkpoint that is larger than memory should have to be: speed beside `cp`, and peak memory.

    python -m benchmarks.packing [--gb 8] [--folder DIR]

The checkpoint has one bf16 tensor per expert and projection (Qwen3-MoE). `cp` copies it first, so that both
find it in the same page cache. Each format is packed by a process of its own; MB/s are bytes of input, and
those of a core are by CPU time, which other work on the machine does not change much.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import REPO, save, show

FORMATS = ("bf16", "int4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0, help="size of the checkpoint")
    parser.add_argument("--folder", help="where to work; three times the size must be free there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure(Path(folder), int(options.gb * 1e9))
    show(f"Packing {options.gb:g} GB of experts, load {os.getloadavg()[0]:.1f}", rows)
    save("packing", {"gb": options.gb, "load": os.getloadavg()[0], "rows": rows})


def measure(folder: Path, nbytes: int) -> list[dict[str, object]]:
    """A row for cp and one for each format; `folder` must have three times `nbytes` free."""
    model = make_checkpoint(folder / "model", nbytes)
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    rows = [_copy(model, folder / "copy", size)]
    for weight_format in FORMATS:
        rows.append({"what": weight_format} | pack_in_process(model, folder / weight_format, weight_format))
        shutil.rmtree(folder / weight_format)
    return rows


def make_checkpoint(folder: Path, nbytes: int) -> Path:
    """A synthetic checkpoint of about that size: experts of Qwen3-30B-A3B, or small ones below 2 GB."""
    from tests.helpers.synthetic import qwen3_config, synthetic_checkpoint

    hidden, inner, experts, vocab = (2048, 768, 128, 32000) if nbytes > 2e9 else (1024, 512, 32, 8192)
    layers = max(1, math.ceil((nbytes - 4 * vocab * hidden) / (6 * hidden * inner * experts)))
    return synthetic_checkpoint(folder, qwen3_config(hidden, inner, experts, layers, vocab))


def pack_in_process(model: Path, output: Path, weight_format: str) -> dict[str, object]:
    """Pack in a new process, so that its peak memory is that of packing."""
    command = [sys.executable, "-m", "benchmarks.packing_process", str(model), str(output), weight_format]
    done = subprocess.run(command, cwd=REPO, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _copy(source: Path, target: Path, size: int) -> dict[str, object]:
    start, before = time.perf_counter(), os.times()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    wall, after = time.perf_counter() - start, os.times()
    cpu = sum(after[2:4]) - sum(before[2:4])
    shutil.rmtree(target)
    return {"what": "cp", **speeds(size, wall, cpu), "peak MB": "", "of that packing MB": ""}


def speeds(size: int, wall: float, cpu: float) -> dict[str, object]:
    """The columns that all rows have."""
    speed = {"MB/s": size / wall / 1e6, "MB/s a core": size / max(cpu, 1e-3) / 1e6}
    return {"input MB": size / 1e6, "wall s": wall, "cpu s": cpu, **speed}


if __name__ == "__main__":
    main()
