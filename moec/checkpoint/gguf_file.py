"""GGUF files: tensors by name, dequantized one at a time, or one expert at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` library maps the file and knows
every quantization.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moec.errors import MoecError

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_ONE_EXPERT = re.compile(r"(blk\.\d+\.ffn_(?:gate|up|down))\.(\d+)\.weight")


class GgufFile:
    """One model in GGUF, in one file or in shards.

    Files of llama.cpp from before April 2024 have a tensor for each expert; they appear as one here too.

    Attributes:
        path: The file that was asked for.
        names: Names of all tensors.

    Raises:
        MoecError: no `gguf` library, not a GGUF file, or a shard is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        readers = [_reader(shard) for shard in _shards(path)]
        self._fields = readers[0].fields
        self._tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
        self._experts = _expert_parts(self._tensors)
        self.names = frozenset({*self._tensors, *self._experts})

    def field(self, name: str, default: Any = None) -> Any:
        """A metadata value, as a Python value."""
        return self._fields[name].contents() if name in self._fields else default

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return str(self.field("general.architecture", ""))

    def write_metadata(self, path: Path, without: str) -> None:
        """Writes a GGUF file of this one's metadata, but for names that begin with `without`."""
        from gguf import GGUFValueType, GGUFWriter

        writer = GGUFWriter(path, self.architecture)
        for name, field in self._fields.items():
            if name.startswith(("GGUF.", "general.architecture", without)):
                continue
            element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=element)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor in NumPy's order.

        Raises:
            MoecError: there is no such tensor.
        """
        if name not in self._tensors:
            raise MoecError(f"the GGUF file has no tensor {name}", where=str(self.path))
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def tensor(self, name: str, index: int | None = None) -> np.ndarray:
        """A tensor, or `[index]` of it, in NumPy's order: bf16, fp16 and fp32 as they are, others as fp32."""
        from gguf import GGMLQuantizationType, dequantize

        if name in self._experts:
            parts = self._experts[name]
            return np.stack([self.tensor(p) for p in parts]) if index is None else self.tensor(parts[index])
        found = self._tensors[name]
        data = found.data if index is None else found.data[index]
        if found.tensor_type == GGMLQuantizationType.BF16:
            return data.view(ml_dtypes.bfloat16)
        if found.tensor_type in (GGMLQuantizationType.F16, GGMLQuantizationType.F32):
            return np.asarray(data)
        return dequantize(data, found.tensor_type)


def _expert_parts(names: Iterable[str]) -> dict[str, list[str]]:
    """'blk.0.ffn_up_exps.weight' -> the tensors of its experts in order; only where none is missing."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if match := _ONE_EXPERT.fullmatch(name):
            found.setdefault(f"{match[1]}_exps.weight", {})[int(match[2])] = name
    return {
        merged: [parts[i] for i in range(len(parts))]
        for merged, parts in found.items()
        if max(parts) == len(parts) - 1
    }


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MoecError("reading GGUF needs the gguf library", hint="pip install gguf") from None
    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        hint = "The download was probably cut off: fetch the file again."
        raise MoecError(f"this GGUF file cannot be read: {error}", where=str(path), hint=hint) from None


def _shards(path: Path) -> Sequence[Path]:
    match = _SHARD.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    shards = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for shard in shards:
        if not shard.is_file():
            raise MoecError("a shard of the GGUF model is missing", where=str(shard))
    return shards
