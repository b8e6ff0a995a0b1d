"""Standard graph -> moec dialect -> graph of a backend: a file a rule, the passes in pipeline.py."""

from moec.rewrite.context import RewriteContext
from moec.rewrite.pipeline import CPU_PASSES, MOEC_PASSES, PASSES, PassReport, run

__all__ = ["CPU_PASSES", "MOEC_PASSES", "PASSES", "PassReport", "RewriteContext", "run"]
