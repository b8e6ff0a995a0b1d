"""What the KV cache's format costs, on the sample MoE and on the same model with all experts active.

    python -m benchmarks.kv_quality [--tokens 4096] [--texts 3] [--experts top-k all] [--formats mkv2 kivi]

Held-out texts (plays, which the calibration did not see) are scored as decoding token by token would: a query
sees what is quantized by then in quantized form. "moec" rows are a built bundle run by moec itself, bf16
weights; the other rows replace the attention of transformers in fp32. The yardstick is fp32 over an exact
cache. Bits are counted from the bytes that are allocated, metadata included; ring and sinks apart.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

import moec
from benchmarks.distributions import Comparison
from benchmarks.kv_baselines import Kivi2, NaiveOutliers, attend
from benchmarks.report import REPO, save, show
from moec.bundle.geometry import Geometry
from moec.calibrate.run import attention_layer, fit_layers, observe, read_windows
from moec.calibrate.simulate import cached_attention
from moec.calibrate.streaming import StreamedModel
from moec.checkpoint import Checkpoint, open_checkpoint
from moec.frontend.probe import probe
from moec.reference.kv_cache import neutral_calibration
from moec.reference.kv_layout import KVLayout
from tests.helpers.text import held_out_texts

CONTEXT = 8192
ERROR_TOKENS = 1024
FORMATS, BASELINES = ("fp16", "mkv2", "mkv2_lean", "int8"), ("naive", "kivi")
BUILDS = REPO / "build" / "benchmarks"
Heads = Callable[[int, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Scheme:
    """A cache format: attention over it (layer, q, k, v `[H,S,D]` -> `[Hq,S,Dv]`), and what it takes."""

    name: str
    attention: Heads
    bits: float | None = None
    ring_bits: float | None = None
    share: float | None = None
    comparison: Comparison = field(default_factory=Comparison)
    changed: list[float] = field(default_factory=list)
    errors: dict[int, np.ndarray] = field(default_factory=dict)

    def row(self) -> dict[str, object]:
        c, errors = self.comparison, [float(np.sqrt(s[0] / s[1])) for s in self.errors.values()]
        return {
            "": self.name,
            "bits": _number(self.bits, 3),
            "ring+sinks": _number(self.ring_bits, 3),
            f"of fp16 at {CONTEXT}": "" if self.share is None else f"{100 * self.share:.1f} %",
            "perplexity": round(c.perplexity, 3) if c.predicted else "",
            "KL": round(c.divergence, 4) if c.predicted else "",
            "top-1": f"{100 * c.top1:.1f} %" if c.predicted else "",
            "attention error": f"{np.exp(np.log(errors).mean()):.3f}" if errors else "",
            "worst layer": f"{max(errors):.3f}" if errors else "",
            "changed experts": f"{100 * np.mean(self.changed):.1f} %" if self.changed else "",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=REPO / "samples" / "smolmoe" / "checkpoint")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--texts", type=int, default=3)
    parser.add_argument("--experts", nargs="+", choices=("top-k", "all"), default=("top-k", "all"))
    parser.add_argument(
        "--formats", nargs="+", choices=(*FORMATS, *BASELINES), default=(*FORMATS, *BASELINES)
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-bundle", action="store_true", help="leave out the rows of moec itself")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for experts in options.experts:
        folder = options.checkpoint if experts == "top-k" else all_experts(options.checkpoint)
        results[experts] = measure(folder, options)
        show(f"{experts} experts, {options.texts} texts of {options.tokens} tokens", results[experts]["rows"])
    save("kv_quality", {"tokens": options.tokens, "texts": options.texts, "results": results})


def all_experts(checkpoint: Path) -> Path:
    """A copy in which every token uses every expert.

    The chosen weights of the sample sum to 1; experts are scaled so that their sum stays as large as with
    top-k.
    """
    folder = BUILDS / "all_experts"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    factor = config["num_experts"] / config["num_experts_per_tok"]
    config["num_experts_per_tok"] = config["num_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".experts." in name and "down_proj" in name:
            tensors[name] *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All rows for one checkpoint."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = held_out_texts(tokenizer, options.tokens, options.texts)
    checkpoint = open_checkpoint(folder)
    geometry = probe(checkpoint, CONTEXT)
    runner = Runner(checkpoint, geometry)
    schemes = hooked_schemes(checkpoint, geometry, options.formats)
    sessions = [] if options.no_bundle else bundle_schemes(folder, options.threads)
    exact = Scheme("fp32, exact", exact_attention(geometry))
    for number, text in enumerate(texts):
        reference, chosen = runner.run(text, exact.attention)
        exact.comparison.add(np.asarray(text), reference, reference)
        for scheme in schemes:
            start = time.perf_counter()
            logits, own = runner.run(text, scheme.attention)
            scheme.comparison.add(np.asarray(text), reference, logits)
            scheme.changed.append(changed_share(chosen, own))
            print(f"text {number + 1}: {scheme.name}  {time.perf_counter() - start:.0f} s", flush=True)
        for scheme, session in sessions:
            scheme.comparison.add(np.asarray(text), reference, session.score(text))
        runner.errors(text[:ERROR_TOKENS], exact.attention, schemes)
    rows = [scheme.row() for scheme in [exact, *(s for s, _ in sessions), *schemes]]
    layers = {s.name: {str(i): float(np.sqrt(e[0] / e[1])) for i, e in s.errors.items()} for s in schemes}
    return {"rows": rows, "attention_error": layers}


class Runner:
    """The model in fp32 over any cache."""

    def __init__(self, checkpoint: Checkpoint, geometry: Geometry) -> None:
        self.geometry, self.model = geometry, StreamedModel(checkpoint)
        self.model.on_experts = lambda name, ids: self._chosen.append(ids.sort(-1).values)
        self._chosen: list[torch.Tensor] = []

    def run(self, text: list[int], attention: Heads) -> tuple[np.ndarray, torch.Tensor]:
        """Logits float32 `[S,V]` and sorted expert ids `[layers,S,K]`."""
        self._chosen = []
        self.model.attention = self._hook(attention)
        logits = self.model.logits(torch.tensor([text]), len(text))[0].numpy()
        return logits, torch.stack(self._chosen)

    def errors(self, text: list[int], exact: Heads, schemes: list[Scheme]) -> None:
        """Adds every scheme's squared attention error on the queries, keys and values of the exact model."""

        def attention(layer: int, *qkv: np.ndarray) -> np.ndarray:
            out = exact(layer, *qkv)
            for scheme in schemes:
                off = np.square(scheme.attention(layer, *qkv) - out, dtype=np.float64).sum()
                sums = np.array([off, np.square(out, dtype=np.float64).sum()])
                scheme.errors[layer] = scheme.errors.get(layer, 0) + sums
            return out

        self.model.attention = self._hook(attention)
        self.model.hidden(torch.tensor([text]))

    @staticmethod
    def _hook(attention: Heads) -> Any:
        def hook(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> torch.Tensor:
            out = attention(module.layer_idx, *(x[0].numpy() for x in (query, key, value)))
            return torch.from_numpy(out).transpose(0, 1)[None]

        return hook


def changed_share(chosen: torch.Tensor, own: torch.Tensor) -> float:
    """Share of chosen experts that the reference did not choose; ids `[layers,S,K]`."""
    return 1 - float((own[..., None] == chosen[..., None, :]).any(-1).float().mean())


def exact_attention(geometry: Geometry) -> Heads:
    """Over an fp32 cache."""
    layouts = layouts_of(geometry, "fp32")
    return cached(geometry, layouts, {i: neutral_calibration(x) for i, x in layouts.items()})


def cached(geometry: Geometry, layouts: dict[int, KVLayout], calibrations: dict[int, Any]) -> Heads:
    """Over moec's cache, by the reference's arithmetic."""

    def attention(layer: int, *qkv: np.ndarray) -> np.ndarray:
        return cached_attention(attention_layer(geometry, layer), layouts[layer], calibrations[layer], *qkv)

    return attention


def layouts_of(geometry: Geometry, format: str) -> dict[int, KVLayout]:
    return {a.layer: KVLayout(format, a.num_kv_heads, a.k_dim, a.v_dim, CONTEXT) for a in geometry.attention}


def hooked_schemes(checkpoint: Checkpoint, geometry: Geometry, formats: list[str]) -> list[Scheme]:
    """The formats that replace transformers' attention, calibrated on moec's default text."""
    layouts = {name: layouts_of(geometry, name) for name in FORMATS if name in formats}
    text = read_windows(checkpoint, geometry, None)
    statistics = observe(checkpoint, layouts_of(geometry, "mkv2"), text.calibration)
    schemes = []
    for name, own in layouts.items():
        scheme = Scheme(name.upper(), cached(geometry, own, fit_layers(geometry, own, statistics)))
        account(scheme, own)
        schemes.append(scheme)
    scales = {a.layer: a.scale for a in geometry.attention}
    if "naive" in formats:
        schemes.append(baseline(NaiveOutliers(mean_magnitudes(checkpoint, text.calibration[:2])), scales))
    if "kivi" in formats:
        schemes.append(baseline(Kivi2(), scales))
    return schemes


def mean_magnitudes(checkpoint: Checkpoint, ids: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Mean |K| and |V| by layer, `[Hkv,D]`, of the first of these windows that a layer sees."""
    from moec.calibrate.streaming import eager

    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        found.setdefault(module.layer_idx, tuple(x[0].abs().mean(1).numpy() for x in (key, value)))
        return eager(module, query, key, value, mask, **options)

    model = StreamedModel(checkpoint)
    model.attention = attention
    model.hidden(torch.from_numpy(ids))
    return found


def baseline(kind: Kivi2 | NaiveOutliers, scales: dict[int, float]) -> Scheme:
    def attention(layer: int, *qkv: np.ndarray) -> np.ndarray:
        out, stored = attend(kind, layer, scales[layer], *qkv)
        scheme.bits = stored.bits
        return out

    scheme = Scheme(kind.name, attention)
    return scheme


def account(scheme: Scheme, layouts: dict[int, KVLayout]) -> None:
    """Bits of blocks and of ring and sinks, and the share of fp16, from allocated arrays of one slot."""
    sizes = np.zeros(2)
    for layout in layouts.values():
        blocks = np.zeros(layout.blocks_shape(1), np.int8) if layout.quantized else np.zeros(0, np.int8)
        sizes += blocks.nbytes, np.zeros(layout.ring_shape(1), layout.ring_dtype).nbytes
    first = next(iter(layouts.values()))
    numbers = sum(x.num_kv_heads * x.row_dim for x in layouts.values())
    in_blocks = numbers * first.num_blocks * first.block_tokens
    scheme.bits = 8 * sizes[0] / in_blocks if first.quantized else 16.0
    scheme.ring_bits = 8 * sizes[1] / (numbers * CONTEXT) if first.quantized else None
    scheme.share = sizes.sum() / (2 * numbers * CONTEXT)


def bundle_schemes(folder: Path, threads: int) -> list[tuple[Scheme, Any]]:
    """Bundles with bf16 weights, run by moec on the CPU."""
    result = []
    for kv in ("fp16", "mkv2"):
        path = BUILDS / f"kv_{folder.name}_{kv}"
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        moec.build(
            folder, path, kv=kv, weights="bf16", experts="bf16", context=CONTEXT, batch=1, target="cpu"
        )
        session = moec.load(path, "cpu", threads=threads)
        scheme = Scheme(f"{kv.upper()} (moec)", lambda *_: None)
        account(scheme, session_layouts(path))
        result.append((scheme, session))
    return result


def session_layouts(path: Path) -> dict[int, KVLayout]:
    from moec.bundle.reader import open_bundle

    return dict(open_bundle(path).manifest.kv)


def _number(value: float | None, digits: int) -> object:
    return "" if value is None else round(value, digits)


if __name__ == "__main__":
    main()
