"""EOS ids, generation defaults, and old tokenizers."""

from __future__ import annotations

import json

import pytest

from moec.builder.model_files import (
    copy_model_files,
    generation_config,
    generation_defaults,
    identity,
    tokenizer_facts,
)
from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from tests.helpers.tiny import tiny_checkpoint, tiny_tokenizer


@pytest.fixture
def model(tmp_path):
    return tiny_checkpoint(tmp_path / "tiny")


def test_the_generation_config_wins(model):
    facts = tokenizer_facts(open_checkpoint(model), model)
    assert facts.eos_token_ids == (2, 3)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert tokenizer_facts(open_checkpoint(model), model).eos_token_ids == (7,)
    (model / "generation_config.json").unlink()
    assert tokenizer_facts(open_checkpoint(model), model).eos_token_ids == (2,)


def test_defaults_are_the_set_ones_only(model):
    text = json.dumps({"do_sample": True, "temperature": 0.6, "top_k": None, "transformers_version": "9"})
    (model / "generation_config.json").write_text(text)
    assert generation_defaults(open_checkpoint(model)) == {"do_sample": True, "temperature": 0.6}


def test_a_broken_generation_config(model):
    (model / "generation_config.json").write_text("[1]")
    with pytest.raises(MoecError, match="not a JSON object"):
        generation_config(open_checkpoint(model))


def test_a_chat_template_inside_the_tokenizer_config(model, tmp_path):
    (model / "chat_template.jinja").unlink()
    checkpoint = open_checkpoint(model)
    assert not tokenizer_facts(checkpoint, model).has_chat_template
    tree = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": "{{ x }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(tree))
    assert tokenizer_facts(checkpoint, model).has_chat_template


def test_vocab_and_merges_become_tokenizer_json(model, tmp_path):
    tree = json.loads((model / "tokenizer.json").read_text())["model"]
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps(tree["vocab"]))
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in tree["merges"]))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "out").mkdir()
    facts = copy_model_files(open_checkpoint(model), tmp_path / "out")
    assert facts.has_tokenizer
    from tokenizers import Tokenizer

    text = "Thunder and lightning."
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert made.encode(text).ids == tiny_tokenizer()(text)["input_ids"]


def test_the_identity_follows_the_config(model):
    first = identity(open_checkpoint(model))
    assert (first.name, first.model_type) == ("tiny", "qwen2_moe")
    tree = json.loads((model / "config.json").read_text()) | {"rope_theta": 7}
    (model / "config.json").write_text(json.dumps(tree))
    assert identity(open_checkpoint(model)).config_hash != first.config_hash
