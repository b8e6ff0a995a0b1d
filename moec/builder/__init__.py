"""`moec.build`: from a Hugging Face checkpoint to a bundle."""

from moec.builder.build import build
from moec.builder.report import BuildReport

__all__ = ["BuildReport", "build"]
