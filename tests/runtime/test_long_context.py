"""A prompt of 8192 tokens on the sample model: what it takes of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moec.builder import build
from tests.helpers.sample import sample_checkpoint, sample_tokenizer
from tests.helpers.text import held_out_tokens

CONTEXT, NEW_TOKENS = 8192, 8

RUN = """
import json, re, sys
import moec
session = moec.load(sys.argv[1], "cpu", threads=1)
tokens = json.load(sys.stdin)
generation = session.generate(tokens, max_tokens=int(sys.argv[2]), ignore_eos=True)
generation.read()
# Not ru_maxrss: a child starts with its parent's.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"tokens": len(generation.tokens), "reason": generation.stop_reason, "rss": peak}))
"""


@pytest.mark.slow
def test_8192_tokens_of_prompt_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    build(sample_checkpoint(), tmp_path / "bundle", context=CONTEXT, batch=1, target="cpu")
    prompt = held_out_tokens(sample_tokenizer(), CONTEXT - NEW_TOKENS)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "bundle"), str(NEW_TOKENS)],
        input=json.dumps(prompt), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] == NEW_TOKENS
    assert result["rss"] < 1e9, f"{result['rss'] / 1e6:.0f} MB"
