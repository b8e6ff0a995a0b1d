"""Mean squares of the inputs of weights, against hooks on the whole transformers model."""

from __future__ import annotations

import numpy as np
import torch

from moec.calibrate import calibrate
from moec.calibrate.importance import MIN_TOKENS, InputPower
from moec.calibrate.run import read_windows
from moec.checkpoint import open_checkpoint
from moec.frontend.capture import capture
from moec.reference.kv_layout import KVLayout
from tests.helpers.tiny import tiny_checkpoint


def _inputs_of_linears(model, ids):
    """Mean square by parameter of every Linear of the model, by PyTorch."""
    sums = {}

    def hook(name):
        def add(_, inputs):
            sums.setdefault(name, []).append(inputs[0].reshape(-1, inputs[0].shape[-1]))

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(hook(f"{name}.weight"))
    with torch.no_grad():
        for row in torch.from_numpy(ids):
            getattr(model, model.base_model_prefix)(row[None])
    return {name: torch.cat(parts).square().mean(0).numpy() for name, parts in sums.items()}


def test_dense_and_expert_inputs(tmp_path):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path))
    geometry = capture(checkpoint, batch=2, context=128).geometry
    layouts = {a.layer: KVLayout("fp32", a.num_kv_heads, a.k_dim, a.v_dim, 128) for a in geometry.attention}
    inputs = InputPower()
    calibrate(checkpoint, geometry, layouts, inputs=inputs)
    got = inputs.importance()
    ids = read_windows(checkpoint, geometry, None).calibration
    want = _inputs_of_linears(checkpoint.load_torch(), ids)
    assert want
    for name, mean in want.items():
        assert np.allclose(got[name], mean, rtol=1e-3, atol=1e-5 * mean.mean()), name
    for layer in geometry.moe:
        assert got[layer.gate_up].shape == (layer.num_experts, layer.hidden_size)
        assert got[layer.down].shape == (layer.num_experts, layer.intermediate_size)
        assert (got[layer.down] > 0).all()


def test_rare_experts_take_the_mean_of_all():
    power, rng = InputPower(), np.random.default_rng(0)
    often, rare = (torch.from_numpy(rng.normal(size=(n, 8))) for n in (4 * MIN_TOKENS, MIN_TOKENS - 1))
    power.add("w", often, 1, 3)
    power.add("w", rare, 2, 3)
    both = torch.cat([often, rare]).square().mean(0).numpy()
    got = power.importance()["w"]
    assert np.allclose(got[1], often.square().mean(0), rtol=1e-6)
    assert np.allclose(got[[0, 2]], both, rtol=1e-6)
