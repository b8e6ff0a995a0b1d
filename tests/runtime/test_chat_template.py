"""Chat templates rendered as transformers renders them."""

import json
from datetime import datetime

import pytest

from moec.errors import MoecError
from moec.runtime.chat_template import ChatTemplate, load_chat_template, special_tokens
from tests.helpers.tiny import tiny_tokenizer

CHATS = [
    [{"role": "user", "content": 'Hi <b>&amp; "you" \'é€😀'}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  one\n\ntwo  "},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ],
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You are helpful.<|im_end|>
    {% endif %}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "llama": """{{ bos_token }}{%- for m in messages -%}
{%- if m.role == 'system' %}{% continue %}{% endif -%}
[{{ m['role'] | upper }}] {{ m['content'] | trim }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- endfor %}{% if tools is not none %}TOOLS {{ tools | tojson(indent=2) }}{% endif %}""",
    "generation": """{%- for m in messages %}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
{%- else %}<{{ m.role }}>{{ m | tojson }}{% endif %}
{%- if loop.index > 2 %}{% break %}{% endif %}{% endfor %}""",
    "namespace": """{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + m.content|length %}
{% endfor %}{{ ns.n }} {{ messages[0].content.split(' ')[-1] }} {{ strftime_now('%Y') }}{{ missing }}""",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendered_as_transformers(name, chat, add_generation_prompt):
    tokenizer = tiny_tokenizer()
    options = {"add_generation_prompt": add_generation_prompt}
    expected = tokenizer.apply_chat_template(chat, chat_template=TEMPLATES[name], tokenize=False, **options)
    ours = ChatTemplate(TEMPLATES[name], tokenizer.special_tokens_map)
    assert ours.render(chat, **options) == expected


def test_tools_and_other_variables():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": "<"}}}]
    expected = tiny_tokenizer().apply_chat_template(
        CHATS[0], chat_template=TEMPLATES["llama"], tools=tools, tokenize=False, add_generation_prompt=True
    )
    template = ChatTemplate(TEMPLATES["llama"], tiny_tokenizer().special_tokens_map)
    assert template.render(CHATS[0], tools=tools) == expected


def test_year():
    assert str(datetime.now().year) in ChatTemplate(TEMPLATES["namespace"]).render(CHATS[0])


def test_template_that_refuses():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(MoecError, match="refuses this conversation: roles must alternate"):
        template.render(CHATS[0])


def test_invalid_template():
    with pytest.raises(MoecError, match="template is not valid"):
        ChatTemplate("{% for %}")


def test_templates_cannot_reach_python():
    with pytest.raises(MoecError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(CHATS[0])


def folder_with(tmp_path, config, jinja=None):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    return tmp_path


def test_found_in_the_config(tmp_path):
    config = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>", "lstrip": False}}
    assert load_chat_template(folder_with(tmp_path, config)).render([]) == "<s>"


def test_file_wins_over_config(tmp_path):
    assert load_chat_template(folder_with(tmp_path, {"chat_template": "config"}, "file")).render([]) == "file"


def test_file_of_processors(tmp_path):
    (tmp_path / "chat_template.json").write_text('{"chat_template": "p"}')
    assert load_chat_template(tmp_path).render([]) == "p"


def test_named_templates(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_chat_template(folder_with(tmp_path, {"chat_template": named})).render([]) == "d"


def test_no_template(tmp_path):
    assert load_chat_template(folder_with(tmp_path, {})) is None


def test_special_tokens_of_both_files(tmp_path):
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<a>", "eos_token": "<old>"}')
    folder = folder_with(tmp_path, {"eos_token": {"content": "<new>"}, "pad_token": None})
    assert special_tokens(folder) == {"bos_token": "<a>", "eos_token": "<new>"}


def test_damaged_config(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(MoecError, match="Not valid JSON"):
        load_chat_template(tmp_path)
