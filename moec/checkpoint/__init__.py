"""Hugging Face checkpoints: checked on opening, read by transformers' names, streamed by expert."""

from moec.checkpoint.folder import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
