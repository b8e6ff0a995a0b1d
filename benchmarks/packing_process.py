"""The process that `benchmarks.packing` measures: packs a checkpoint, prints times and peak memory as JSON.

python -m benchmarks.packing_process CHECKPOINT FOLDER bf16|int4
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.packing import speeds
from moec.checkpoint import Checkpoint, open_checkpoint
from moec.frontend.probe import probe
from moec.pack.experts_store import write_experts
from moec.pack.weights import TensorPlan, write_weights


def main() -> None:
    checkpoint, output, weight_format = open_checkpoint(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    output.mkdir()
    geometry, plans = probe(checkpoint, 256), dense_plans(checkpoint, weight_format)
    before, start, cpu = peak_mb(), time.perf_counter(), time.process_time()
    write_weights(output / "weights.safetensors", plans, checkpoint)
    write_experts(output / "experts.moex", geometry, checkpoint, weight_format)
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = sum(file.path.stat().st_size for file in checkpoint.files)
    memory = {"peak MB": peak_mb(), "of that packing MB": peak_mb() - before}
    print(json.dumps({**speeds(size, wall, cpu), **memory}))


def dense_plans(checkpoint: Checkpoint, weight_format: str) -> list[TensorPlan]:
    """Every parameter but the experts, as a build stores it."""
    return [
        TensorPlan(name, "f32" if len(checkpoint.shape(name)) == 1 else weight_format)
        for name in checkpoint.param_names()
        if len(checkpoint.shape(name)) < 3
    ]


def peak_mb() -> float:
    """Peak resident memory of this process, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
