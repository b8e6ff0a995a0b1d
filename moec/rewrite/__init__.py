"""Standard graph -> moec dialect -> the graph of a backend: one file a rule, `pipeline.py` lists the passes."""

from moec.rewrite.context import RewriteContext
from moec.rewrite.pipeline import CPU_PASSES, MOEC_PASSES, PASSES, PassReport, run

__all__ = ["CPU_PASSES", "MOEC_PASSES", "PASSES", "PassReport", "RewriteContext", "run"]
