"""The decode benchmark on a bundle it builds itself, as on a fresh clone."""

import sys

import pytest

from benchmarks import decode_cpu
from tests.helpers.sample import sample_checkpoint

LONGER_THAN_THE_DEFAULT_BUNDLE_HOLDS = 4000


@pytest.mark.slow
def test_the_bundle_it_builds_holds_the_longest_context(tmp_path, monkeypatch):
    saved = {}
    monkeypatch.setattr(decode_cpu, "REPO", tmp_path)
    monkeypatch.setattr(decode_cpu, "save", lambda name, content: saved.update({name: content}))
    monkeypatch.setattr(decode_cpu, "PREFILLS", 1)
    contexts = ["--contexts", str(LONGER_THAN_THE_DEFAULT_BUNDLE_HOLDS)]
    monkeypatch.setattr(sys, "argv", ["decode_cpu", "--checkpoint", str(sample_checkpoint()), *contexts])
    decode_cpu.main()
    (row,) = saved["decode_cpu"]["rows"]
    assert row["faster by"] == ""
    assert row["moec, 1 thread"] > 0
    assert saved["decode_cpu"]["prefill"]["moec"] > 0
