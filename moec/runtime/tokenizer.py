"""The tokenizer of a bundle: `tokenizer.json` run by the tokenizers library, plus its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from moec.errors import MoecError
from moec.runtime.chat_template import ChatTemplate, Message, load_chat_template, special_tokens
from moec.runtime.text import StreamDecoder


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        chat_template: None if the model has none.
        bos_id, eos_id: Token ids, None if the model has none.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        chat_template: ChatTemplate | None = None,
        special: dict[str, str] | None = None,
    ) -> None:
        self._fast = fast
        self.chat_template = chat_template
        special = special or {}
        self.bos_id = fast.token_to_id(special["bos_token"]) if "bos_token" in special else None
        self.eos_id = fast.token_to_id(special["eos_token"]) if "eos_token" in special else None

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of `folder`.

        Raises:
            MoecError: There is no tokenizer.json, or it is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise MoecError("The bundle has no tokenizer.json", where=str(folder))
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise MoecError(f"The tokenizer cannot be read: {error}", where=str(path)) from error
        fast.no_padding()
        fast.no_truncation()
        return cls(fast, load_chat_template(folder), special_tokens(folder))

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(_scalars(text), add_special_tokens=add_special_tokens).ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant answers.

        Raises:
            MoecError: There is no chat template, or it refuses the conversation.
        """
        if self.chat_template is None:
            raise MoecError(
                "This model has no chat template", hint="Give a plain text prompt instead (--raw)"
            )
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def stream(self, context: Sequence[int] = ()) -> StreamDecoder:
        """A decoder for tokens that follow `context`."""
        return StreamDecoder(self.decode, context)


def _scalars(text: str) -> str:
    """The text without lone surrogates (halves of characters), which the library refuses; U+FFFD for each."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
