"""Runs bundles: `load(bundle)` gives a `Session`. Imports neither torch nor transformers."""

from __future__ import annotations

from moec.runtime.loading import load
from moec.runtime.sampling import Choice, SamplingParams
from moec.runtime.session import Generation, Session
from moec.runtime.statistics import Statistics

__all__ = ["Choice", "Generation", "SamplingParams", "Session", "Statistics", "load"]
