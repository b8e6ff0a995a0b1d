"""Writes docs/families.md from graphs/ and graphs/parity.json: `python docs/make_families.py`.

Every fact in the table is read off a golden graph: router and activation off its moec nodes, features off
their attributes and off the operators around them. `graphs/parity.json` holds the differences that
tests/parity/test_families.py measured (run it with MOEC_FAMILY_REPORT=graphs/parity.json).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRAPHS, PAGE = ROOT / "graphs", ROOT / "docs" / "families.md"

_HEAD = """# Model families

Made by `docs/make_families.py` from the graphs in `graphs/`, which tests compare with what tiny random
models of each family give today. moec has no list of supported families: a family that transformers can
load is captured by its attention and experts interfaces. These were tried; any other may work as well.

- **Router**: what `moec::PipelinedMoE` computes. *standard* means that the router is of another kind: it
  stays in standard operators, its experts are `moec::Experts`.
- **Attention**: heads, key and value dimensions of the tiny model, and what differs from plain attention.
- **Plugins**: nodes of attention, experts with router, experts without. Everything else is standard
  operators; recurrent layers (linear attention, state space, convolution) stay standard, with their state
  as inputs and outputs.
- **Difference**: largest difference of a logit from transformers' eager code, as part of the range of the
  logits, over two slots of unequal length, prefill and 16 steps, fp32 cache, unquantized weights. A
  TensorRT-RTX engine (sm_80, int4, MKV2) of each was built and its plugins counted.

| Family | Router | Experts | Attention | Recurrent layers | Plugins | Standard operators | Difference |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""

_TAIL = """
## What is not supported

{refused}

DeepSeek's latent attention (`deepseek_v2`, `deepseek_v3`, `axk1`, `glm4_moe_lite`) runs with expanded
keys and values. That saves nothing over a latent cache; the quantized formats apply to the expanded
cache.

Llama 4 runs within one attention chunk (`--context` up to `attention_chunk_size`), with one expert a
token.

transformers' single steps of `nemotron_h` differ from its own pass over a whole text by 1e-3 of the
range; the difference above is from the whole pass.
"""


def page() -> str:
    """The whole text."""
    parity = json.loads((GRAPHS / "parity.json").read_text())
    rows = [row(path, parity) for path in sorted(GRAPHS.iterdir()) if path.is_dir()]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL.format(refused=refused())


def refused() -> str:
    """The sentences of `moec.checkpoint.unsupported`, and dense models."""
    sys.path.insert(0, str(ROOT))  # a checkout need not be installed
    from moec.checkpoint.unsupported import _BY_FAMILY, _BY_LAYER

    layers = [f"- layers of type `{kind}`: {why}" for kind, why in _BY_LAYER.items()]
    families = [f"- `{family}`: {why}" for family, why in _BY_FAMILY.items()]
    return "\n".join([*families, *layers, "- dense models: they have no expert weights"])


def row(folder: Path, parity: dict[str, float]) -> str:
    """One line of the table."""
    text = (folder / "rewritten.txt").read_text(encoding="utf-8")
    nodes = [line.strip() for line in text.partition("\nnodes\n")[2].splitlines()]
    kinds = Counter(match[1] for n in nodes if (match := re.match(r".* = ([\w:.]+)\(", n)))
    attention = [_attributes(n) for n in nodes if "moec::AsymKVAttention" in n]
    experts = [_attributes(n) for n in nodes if "moec::PipelinedMoE" in n or "moec::Experts" in n]
    plugins = [str(kinds[f"moec::{k}"]) for k in ("AsymKVAttention", "PipelinedMoE", "Experts")]
    standard = sum(count for kind, count in kinds.items() if "::" not in kind)
    cells = [
        f"`{folder.name}`", _router(experts[0]), _experts(experts[0]), _attention(text, nodes, attention),
        _recurrent(text), "/".join(plugins), str(standard), f"{parity[folder.name]:.0e}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _attributes(node: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=([^,{}\s]+)", node[node.rindex("{") :]))


def _router(a: dict[str, str]) -> str:
    if "scoring" not in a:
        return "standard"
    words = [a["scoring"].replace("_", " "), f"top {a['top_k']}"]
    if int(a["num_groups"]) > 1:
        words.append(f"{a['topk_groups']} of {a['num_groups']} groups by {a['group_score']}")
    if a["renormalize"] == "1":
        words.append("renormalized")
    if float(a["routed_scale"]) != 1:
        words.append(f"scaled by {float(a['routed_scale']):g}")
    return ", ".join(words)


def _experts(a: dict[str, str]) -> str:
    gated = "gated " if a["gated"] == "1" else ""
    return f"{gated}{a['activation']}{', biases' if a['has_bias'] == '1' else ''}"


def _attention(text: str, nodes: list[str], layers: list[dict[str, str]]) -> str:
    node = next(n for n in nodes if "moec::AsymKVAttention" in n)
    inputs = re.search(r"AsymKVAttention\(([^)]*)", node)[1].split(", ")
    q, k, v = (_dimensions(nodes, name) for name in inputs[:3])
    words = [f"{q[2]}/{k[2]} heads of {k[3]}" + (f", {v[3]}" if v[3] != k[3] else "")]
    windows = {a["window"] for a in layers}
    if windows != {"0"}:
        words.append("window" if "0" not in windows else "window in some layers")
    words += ["sink logits"] if any(a["has_sink_logits"] == "1" for a in layers) else []
    words += ["soft cap"] if any(float(a["softcap"]) for a in layers) else []
    words += ["norms of q and k"] if re.search(r"\.(q|query)_(norm|layernorm)\.weight", text) else []
    words += ["biases"] if re.search(r"\.(q_proj|qkv_proj)\.bias", text) else []
    words += ["latent"] if "kv_a_proj_with_mqa" in text else []
    return ", ".join(words)


def _dimensions(nodes: list[str], name: str) -> list[str]:
    line = next(n for n in nodes if re.match(rf"(.*, )?{re.escape(name)}: ", n))
    return re.search(rf"{re.escape(name)}: \w+\[([^\]]*)\]", line)[1].split(",")


def _recurrent(text: str) -> str:
    found = sorted(set(re.findall(r"^  state\.\d+\.(conv|recurrent)\d*: ", text, re.M)))
    return " + ".join(found) or "-"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
