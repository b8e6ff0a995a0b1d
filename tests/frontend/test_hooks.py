"""What the attention hook refuses: arguments that would change the result and that no operator takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moec.errors import MoecError
from moec.frontend.hooks import KVLayer, Trace, attention, tracing


def _call(**arguments):
    empty = torch.empty(0)
    x = torch.zeros(1, 2, 3, 8)
    with tracing(Trace([KVLayer(empty, empty)])) as trace:
        attention(SimpleNamespace(layer_idx=0), x, x, x, **arguments)
    return trace.attention[0]


@pytest.mark.parametrize("name", ["attention_mask", "position_bias", "head_mask"])
def test_tensors_without_a_place_are_refused(name):
    with pytest.raises(MoecError, match=f"attention of layer 0 takes {name}"):
        _call(**{name: torch.zeros(1)})


def test_what_has_no_effect_may_come():
    call = _call(
        attention_mask=None, dropout=0.0, position_ids=torch.zeros(1, 3), scaling=0.5, is_causal=True
    )
    assert (call.scale, call.window, call.sinks) == (0.5, 0, False)
