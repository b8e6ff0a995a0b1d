"""`moec build --plan-only` at real size: time, memory and engine size of models whose weights are not here.

    python -m benchmarks.plan_only                      # the models of benchmarks/configs
    python -m benchmarks.plan_only mixtral-8x7b         # some of them
    python -m benchmarks.plan_only --layers 12,24,48,94 # growth: the Qwen3-30B-A3B shape with so many layers

Every build is a process of its own. CPU seconds are those of the build and its engine process: on a machine
with other work the wall time says little, and the load is printed beside it. Memory is each process's peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import REPO, save, show

CONFIGS = REPO / "benchmarks" / "configs"
SHAPE = "qwen3-30b-a3b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="folders of benchmarks/configs")
    parser.add_argument("--layers", help="comma-separated numbers of layers")
    parser.add_argument("--target", default="auto")
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "BUNDLE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return print(json.dumps(build_one(*map(Path, options.one), options.target)))
    if options.layers:
        return growth([int(count) for count in options.layers.split(",")], options.target)
    names = options.models or sorted(folder.name for folder in CONFIGS.iterdir())
    rows = [{"model": name, **measure(CONFIGS / name, options.target)} for name in names]
    show("moec build --plan-only", rows)
    save("plan_only", {"models": rows})


def growth(counts: list[int], target: str) -> None:
    """The same shape with more and more layers; ratios to the row before."""
    config, rows = json.loads((CONFIGS / SHAPE / "config.json").read_text()), []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps({**config, "num_hidden_layers": count})
            (Path(folder) / "config.json").write_text(text)
            rows.append({"layers": count, **measure(Path(folder), target)})
    show(f"Growth with layers ({SHAPE})", rows)
    keys = ("cpu s", "wall s", "build MB", "engine process MB", "engine MB")
    ratios = [
        {"layers": f"{b['layers']} / {a['layers']}", **{k: b[k] / a[k] for k in keys}}
        for a, b in itertools.pairwise(rows)
    ]
    show("Ratios", ratios)
    save("plan_only_growth", {"rows": rows, "ratios": ratios})


def measure(model: Path, target: str) -> dict[str, object]:
    """One build in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.plan_only", "--target", target]
        command += ["--one", str(model), f"{folder}/plan"]
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"the build of {model.name} failed")
        wall, cpu = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
        facts = {
            "wall s": wall,
            "cpu s": cpu,
            "load": os.getloadavg()[0],
            **json.loads(text.splitlines()[-1]),
        }
    print(model.name, facts, file=sys.stderr, flush=True)
    return facts


def build_one(model: Path, bundle: Path, target: str) -> dict[str, float]:
    """The build itself; what it can say of itself."""
    import onnx

    from moec.builder import build

    report = build(model, bundle, plan_only=True, target=target)
    engine = report.engines[0] if report.engines else {}
    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    children = resource.getrusage(resource.RUSAGE_CHILDREN)  # the engine process
    return {
        "engine cpu s": children.ru_utime + children.ru_stime,
        "engine wall s": engine.get("seconds", 0.0),
        "build MB": _peak_mb(),
        "engine process MB": engine.get("peak_rss_bytes", 0) / 1e6,
        "nodes": len(graph.node),
        "engine MB": engine.get("plan_bytes", 0) / 1e6,
        "weights GB": report.sizes["total"] / 1e9,
    }


def _peak_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
