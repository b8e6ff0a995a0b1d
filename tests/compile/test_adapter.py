"""What the adapter asks of the real TensorRT modules, without a GPU."""

import json
import subprocess
import sys

import numpy as np

from tests.helpers.gpu_engine import padded_request
from tests.helpers.trt_engine import need_tensorrt

CONFIG = """
import json, sys
from moec.compile.adapter import Adapter
adapter = Adapter("tensorrt_rtx")
trt = adapter.trt
config = adapter.config(trt.Builder(trt.Logger(trt.Logger.ERROR)), ["sm_80", "sm_120"], sys.argv[1])
flags = trt.BuilderFlag
print(json.dumps({
    "capture": config.get_flag(flags.REQUIRE_USER_ALLOCATION), "tf32": config.get_flag(flags.TF32),
    "alias": config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03),
    "targets": config.num_compute_capabilities,
}))
"""
CONTEXT = """
import json
from moec.compile.adapter import Adapter
adapter = Adapter("tensorrt_rtx")
trt, asked = adapter.trt, {}

class Config:  # has what trt.IRuntimeConfig has, and nothing else
    def __getattr__(self, name):
        assert hasattr(trt.IRuntimeConfig, name), name
        return lambda value: asked.update({name: value.name})
    def __setattr__(self, name, value):
        assert hasattr(trt.IRuntimeConfig, name), name
        asked[name] = value.name

class Engine:
    def create_runtime_config(self):
        return Config()
    def create_execution_context(self, config):
        return type(config).__name__

asked["context"] = adapter.context(Engine())
names = {
    trt.IExecutionContext: ["set_device_memory", "is_stream_capturable", "execute_async_v3"],
    trt.ICudaEngine: ["device_memory_size_v2", "create_runtime_config", "get_aliased_input_tensor"],
}
asked["missing"] = [name for cls, listed in names.items() for name in listed if not hasattr(cls, name)]
print(json.dumps(asked))
"""


def run(code: str, *arguments: str) -> dict:
    """In a process of its own: TensorRT is large, and stays loaded."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_engines_alias_caches_and_can_be_captured():
    library = str(need_tensorrt())
    assert run(CONFIG, library) == {"capture": True, "tf32": False, "alias": True, "targets": 2}


def test_contexts_share_memory_and_compile_before_the_first_step():
    need_tensorrt()
    assert run(CONTEXT) == {
        "set_execution_context_allocation_strategy": "USER_MANAGED",
        "dynamic_shapes_kernel_specialization_strategy": "EAGER",
        "context": "Config",
        "missing": [],
    }


def test_a_warm_up_is_a_step_of_idle_rows():
    request = padded_request((3, 2), np.zeros((0, 0)), (), (), 4)
    assert request["input_ids"].shape == (3, 2)
    assert request["slot_ids"].tolist() == [0, 1, 2]
    assert not request["num_tokens"].any()
