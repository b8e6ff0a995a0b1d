from __future__ import annotations

import inspect

import pytest

from moec.dialect.operators import OPS
from moec.errors import MoecError
from moec.reference.attention import asym_kv_attention
from moec.reference.moe import experts, pipelined_moe

REFERENCES = {"AsymKVAttention": asym_kv_attention, "PipelinedMoE": pipelined_moe, "Experts": experts}


@pytest.mark.parametrize("name", OPS)
def test_references_take_what_is_declared(name):
    parameters = inspect.signature(REFERENCES[name]).parameters.values()
    kinds = inspect.Parameter
    inputs = [p.name for p in parameters if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    assert inputs == [tensor.name for tensor in OPS[name].inputs]
    keywords = {p.name: p.default for p in parameters if p.kind is kinds.KEYWORD_ONLY}
    if any(p.kind is kinds.VAR_KEYWORD for p in parameters):
        others = inspect.signature(experts).parameters.values()
        keywords |= {p.name: p.default for p in others if p.kind is kinds.KEYWORD_ONLY}
    declared = {a.name: kinds.empty if a.default is None else a.default for a in OPS[name].attributes}
    assert set(keywords) == set(declared)
    for attribute, default in keywords.items():
        # A default of the reference is a convenience: it agrees where the operator has one too.
        assert kinds.empty in (default, declared[attribute]) or default == declared[attribute]


@pytest.mark.parametrize("name", OPS)
def test_outputs_alias_inputs_of_the_same_type_and_shape(name):
    op = OPS[name]
    assert op.outputs[0].alias_of is None
    for output in op.outputs[1:]:
        source = op.inputs[op.input_index(output.alias_of)]
        assert (output.types, output.shape, output.group) == (source.types, source.shape, source.group)


def test_attributes_are_completed_in_declared_order():
    op = OPS["AsymKVAttention"]
    values = op.complete({"format": b"mkv2", "scale": 0.125, "promoted": 16})
    assert list(values) == [a.name for a in op.attributes]
    assert values["format"] == "mkv2"
    assert values["recent_tokens"] == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 1.0}, "needs the attribute format"),
        ({"scale": 1.0, "format": "int3"}, "format is 'int3'"),
        ({"scale": 1.0, "format": "mkv2", "colour": 1}, "no attribute colour"),
        ({"scale": "x", "format": "mkv2"}, "wrong type"),
    ],
)
def test_wrong_attributes_are_refused(given, message):
    with pytest.raises(MoecError, match=message):
        OPS["AsymKVAttention"].complete(given, "layer 3")
