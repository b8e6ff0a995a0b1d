"""ctypes view of plugins/kernels/launchers.h, run by the SIMT emulator on NumPy arrays."""

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.helpers.simt import SimtError, compile_simt, pointer

BINDING = Path(__file__).resolve().parents[1] / "plugins" / "kernels" / "binding.cpp"
DTYPES = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
ENUMS = {
    "dtype": ("fp16", "bf16"),
    "format": ("mkv2", "mkv2_lean", "k4v2", "fp16", "int8"),
    "scoring": ("softmax", "sigmoid", "softmax_after_topk"),
    "group_score": ("max", "top2"),
    "activation": ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"),
    "weight_format": ("bf16", "int4"),
}
ERROR_NAN, ERROR_CAPACITY, ERROR_EXPERT_ID = 1, 2, 4
I32, I64, F32, PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class AttentionParams(ctypes.Structure):
    _fields_ = [
        *_fields(I32, "rows tokens slots num_heads num_kv_heads k_dim v_dim ring_rows num_blocks"),
        *_fields(I64, "block_bytes"),
        *_fields(I32, "dtype format"),
        *_fields(F32, "scale softcap"),
        *_fields(
            I32, "window has_sink_logits block_tokens promoted sink_tokens recent_tokens rollback_tokens"
        ),
        *_fields(
            PTR, "q k v slot_ids lengths num_tokens k_mean k_ref k_order v_ref sink_logits blocks ring out"
        ),
        *_fields(PTR, "error_flag"),
    ]


class MoeParams(ctypes.Structure):
    _fields_ = [
        *_fields(I32, "tokens_total rows hidden_size"),
        *_fields(I64, "blob_bytes"),
        *_fields(I32, "dtype num_experts top_k scoring renormalize num_groups topk_groups group_score"),
        *_fields(F32, "routed_scale"),
        *_fields(I32, "activation gated"),
        *_fields(F32, "alpha limit"),
        *_fields(I32, "weight_format group_size intermediate_size has_bias num_slots"),
        *_fields(PTR, "hidden num_tokens router_weight router_bias selection_bias ids weights experts out"),
        *_fields(PTR, "error_flag"),
    ]


class LinearParams(ctypes.Structure):
    _fields_ = [
        *_fields(I64, "rows"),
        *_fields(I32, "columns outputs"),
        *_fields(I64, "code_bytes"),
        *_fields(I32, "bits group_size dtype"),
        *_fields(PTR, "x codes scales out"),
    ]


class AddRmsNormParams(ctypes.Structure):
    _fields_ = [
        *_fields(I64, "rows"),
        *_fields(I32, "columns"),
        *_fields(F32, "epsilon scale_offset"),
        *_fields(I32, "dtype"),
        *_fields(PTR, "x residual scale out sum"),
    ]


PARAMS = (AttentionParams, MoeParams, LinearParams, AddRmsNormParams)
"""In the order of `params_bytes`."""


