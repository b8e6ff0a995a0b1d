"""Hugging Face model -> `exported.onnx`: standard ONNX, symbolic rows and tokens, transformers' names."""

from moec.frontend.capture import Captured, capture
from moec.frontend.save import save_exported

__all__ = ["Captured", "capture", "save_exported"]
