"""Builds an engine from a lowered graph in a child process, and checks that it is the engine we meant."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx

from moec.compile.build_log import causes, parse_log
from moec.compile.checks import aliases_of, check_graph, load_graph, plugin_nodes
from moec.compile.child import LOWERED, PLAN
from moec.compile.plugins import LIBRARY, plugin_library
from moec.compile.report import PROFILES, EngineReport, profile_report
from moec.errors import MoecError

OnProgress = Callable[[float, str, float | None], None]
"""Called with the fraction done (0..1), what TensorRT is doing, and the seconds left (None while unknown)."""
_GRACE_SECONDS = 5


def compile_engine(
    lowered: Path,
    targets: Sequence[str],
    plan: Path,
    *,
    batch: int,
    chunk: int,
    module: str = "tensorrt_rtx",
    library: Path | None = None,
    log: Path | None = None,
    on_progress: OnProgress | None = None,
) -> EngineReport:
    """Build one plan with two static profiles, decode (b=batch, S=1) and prefill (b=1, S=chunk).

    Args:
        lowered: `lowered.onnx`, as `lowering.lower` makes it.
        targets: Architectures of one module (targets.parse_targets).
        plan: Written as a whole or not at all.
        library: The plugin library; the installed one by default.
        log: Where TensorRT's verbose log goes; beside the plan by default.
        on_progress: See OnProgress.

    Raises:
        MoecError: anything that went wrong, with the node or plugin and the log's path.
        KeyboardInterrupt: Ctrl-C; the child is ended and no plan is left.
    """
    library = library or plugin_library()
    log = log or plan.with_suffix(".log")
    model = load_graph(lowered)
    check_graph(model, lowered)
    profiles = [_profile(model, "decode", batch, 1), _profile(model, "prefill", 1, chunk)]
    request = {"module": module, "targets": list(targets), "profiles": profiles}
    files = {LOWERED: lowered, LIBRARY: library}
    with tempfile.TemporaryDirectory(prefix=".moec-build-", dir=plan.parent) as folder:
        facts = _run_child(Path(folder), request, files, log, on_progress)
        report = _report(model, facts, request, library, log)
        _verify(report, Counter(plugin_nodes(model).values()), library, Path(folder) / PLAN)
        (Path(folder) / PLAN).replace(plan)
    return dataclasses.replace(report, plan=plan.name)


def _profile(model: onnx.ModelProto, name: str, b: int, s: int) -> dict[str, Any]:
    sizes, shapes = {"b": b, "S": s}, {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if any(dim.dim_param for dim in dims):
            shapes[value.name] = [sizes[dim.dim_param] if dim.dim_param else dim.dim_value for dim in dims]
    return {"name": name, "shapes": shapes}


def _run_child(
    folder: Path, request: dict[str, Any], files: dict[str, Path], log: Path, on_progress: OnProgress | None
) -> dict[str, Any]:
    """Run a child in `folder`, where everything has a fixed name: TensorRT orders parts of a plan by heap
    addresses, and those depend on the lengths of the paths that it is given."""
    (folder / "request.json").write_text(json.dumps(request))
    for name, file in files.items():
        (folder / name).symlink_to(file.resolve())
    reader, writer = os.pipe()
    with log.open("wb") as stderr:
        # A session of its own: Ctrl-C reaches us alone, and we end the child.
        child = subprocess.Popen(
            [sys.executable, "-m", "moec.compile.child", "request.json", str(writer)],
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=[writer],
            start_new_session=True,
        )
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            message = _follow(lines, on_progress)
        code = child.wait()
    finally:
        _end(child)
    if "result" in message:
        return message["result"]
    raise _failure(message.get("error"), code, log)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    # Without its per-thread cache, malloc never gives one thread what another allocated and this one freed.
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    return os.environ | tunables | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def _follow(lines: Any, on_progress: OnProgress | None) -> dict[str, Any]:
    """Forward progress until the child's last message; {} if it died without one."""
    start, last = time.monotonic(), {}
    for line in lines:
        message = json.loads(line)
        if "progress" not in message:
            last = message
        elif on_progress is not None:
            done, elapsed = message["progress"], time.monotonic() - start
            left = elapsed * (1 - done) / done if done > 0.05 else None
            on_progress(done, message["phase"], left)
    return last


def _end(child: subprocess.Popen) -> None:
    """End a child that still runs: Ctrl-C, or an error in a callback."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _failure(error: dict[str, Any] | None, code: int, log: Path) -> MoecError:
    reasons = causes(log.read_text(errors="replace"))
    details = [*reasons[:3], f"Full log: {log}"]
    if error is not None:
        details = [error["hint"], *details] if error["hint"] else details
        first = reasons[0] if reasons and "could not build" in error["what"] else None
        what = f"{error['what']}: {first}" if first else error["what"]
        hint = "\n  ".join(line for line in details if line != first)
        return MoecError(what, where=error["where"], hint=hint)
    died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return MoecError(f"the TensorRT build process died ({died})", hint="\n  ".join(details))


def _report(
    model: onnx.ModelProto, facts: dict[str, Any], request: dict[str, Any], library: Path, log: Path
) -> EngineReport:
    parsed = parse_log(log.read_text(errors="replace"))
    plugins, aliases = plugin_nodes(model), aliases_of(model)
    embedded = library.read_bytes()
    return EngineReport(
        plan=PLAN,
        targets=tuple(request["targets"]),
        profiles=tuple(profile_report(index, parsed, plugins, aliases) for index in range(len(PROFILES))),
        aliases=aliases,
        plugin_library_bytes=len(embedded),
        plugin_library_sha256=hashlib.sha256(embedded).hexdigest(),
        weights_bytes=parsed.weights_bytes,
        log=str(log),
        bindings=tuple(parsed.bindings),
        **facts,
    )


def _verify(report: EngineReport, wanted: Counter, library: Path, plan: Path) -> None:
    """The engine has every plugin layer in both profiles, shares its caches, and carries the plugins."""
    log = f"Full log: {report.log}"
    for profile in report.profiles:
        if Counter(profile.plugin_layers) != wanted:
            found = f"{profile.plugin_layers}, the graph has {dict(wanted)}"
            raise MoecError(f"plugin layers are missing in the {profile.name} profile: {found}", hint=log)
        if profile.copies:
            raise MoecError(f"the {profile.name} profile copies a cache", where=profile.copies[0], hint=log)
    if report.aliases and not report.alias_queries:
        raise MoecError(
            "TensorRT never asked the plugins which outputs share memory: the caches would be lost",
            where=f"{library}, plugin build interface",
            hint=f"The library reports another plugin ABI version than TensorRT wants: rebuild it.\n  {log}",
        )
    # The library sits near the start of the plan, byte for byte.
    embedded = library.read_bytes()
    with plan.open("rb") as file:
        if embedded not in file.read(len(embedded) + (1 << 20)):
            raise MoecError("the plan does not contain the plugin library", hint=log)
