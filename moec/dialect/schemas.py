"""ONNX schemas of the moec dialect, made from the declarations in operators.py."""

from __future__ import annotations

import onnx
from onnx.defs import OpSchema

from moec.dialect.operators import DOMAIN, OPS, VERSION, Attribute, OpDeclaration, Tensor

__all__ = ["DOMAIN", "OPS", "VERSION", "OpDeclaration", "register", "schema_of"]

_ATTRIBUTE_TYPES = {int: "INT", float: "FLOAT", str: "STRING"}


def _type_name(tensor: Tensor) -> str:
    """A type variable where tensors share a type or may have several, else the type itself."""
    return tensor.group or f"tensor({tensor.types[0]})"


def _formal(tensor: Tensor) -> OpSchema.FormalParameter:
    doc = f"[{', '.join(tensor.shape)}] {tensor.doc}"
    return OpSchema.FormalParameter(tensor.name, _type_name(tensor), doc)


def _attribute(attribute: Attribute) -> OpSchema.Attribute:
    if attribute.default is None:
        kind = getattr(OpSchema.AttrType, _ATTRIBUTE_TYPES[attribute.kind])
        return OpSchema.Attribute(attribute.name, kind, attribute.doc, required=True)
    default = onnx.helper.make_attribute(attribute.name, attribute.default)
    return OpSchema.Attribute(attribute.name, default, attribute.doc)


def _infer(declaration: OpDeclaration, context: onnx.shape_inference.InferenceContext) -> None:
    """Types and shapes of outputs: state as its input; `out` from the shapes of the inputs."""
    for i, output in enumerate(declaration.outputs):
        source = declaration.input_index(output.alias_of) if output.alias_of else 0
        kind = onnx.TypeProto()
        kind.CopyFrom(context.get_input_type(source))
        if output.shape != declaration.inputs[source].shape:
            if len(kind.tensor_type.shape.dim) == 3:  # the CPU graph's form, whose shapes are known already
                continue
            _join_heads(kind, context.get_input_type(declaration.input_index("v")))
        context.set_output_type(i, kind)


def _join_heads(kind: onnx.TypeProto, value: onnx.TypeProto) -> None:
    """q's type `[b,S,Hq,Dk]` becomes `[b,S,Hq*Dv]`."""
    if not kind.tensor_type.HasField("shape"):
        return
    heads, last = kind.tensor_type.shape.dim[2], value.tensor_type.shape.dim
    known = heads.HasField("dim_value") and len(last) == 4 and last[3].HasField("dim_value")
    size = heads.dim_value * last[3].dim_value if known else 0
    del kind.tensor_type.shape.dim[3]
    heads.Clear()
    if known:
        heads.dim_value = size


def schema_of(declaration: OpDeclaration) -> OpSchema:
    """The ONNX schema of a declaration, not yet registered."""
    groups = {t.group: t for t in declaration.inputs + declaration.outputs if t.group}
    schema = OpSchema(
        declaration.name,
        DOMAIN,
        VERSION,
        declaration.doc,
        inputs=[_formal(tensor) for tensor in declaration.inputs],
        outputs=[_formal(tensor) for tensor in declaration.outputs],
        type_constraints=[
            (name, [f"tensor({kind})" for kind in tensor.types], "") for name, tensor in groups.items()
        ],
        attributes=[_attribute(attribute) for attribute in declaration.attributes],
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(declaration, context))
    return schema


def register() -> None:
    """Makes the operators known to onnx's checker and shape inference; may be called any number of times."""
    for declaration in OPS.values():
        if not onnx.defs.has(declaration.name, VERSION, DOMAIN):
            onnx.defs.register_schema(schema_of(declaration))
