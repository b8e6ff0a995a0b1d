"""The bundle's tokenizer against transformers' on the same files."""

import pytest

from moec.errors import MoecError
from moec.runtime.tokenizer import Tokenizer
from tests.helpers.tiny import shakespeare, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_ids_and_text_are_transformers(folder, rng):
    ours, theirs = Tokenizer.from_folder(folder), tiny_tokenizer()
    start = int(rng.integers(0, 50_000))
    text = shakespeare(60_000)[start : start + 500] + " é€😀<|im_end|>x"
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_chat(folder):
    chat = [{"role": "user", "content": "Is this a dagger?"}]
    expected = tiny_tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert Tokenizer.from_folder(folder).encode_chat(chat) == expected


def test_stream_joins_to_the_text(folder):
    tokenizer = Tokenizer.from_folder(folder)
    stream = tokenizer.stream(tokenizer.encode("Enter "))
    pieces = [stream.push(token) for token in tokenizer.encode("Macbeth 😀 and Banquo")]
    assert "".join(pieces) + stream.flush() == "Macbeth 😀 and Banquo"


def test_no_chat_template(tmp_path):
    tiny_tokenizer(chat_template=False).save_pretrained(tmp_path)
    with pytest.raises(MoecError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).encode_chat([])


def test_missing_file(tmp_path):
    with pytest.raises(MoecError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_damaged_file(folder):
    (folder / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(MoecError, match="cannot be read"):
        Tokenizer.from_folder(folder)


def test_halves_of_characters(folder):
    """A str may hold lone surrogates; transformers and the tokenizers library refuse them."""
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("a\udc80b\ud83d") == tokenizer.encode("a\ufffdb\ufffd")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")
