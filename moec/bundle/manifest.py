"""`manifest.json`: everything about a bundle that is not weights.

Schema policy. `schema_version` is MAJOR.MINOR. A newer MINOR only adds keys: it is read, unknown keys are
ignored. A newer MAJOR is refused, with a message that names both versions. The checksum rule below is the
same in every version.

Checksum rule. `checksum` is the XXH64 (seed 0, hex) of the file's own bytes with these 16 digits replaced
by 16 zeros: it covers every byte, and needs no JSON writer to verify.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from moec.bundle.checksums import REBUILD, FileRecord
from moec.bundle.geometry import Geometry, from_fields
from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout

SCHEMA_VERSION = "1.0"
MANIFEST = "manifest.json"
_ZEROS = "0" * 16


@dataclass(frozen=True)
class ModelIdentity:
    """Where the model came from: folder name, transformers model type, XXH64 of config.json."""

    name: str
    model_type: str
    config_hash: str


@dataclass(frozen=True)
class Binding:
    """One input or output of the bundle's graph.

    Attributes:
        name: Name in the graph.
        dtype: NumPy name: int32, int8, float16, float32.
        shape: Sizes; "b" and "S" are chosen per call.
        source: request | cache | calibration | store (inputs), result | cache (outputs).
        alias_of: For an output that shares its input's memory, that input's name.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    source: str
    alias_of: str | None = None


@dataclass(frozen=True)
class TokenizerFacts:
    """What the runtime needs to know without loading a tokenizer."""

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    has_tokenizer: bool
    has_chat_template: bool


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        context, batch: Tokens a slot can hold, and slots (B).
        kv: Cache layout of each attention layer.
        weights_format, experts_format: int4 | bf16; group_size is 64 for int4.
        files: Relative name -> size and checksums, for every file but the manifest.
        inputs, outputs: The binding table of `model.onnx`.
        generation: Sampling defaults of the checkpoint's generation_config.json.
        sizes: Bytes by component.
        options: How the bundle was made (the arguments of `moec build`).
        engines: One record a plan: file, module, targets, profiles, memory plan, binding table
            (moec.compile.stage.Engine.to_manifest).
        plan: True for a bundle of `moec build --plan-only`: graph, engines and places, but no weights.
    """

    model: ModelIdentity
    geometry: Geometry
    context: int
    batch: int
    kv: dict[int, KVLayout]
    weights_format: str
    experts_format: str
    group_size: int
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    tokenizer: TokenizerFacts
    moec_version: str
    files: dict[str, FileRecord] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    engines: list[dict[str, Any]] = field(default_factory=list)
    plan: bool = False
    schema_version: str = SCHEMA_VERSION

    def to_json(self) -> dict[str, Any]:
        """A tree of plain JSON values."""
        tree = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tree["geometry"] = self.geometry.to_json()
        tree["kv"] = [{"layer": layer, **_plain(layout)} for layer, layout in sorted(self.kv.items())]
        tree["files"] = {name: _plain(record) for name, record in sorted(self.files.items())}
        for name in ("model", "tokenizer"):
            tree[name] = _plain(tree[name])
        for name in ("inputs", "outputs"):
            tree[name] = [_plain(binding) for binding in tree[name]]
        return tree

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_json`; unknown keys are ignored, missing ones raise MoecError."""
        fields = dict(tree)
        readers = {
            "model": lambda x: from_fields(ModelIdentity, x),
            "geometry": Geometry.from_json,
            "kv": lambda xs: {int(x["layer"]): from_fields(KVLayout, x) for x in xs},
            "files": lambda xs: {name: FileRecord.from_json(x) for name, x in xs.items()},
            "inputs": _bindings,
            "outputs": _bindings,
            "tokenizer": _tokenizer_facts,
        }
        for name, read in readers.items():
            if name in fields:
                fields[name] = read(fields[name])
        return from_fields(cls, fields)


def _plain(record: Any) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(record)))


def _bindings(trees: list[Mapping[str, Any]]) -> tuple[Binding, ...]:
    return tuple(from_fields(Binding, {**tree, "shape": tuple(tree["shape"])}) for tree in trees)


def _tokenizer_facts(tree: Mapping[str, Any]) -> TokenizerFacts:
    return from_fields(TokenizerFacts, {**tree, "eos_token_ids": tuple(tree["eos_token_ids"])})


def render(tree: Mapping[str, Any]) -> bytes:
    """The bytes of `manifest.json`: sorted keys, ASCII, checksum filled in."""
    text = json.dumps({**tree, "checksum": _ZEROS}, indent=1, sort_keys=True) + "\n"
    marker = f'"checksum": "{_ZEROS}"'
    digest = xxhash.xxh64_hexdigest(text.encode("ascii"))
    return text.replace(marker, f'"checksum": "{digest}"', 1).encode("ascii")


def parse(data: bytes, where: str) -> Manifest:
    """Read and check the bytes of a manifest.

    Raises:
        MoecError: not JSON, wrong checksum, or a schema that this version does not read.
    """
    tree = _load_json(data, where)
    intact = _checksum_matches(data, tree.get("checksum"))
    _check_schema(tree.get("schema_version"), intact, where)
    if not intact:
        raise MoecError(f"{MANIFEST} is damaged: wrong checksum", where=where, hint=REBUILD)
    return Manifest.from_json(tree)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle folder.

    Raises:
        MoecError: no such folder, no manifest in it, or what `parse` refuses.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise MoecError("There is no bundle at this path", where=str(folder), hint=_MAKE_ONE)
    if not path.is_file():
        raise MoecError(
            f"This folder is not a bundle: it has no {MANIFEST}", where=str(folder), hint=_MAKE_ONE
        )
    return parse(path.read_bytes(), str(path))


_MAKE_ONE = "A bundle is made by `moec build MODEL -o BUNDLE`."


def _load_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        tree = json.loads(data.decode("ascii"))
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise MoecError(f"{MANIFEST} is damaged: it is not a JSON object", where=where, hint=REBUILD)
    return tree


def _checksum_matches(data: bytes, digest: Any) -> bool:
    if not isinstance(digest, str) or len(digest) != 16:
        return False
    zeroed = data.replace(f'"checksum": "{digest}"'.encode(), f'"checksum": "{_ZEROS}"'.encode(), 1)
    return zeroed != data and xxhash.xxh64_hexdigest(zeroed) == digest


def _check_schema(version: Any, intact: bool, where: str) -> None:
    try:
        major = int(str(version).split(".")[0])
    except ValueError:
        raise MoecError(
            f"{MANIFEST} is damaged: it has no schema version", where=where, hint=REBUILD
        ) from None
    ours = int(SCHEMA_VERSION.split(".")[0])
    if major == ours:
        return
    doubt = "" if intact else " (or the file is damaged: its checksum does not match)"
    if major > ours:
        what = f"The bundle was made by a newer moec: its schema is {version}, this one reads {ours}.x{doubt}"
        raise MoecError(what, where=where, hint="Update moec, or build the bundle again with this version.")
    what = f"The bundle's schema {version} is no longer read; this moec reads {ours}.x{doubt}"
    raise MoecError(what, where=where, hint="Build the bundle again.")
