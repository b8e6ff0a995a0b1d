"""TensorRT and TensorRT-RTX behind one name: what differs between the two Python modules is decided here.

Used only inside the build child (child.py) and where an engine runs: importing either module loads hundreds
of megabytes.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from moec.compile.soname import alias
from moec.errors import MoecError

_ALIASED_IO = "ALIASED_PLUGIN_IO_10_03"


class Adapter:
    """One TensorRT module.

    Args:
        module: tensorrt_rtx, or tensorrt (11 or later).
    """

    def __init__(self, module: str) -> None:
        self.name = module
        self.trt: ModuleType = importlib.import_module(module)
        self.is_rtx = hasattr(self.trt, "ComputeCapability")
        if self.is_rtx:
            alias("libtensorrt_rtx.so", "libtensorrt_rtx.so.1")
        elif int(self.trt.__version__.split(".")[0]) < 11:
            raise MoecError(
                f"TensorRT {self.trt.__version__} is too old", hint="moec needs TensorRT 11 or later."
            )

    @property
    def version(self) -> str:
        return f"{self.name} {self.trt.__version__}"

    def load_plugins(self, library: str) -> None:
        """Register the plugin library's creators; TensorRT's own reason is in the log."""
        if not self.trt.get_plugin_registry().load_library(library):
            raise MoecError(
                "TensorRT refuses the plugin library",
                where=str(library),
                hint="Its ABI or exports do not match.",
            )

    def parse(self, builder: Any, logger: Any, path: Path) -> tuple[Any, Any]:
        """The network of an ONNX file, and the parser, which must outlive it.

        Raises:
            MoecError: naming the node that the parser refuses.
        """
        network = builder.create_network(0)
        parser = self.trt.OnnxParser(network, logger)
        if not parser.parse_from_file(str(path)):
            raise _parse_error(parser, path)
        return network, parser

    def config(self, builder: Any, archs: Sequence[str], library: str) -> Any:
        """A builder configuration: aliased caches, exact float32, the plugin library inside the plan.

        TensorRT-RTX also promises that the engine can be captured into a CUDA graph, or says why it cannot:
        no step then allocates memory, and contexts take theirs from the caller (see `context`).
        """
        trt, config = self.trt, builder.create_builder_config()
        config.set_preview_feature(getattr(trt.PreviewFeature, _ALIASED_IO), True)
        # Rotary angles are float32 products: TF32 would keep 10 bits of them.
        config.clear_flag(trt.BuilderFlag.TF32)
        config.plugins_to_serialize = [library]
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        if self.is_rtx:
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            config.num_compute_capabilities = len(archs)
            for index, arch in enumerate(archs):
                capability = getattr(trt.ComputeCapability, arch.replace("sm_", "SM"))
                config.set_compute_capability(capability, index)
        return config

    def context(self, engine: Any) -> Any:
        """An execution context whose activations are the caller's memory (`set_device_memory`): contexts that
        never run at the same time can share it, as the memory plan of a bundle supposes.

        TensorRT-RTX would run a shape with fallback kernels until better ones are compiled in the background:
        results would get other bits from some step on, and a CUDA graph would keep the fallbacks. So it
        compiles before the first step.
        """
        trt, managed = self.trt, self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self.is_rtx:
            return engine.create_execution_context(managed)
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(managed)
        strategies = trt.DynamicShapesKernelSpecializationStrategy
        config.dynamic_shapes_kernel_specialization_strategy = strategies.EAGER
        return engine.create_execution_context(config)


def _parse_error(parser: Any, path: Path) -> MoecError:
    if not parser.num_errors:
        return MoecError("TensorRT cannot parse the graph", where=str(path))
    error = parser.get_error(0)
    node = error.node_name() or f"node {error.node()}"
    return MoecError(
        f"TensorRT cannot parse {error.node_operator()} '{node}': {error.desc()}", where=str(path)
    )
