"""Calibration: static tensors of the quantized KV cache, fitted on text."""

from moec.calibrate.run import calibrate, neutral

__all__ = ["calibrate", "neutral"]
