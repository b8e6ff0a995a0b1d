"""Hugging Face checkpoints: checked on opening, read by transformers' parameter names, streamed expert by expert."""

from moec.checkpoint.folder import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
