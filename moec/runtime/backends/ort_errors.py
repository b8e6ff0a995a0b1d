"""Turns ONNX Runtime's exceptions into messages for people."""

from __future__ import annotations

import re

from moec.errors import MoecError

_STATUS = re.compile(r"Status Message:\s*(.*)", re.DOTALL)
_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_NODE = re.compile(r"while running (\S+) node\. Name:'([^']*)'")
_HINTS = {
    "checksum": "The expert store is damaged: copy the bundle again, or rebuild it",
    "nan": "The model computes a NaN here: check the checkpoint, or build with --kv fp32 --weights bf16",
}


def run_error(error: Exception, where: str) -> MoecError:
    """The error of a failed run; `where` names the bundle or graph."""
    message = _status(str(error))
    node = _NODE.search(str(error))
    if not _hint(message) and node:
        where = f"{where}, {node[1]} node {node[2]}"
    return MoecError(message, where=where, hint=_hint(message))


def load_error(error: Exception, where: str) -> MoecError:
    """The error of a graph that ONNX Runtime does not load."""
    what = f"ONNX Runtime cannot load the graph: {_status(str(error))}"
    hint = "If another version of moec made this bundle, build it again with this one"
    return MoecError(what, where=where, hint=hint)


def _status(text: str) -> str:
    found = _STATUS.search(text)
    message = found[1] if found else _PREFIX.sub("", text)
    return " ".join(message.split())


def _hint(message: str) -> str | None:
    words = re.findall(r"[a-z]+", message.lower())
    return next((hint for word, hint in _HINTS.items() if word in words), None)
