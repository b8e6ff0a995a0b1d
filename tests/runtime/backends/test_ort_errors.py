"""Messages of ONNX Runtime turned into messages for people."""

from moec.runtime.backends.ort_errors import load_error, run_error

CHECKSUM = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running PipelinedMoE node. "
    "Name:'moe.3' Status Message: experts.moex: layer 3 expert 5: checksum mismatch"
)
NAN = (
    "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running AsymKVAttention node. "
    "Name:'attn.0' Status Message: AsymKVAttention layer 0: NaN in k, slot 2, position 17"
)
OTHER = (
    "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Non-zero status code returned while running Gather node. "
    "Name:'embed' Status Message: gather.cc:161 indices element out of data bounds,\n idx=57 must be within"
)


def test_checksum():
    error = run_error(RuntimeError(CHECKSUM), "bundle")
    assert error.what == "experts.moex: layer 3 expert 5: checksum mismatch"
    assert error.where == "bundle"
    assert "rebuild" in error.hint


def test_nan():
    error = run_error(RuntimeError(NAN), "bundle")
    assert error.what == "AsymKVAttention layer 0: NaN in k, slot 2, position 17"
    assert "--kv fp32" in error.hint


def test_other_errors_name_the_node():
    error = run_error(RuntimeError(OTHER), "bundle")
    assert error.what.startswith("gather.cc:161 indices")
    assert "\n" not in error.what
    assert error.where == "bundle, Gather node embed"
    assert error.hint is None


def test_load_error_drops_the_prefix():
    error = load_error(
        RuntimeError("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf parsing failed."), "m.onnx"
    )
    assert error.what == "ONNX Runtime cannot load the graph: Protobuf parsing failed."
    assert "build it again" in error.hint