def library(bug: int = 0, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The kernels, with planted bug number `bug` (0: none) and more compiler flags."""
    if bug:  # run once: not worth optimizing
        flags = (*flags, f"-DMOEC_PLANT_BUG={bug}", "-O1")
    lib = compile_simt(BINDING, flags)
    for check in (lib.check_attention, lib.check_moe, lib.check_linear, lib.check_norm):
        check.restype = ctypes.c_char_p
    lib.attention_workspace.restype = lib.params_bytes.restype = ctypes.c_size_t
    lib.run_activation.restype = F32
    lib.run_activation.argtypes = [PTR, F32, F32]
    for i, params in enumerate(PARAMS):
        assert lib.params_bytes(i) == ctypes.sizeof(params)
    return lib


def _fill(params: ctypes.Structure, values: dict) -> None:
    for name, value in values.items():
        if name in ENUMS:
            value = ENUMS[name].index(value)
        setattr(params, name, pointer(value) if isinstance(value, np.ndarray) else value)


def _call(function, params: ctypes.Structure, *arguments: int) -> None:
    message = ctypes.create_string_buffer(600)
    rc = function(
        ctypes.byref(params), *map(I32, arguments[:-1]), ctypes.c_uint64(arguments[-1]), message, I32(600)
    )
    if rc:
        raise SimtError(message.value.decode() or f"launcher returned {rc - 100}")


def attention_params(tensors: dict, attrs: dict, dtype: str, out: np.ndarray | None) -> AttentionParams:
    """Params of one call; `tensors` has the op's inputs, blocks and ring are updated in place."""
    q, v, ring, blocks = (tensors[name] for name in ("q", "v", "ring", "blocks"))
    shapes = {
        "rows": q.shape[0],
        "tokens": q.shape[1],
        "slots": ring.shape[0],
        "num_heads": q.shape[2],
        "num_kv_heads": ring.shape[1],
        "k_dim": q.shape[3],
        "v_dim": v.shape[3],
        "ring_rows": ring.shape[2],
        "num_blocks": blocks.shape[2],
        "block_bytes": blocks.shape[3],
    }
    params = AttentionParams(block_tokens=64)
    _fill(params, {**shapes, **attrs, **tensors, "dtype": dtype})
    params.out = pointer(out)
    return params


def run_attention(
    lib, tensors: dict, attrs: dict, dtype: str = "fp16", schedule: int = 0, seed: int = 1
) -> np.ndarray:
    """Runs asym_kv_attention; q, k, v must have the dtype. Returns out `[b,S,Hq*Dv]` of that dtype."""
    q, v = tensors["q"], tensors["v"]
    out = np.full((*q.shape[:2], q.shape[2] * v.shape[3]), np.nan, DTYPES[dtype])
    params = attention_params(tensors, attrs, dtype, out)
    _call(lib.run_attention, params, schedule, seed)
    return out


def run_moe(
    lib, tensors: dict, attrs: dict, dtype: str = "fp16", schedule: int = 0, seed: int = 1
) -> np.ndarray:
    """Runs pipelined_moe, or experts where `tensors` has ids. Returns out `[T,H]`."""
    out = np.full(tensors["hidden"].shape, np.nan, DTYPES[dtype])
    params = moe_params(tensors, attrs, dtype, out)
    _call(lib.run_moe, params, int("ids" not in tensors), schedule, seed)
    return out


def moe_params(tensors: dict, attrs: dict, dtype: str, out: np.ndarray | None) -> MoeParams:
    """Params of one MoE call."""
    hidden = tensors["hidden"]
    shapes = {
        "tokens_total": hidden.shape[0],
        "rows": len(tensors["num_tokens"]),
        "hidden_size": hidden.shape[1],
        "blob_bytes": tensors["experts"].shape[1],
    }
    params = MoeParams(group_size=64, routed_scale=1.0, gated=1)
    _fill(params, {**shapes, **attrs, **tensors, "dtype": dtype})
    params.out = pointer(out)
    return params


def linear_params(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, bits: int, dtype: str
) -> LinearParams:
    """Params of a QuantizedLinear call without its output."""
    params = LinearParams(rows=len(x), columns=x.shape[1], outputs=len(codes), group_size=64, bits=bits)
    _fill(params, {"code_bytes": codes.shape[1], "dtype": dtype, "x": x, "codes": codes, "scales": scales})
    return params


def run_linear(lib, x, codes, scales, bits: int, dtype: str, schedule: int = 0) -> np.ndarray:
    """x `[M,K]` of `dtype` times the transposed matrix: `[M,N]` of `dtype`."""
    out = np.full((len(x), len(codes)), np.nan, x.dtype)
    params = linear_params(x, codes, scales, bits, dtype)
    params.out = pointer(out)
    _call(lib.run_linear, params, schedule, 1)
    return out


def norm_params(
    x: np.ndarray, residual: np.ndarray, scale: np.ndarray, epsilon: float, offset: float, dtype: str
) -> AddRmsNormParams:
    """Params of an AddRMSNorm call without its outputs."""
    params = AddRmsNormParams(rows=len(x), columns=x.shape[1], epsilon=epsilon, scale_offset=offset)
    _fill(params, {"dtype": dtype, "x": x, "residual": residual, "scale": scale})
    return params


def run_norm(
    lib, x, residual, scale, epsilon: float, dtype: str, offset: float = 0.0, schedule: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(norm, sum) of x and residual `[M,K]` of `dtype`."""
    out, total = np.full((2, *x.shape), np.nan, x.dtype)
    params = norm_params(x, residual, scale, epsilon, offset, dtype)
    params.out, params.sum = pointer(out), pointer(total)
    _call(lib.run_norm, params, schedule, 1)
    return out, total
