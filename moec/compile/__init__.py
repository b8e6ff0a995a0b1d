"""Lowering to TensorRT, the build child, and what an engine needs at run time."""
