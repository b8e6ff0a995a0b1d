"""Saved weights equal the checkpoint's, and saving leaves the captured graph alone."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from moec.frontend import save_exported
from tests.helpers.captured import captured, checkpoint


def test_every_parameter_is_in_the_data_file(tmp_path):
    ckpt = checkpoint("gpt_oss")
    save_exported(captured("gpt_oss"), ckpt, tmp_path / "exported.onnx")
    model = onnx.load(tmp_path / "exported.onnx")
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    names = [n for n in ckpt.param_names() if ckpt.canonical(n) == n]
    for name in names:
        assert stored[name].dtype == np.float32
        np.testing.assert_array_equal(stored[name], ckpt.param(name).astype(np.float32), err_msg=name)
    assert all(captured("gpt_oss").model.graph.initializers[n].const_value is None for n in names)
