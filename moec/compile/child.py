"""The build child: `python -m moec.compile.child REQUEST.json DESCRIPTOR`, one process for one engine.

A process of its own because TensorRT can abort, keeps its memory, and numbers things by process-wide counters
(so that only fresh processes build identical bytes). It writes one JSON object a line to the descriptor:
{"progress": fraction, "phase": name} and at last {"result": ...} or {"error": ...}. Everything
TensorRT says goes to stderr, which the parent keeps as the log.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from moec.compile.adapter import Adapter
from moec.compile.plugins import LIBRARY
from moec.errors import MoecError

# Names in the working directory, the same in every build: their lengths are part of the heap's layout.
LOWERED, PLAN = "lowered.onnx", "engine.plan"
_SETTLE_SECONDS = 0.1  # until the main thread waits, so that memory is mapped in one order
_ADDR_NO_RANDOMIZE, _QUERY_PERSONALITY = 0x0040000, 0xFFFFFFFF
# Share of the build after which each step of the top phase ends, as measured on graphs of 2 to 64 layers.
_STEP_ENDS = (0.01, 0.01, 0.03, 0.03, 0.97, 1.0)
# The same within "Building engine from subgraph".
_SUBGRAPH = {
    "Optimizing graph": (0.0, 0.05),
    "Timing tensor reformats": (0.05, 0.5),
    "Determining refit engines": (0.5, 1.0),
}


class Channel:
    """The line protocol to the parent."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1)

    def send(self, **message: Any) -> bool:
        """False when the parent is gone or has cancelled."""
        try:
            self._file.write(json.dumps(message) + "\n")
        except (BrokenPipeError, ValueError):
            return False
        return True


def make_logger(trt: Any) -> Any:
    """Writes every message to stderr as one `[SEVERITY] text` record."""

    class Logger(trt.ILogger):
        def log(self, severity: Any, text: str) -> None:
            sys.stderr.write(f"[{severity.name}] {text}\n")

    return Logger()


def make_monitor(trt: Any, channel: Channel) -> Any:
    """An IProgressMonitor that turns phases into one fraction; a lost parent cancels the build."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            super().__init__()
            self.fraction, self.sent, self.alive = 0.0, -1.0, True
            self.steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self.steps[name] = steps

        def step_complete(self, name: str, step: int) -> bool:
            self.report(name, _fraction(name, step + 1, self.steps.get(name, 1)))
            return self.alive

        def phase_finish(self, name: str) -> None:
            pass

        def report(self, name: str, fraction: float) -> None:
            self.fraction = max(self.fraction, fraction)
            if self.fraction >= self.sent + 0.01:
                self.sent = self.fraction
                self.alive = channel.send(progress=round(self.fraction, 3), phase=name)

    return Monitor()


def _fraction(name: str, done: int, steps: int) -> float:
    if name == "Building engine":
        return _STEP_ENDS[min(done, len(_STEP_ENDS)) - 1]
    if name in _SUBGRAPH:
        (low, high), (start, end) = _SUBGRAPH[name], (_STEP_ENDS[3], _STEP_ENDS[4])
        return start + (end - start) * (low + (high - low) * done / max(steps, 1))
    return 0.0


def build(adapter: Adapter, library: str, request: dict[str, Any], channel: Channel) -> dict[str, Any]:
    """Build one plan as the request says; returns what the parent cannot see from outside."""
    start = time.perf_counter()
    logger = make_logger(adapter.trt)
    builder = adapter.trt.Builder(logger)
    adapter.load_plugins(library)
    network, parser = adapter.parse(builder, logger, Path(LOWERED))
    config = adapter.config(builder, request["targets"], library)
    _add_profiles(builder, config, network, request["profiles"])
    # The config does not hold a reference to its monitor.
    monitor = config.progress_monitor = make_monitor(adapter.trt, channel)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise MoecError("TensorRT could not build the engine" if monitor.alive else "the build was cancelled")
    facts = _write(plan, Path(PLAN))
    del parser
    return facts | {
        "tensorrt": adapter.version,
        "alias_queries": _alias_queries(library),
        "seconds": time.perf_counter() - start,
        "peak_rss_bytes": peak_rss(),
    }


def _add_profiles(builder: Any, config: Any, network: Any, profiles: list[dict[str, Any]]) -> None:
    for sizes in profiles:
        profile = builder.create_optimization_profile()
        for name, shape in sizes["shapes"].items():
            profile.set_shape(name, shape, shape, shape)
        if config.add_optimization_profile(profile) < 0:
            raise MoecError(f"TensorRT refuses the {sizes['name']} profile")


def _write(plan: Any, path: Path) -> dict[str, Any]:
    view = memoryview(plan)
    with path.open("wb") as file:
        file.write(view)
    return {"plan_bytes": view.nbytes, "plan_sha256": hashlib.sha256(view).hexdigest()}


def peak_rss() -> int:
    """Peak resident memory in bytes. (getrusage would count what the parent had when it forked.)"""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def _alias_queries(library: str) -> int:
    """How often TensorRT asked the plugins for aliases; the library is loaded, so this is its own counter."""
    query = ctypes.CDLL(library).moec_trt_alias_queries
    query.restype = ctypes.c_int64
    return query()


def fix_addresses() -> None:
    """Start this process again without address randomisation, once.

    TensorRT orders parts of a plan by heap addresses. Where a sandbox forbids the change nothing happens, and
    a plan may differ from the next in the order of its parts.
    """
    libc = ctypes.CDLL(None)
    current = libc.personality(_QUERY_PERSONALITY)
    if current < 0 or current & _ADDR_NO_RANDOMIZE:
        return
    libc.personality(current | _ADDR_NO_RANDOMIZE)
    if libc.personality(_QUERY_PERSONALITY) & _ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, sys.orig_argv)


def main(arguments: list[str]) -> int:
    fix_addresses()
    request = json.loads(Path(arguments[0]).read_text())
    channel = Channel(int(arguments[1]))
    try:
        adapter, library = Adapter(request["module"]), f"./{LIBRARY}"
        ctypes.CDLL(library)
    except MoecError as error:
        channel.send(error=vars_of(error))
        return 0
    except OSError:
        pass  # TensorRT says why, in its own words
    # A new thread has a malloc arena of its own, still empty: what the main thread's heap looks like (that
    # depends on the lengths of paths and variables) does not order anything in the plan. Libraries are loaded
    # before it starts, since the loader keeps their full paths.
    worker = threading.Thread(target=answer, args=(adapter, library, request, channel))
    worker.start()
    worker.join()
    return 0


def answer(adapter: Adapter, library: str, request: dict[str, Any], channel: Channel) -> None:
    """Build, and send the result or the error."""
    time.sleep(_SETTLE_SECONDS)
    try:
        channel.send(result=build(adapter, library, request, channel))
    except MoecError as error:
        channel.send(error=vars_of(error))


def vars_of(error: MoecError) -> dict[str, str | None]:
    """What the parent makes the same error of."""
    return {"what": error.what, "where": error.where, "hint": error.hint}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
