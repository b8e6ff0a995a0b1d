"""Models that cannot be compiled are refused at once: family, reason, exit code 2."""

from __future__ import annotations

import json

import pytest

from moec.checkpoint import open_checkpoint
from moec.checkpoint.unsupported import refuse_unsupported
from moec.errors import MoecError

CASES = {
    "minimax": ({}, "lightning attention"),
    "deepseek_v32": ({}, "indexer"),
    "glm_moe_dsa": ({}, "indexer"),
    "longcat_flash": ({}, "depends on the data"),
    "jetmoe": ({}, "attention is made of experts"),
    "dbrx": ({}, "one matrix"),
    "zaya": ({}, "convolution states"),
    "gemma4_text": (dict(num_kv_shared_layers=2), "share the keys and values"),
    "qwen3": (dict(num_hidden_layers=2), "not a Mixture-of-Experts model"),
    "llama": (dict(num_hidden_layers=2), "not a Mixture-of-Experts model"),
}


@pytest.mark.parametrize("family", CASES)
def test_one_message_with_family_and_reason(family, tmp_path):
    """No weights are there: what is slow cannot have started."""
    fields, reason = CASES[family]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **fields}))
    with pytest.raises(MoecError, match=reason) as error:
        open_checkpoint(tmp_path, weights=False)
    assert family in str(error.value)


def test_exit_code(tmp_path, capfd):
    from moec.cli.main import main

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "minimax"}))
    with pytest.raises(SystemExit) as stop:
        main(["build", str(model), "-o", str(tmp_path / "bundle")])
    assert stop.value.code == 2
    assert "minimax models are not supported: its lightning attention" in capfd.readouterr().err
    assert not (tmp_path / "bundle").exists()


def test_what_is_supported_passes():
    from tests.helpers.families import OVERRIDES
    from tests.helpers.tiny import tiny_config

    for family, overrides in OVERRIDES.items():
        refuse_unsupported(tiny_config(family, **overrides))
