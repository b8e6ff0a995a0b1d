"""A residual sum and the RMS norm after it as one moec::AddRMSNorm: fewer kernels in the plan.

TensorRT-RTX 1.7.1 makes one kernel of each such pair, and stores 140 KB of source for it, in both profiles,
once for each stretch between two attention layers, although the sources of all layers are equal. Two pairs a
layer are half of the plan of Qwen3-30B-A3B (61.7 MB; 35.4 MB without them), and of the time to build it. A
step launches as many kernels as before.
"""

from __future__ import annotations

import onnx_ir as ir

from moec.rewrite.context import scalar

_VIEWS = ("Reshape", "Cast")
_POINTWISE = ("Add", "Mul")


def fuse_residual_norms(graph: ir.Graph) -> int:
    """Fuses what `_sum` finds; leaves the graph unsorted.

    Returns:
        How many norms took their sum over.
    """
    count = 0
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        add = _sum(norm)
        if add is not None:
            _fuse(graph, norm, add)
            count += 1
    return count


def _sum(norm: ir.Node) -> ir.Node | None:
    """The residual sum that a norm over the last axis reads, if fusing them saves a kernel."""
    x = norm.inputs[0]
    add = x.producer()
    if add is None or add.op_type != "Add" or x.is_graph_output() or not _whole_rows(norm):
        return None
    shapes = [value.shape for value in (x, *add.inputs)]
    alike = shapes[0] is not None and shapes[0] == shapes[1] == shapes[2]
    return add if alike and not any(map(_joins_the_sum, add.inputs)) else None


def _whole_rows(norm: ir.Node) -> bool:
    shape, scale = norm.inputs[0].shape, _scale(norm)[0].shape
    if shape is None or scale is None or not isinstance(shape[-1], int) or list(scale) != [shape[-1]]:
        return False
    axis = norm.attributes.get("axis")
    return axis is None or axis.as_int() in (-1, len(shape) - 1)


def _joins_the_sum(value: ir.Value) -> bool:
    """TensorRT would compute it within the kernel of the sum (a scaled or shared expert's output, say), and
    needs a kernel of its own for it if the sum is a plugin's."""
    node = value.producer()
    while node is not None and node.op_type in _VIEWS and len(value.uses()) == 1:
        value = node.inputs[0]
        node = value.producer()
    return node is not None and node.op_type in _POINTWISE and len(value.uses()) == 1


def _scale(norm: ir.Node) -> tuple[ir.Value, float]:
    """A norm's weight and what is added to it (1 in models that keep their weights less one)."""
    scale = norm.inputs[1]
    add = scale.producer()
    if add is not None and add.op_type == "Add":
        for weight, offset in (add.inputs, reversed(add.inputs)):
            if scalar(offset) is not None and weight.producer() is None:
                return weight, float(scalar(offset))
    return scale, 0.0


def _fuse(graph: ir.Graph, norm: ir.Node, add: ir.Node) -> None:
    scale, offset = _scale(norm)
    epsilon = norm.attributes.get("epsilon")
    attributes = {
        "epsilon": 1e-5 if epsilon is None else epsilon.as_float(),
        "scale_offset": offset,
        "version": 1,
    }
    node = ir.node(
        "AddRMSNorm",
        [*add.inputs, scale],
        attributes=attributes,
        domain="moec",
        num_outputs=2,
        name=norm.name,
    )
    for old, new in zip((norm.outputs[0], add.outputs[0]), node.outputs, strict=True):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.append(node)
    made = norm.inputs[1].producer()
    for old in (norm, add):
        graph.remove(old, safe=True)
    if made is not None and not made.outputs[0].uses():
        graph.remove(made, safe=True)
