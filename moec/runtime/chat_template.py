"""Renders a tokenizer's chat template (Jinja) as transformers does, without importing transformers.

Templates come with downloaded models, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moec.errors import MoecError

Message = Mapping[str, Any]
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template with the tokenizer's special tokens.

    Raises:
        MoecError: The template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise MoecError(
                f"The chat template is not valid: {error}", hint="--raw runs without it"
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation, ready for the assistant's answer.

        Args:
            messages: Dictionaries with `role` and `content`.
            add_generation_prompt: End with the header of the assistant's turn.
            variables: Further variables of the template, e.g. `tools`.

        Raises:
            MoecError: The template refuses the conversation (e.g. roles that do not alternate).
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **values
            )
        except jinja2.TemplateError as error:
            raise MoecError(f"The chat template refuses this conversation: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a tokenizer folder (`chat_template.jinja|json`, `tokenizer_config.json`) or None."""
    file = folder / "chat_template.jinja"
    config = read_json(folder / "chat_template.json") or read_json(folder / "tokenizer_config.json")
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return ChatTemplate(source, special_tokens(folder)) if source else None


def special_tokens(folder: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token`, ... of a tokenizer folder."""
    named = {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}
    texts = {name: _token_text(named.get(name)) for name in _SPECIAL_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, `{}` if there is no such file.

    Raises:
        MoecError: The file is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MoecError(f"Not valid JSON: {error}", where=str(path)) from error
