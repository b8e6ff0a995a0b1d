"""`moec build model.gguf` makes the bundle of the same weights in safetensors."""

from __future__ import annotations

import gguf
import pytest

from moec.builder import build
from moec.runtime.loading import load
from tests.helpers.gguf_model import write_gguf
from tests.helpers.tiny import tiny_model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_both_bundles_have_the_same_weights(family, tmp_path):
    sizes = dict(moe_intermediate_size=64) if family == "qwen3_moe" else {}
    model = tiny_model(family, 5, **sizes)
    model.bfloat16().save_pretrained(tmp_path / "hf")
    source = write_gguf(tmp_path / "m.gguf", model, gguf.GGMLQuantizationType.BF16)
    options = dict(context=128, batch=2, target="cpu", kv="fp16")
    a, b = (build(m, tmp_path / f"b-{m.name}", **options) for m in (source, tmp_path / "hf"))
    for name in ("experts.moex", "weights.safetensors"):
        assert (a.path / name).read_bytes() == (b.path / name).read_bytes(), name
    ids = list(range(40, 70))
    assert (load(a.path).score(ids) == load(b.path).score(ids)).all()
