"""Chat templates as models bring them: what they may use, what they may not, and where they are found."""

import json
import re
from pathlib import Path

import pytest
from tiny_vocabulary import TEMPLATE

from headrace.errors import InputError
from headrace.gateway.front.chat import ChatMessage, ChatTemplate, load_chat_template

ASKED = (ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Why?"))


def rendered(source: str, *messages: ChatMessage, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(messages or ASKED)


def test_messages_become_a_prompt_that_ends_where_the_answer_begins() -> None:
    assert rendered(TEMPLATE) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_blocks_leave_neither_their_line_nor_their_indentation() -> None:
    assert rendered("{% for m in messages %}\n    {% if true %}\n{{ m.role }}\n    {% endif %}\n{% endfor %}") == (
        "system\nuser\n"
    )


def test_special_tokens_are_there_by_their_role_and_tools_are_none() -> None:
    source = "{{ bos_token }}{% if tools is none and documents is none %}{{ messages[1].content }}{% endif %}"
    assert rendered(source, bos_token="<s>") == "<s>Why?"


def test_names_of_speakers_are_there_only_where_they_are_given() -> None:
    source = "{% for m in messages %}{{ m.name if 'name' in m else '-' }}{% endfor %}"
    assert rendered(source, ChatMessage(role="user", content="", name="Ann"), *ASKED) == "Ann--"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
            "user",
        ),
        ("{{ {'ü': '<b>'} | tojson }}", '{"ü": "<b>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("a{% generation %}{{ messages[1].content }}{% endgeneration %}z", "aWhy?z"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[0].content.split(' ')[0].strip() }}", "Be"),
    ],
)
def test_what_templates_expect_works(source: str, prompt: str) -> None:
    assert rendered(source) == prompt


def test_a_template_may_print_the_date() -> None:
    assert re.fullmatch(r"\d\d \w{3} 2\d{3}", rendered("{{ strftime_now('%d %b %Y') }}"))


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(InputError, match="messages: must suit the model's chat template: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[7].role }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{% macro again(n) %}{{ again(n) }}{% endmacro %}{{ again(1) }}",
        "{{ messages.append(1) }}",  # the sandbox: nothing given is changed
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # and nothing behind it is reached
        "{{ strftime_now.__globals__.items() }}",
        "{% for n in range(10 ** 9) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_over_the_messages_is_the_requests_error(source: str) -> None:
    with pytest.raises(InputError, match="^messages: must suit"):
        rendered(source)


def test_messages_are_data_not_template_text() -> None:
    assert rendered("{{ messages[0].content }}", ChatMessage(role="user", content="{{ 1 + 1 }}")) == "{{ 1 + 1 }}"


# ---- where it is found -----------------------------------------------------------------------------------------


def test_the_file_goes_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from the configuration"}))
    found = load_chat_template(tmp_path, {})
    assert found is not None and found.render(ASKED) == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    found = load_chat_template(tmp_path, {})
    assert found is not None and found.render(ASKED) == "from the file"


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = load_chat_template(tmp_path, {})
    assert found is not None and found.render(ASKED) == "plain"


def test_a_model_without_a_template_is_no_chat_model(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None


@pytest.mark.parametrize("chat_template", [7, [{"name": "tool_use", "template": "tools"}], "{% if %}"])
def test_a_broken_template_is_refused_at_the_start(tmp_path: Path, chat_template: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
    with pytest.raises(InputError, match="^tokenizer: .*chat.template"):
        load_chat_template(tmp_path, {})


def test_a_template_file_that_is_no_text_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="must be a text file"):
        load_chat_template(tmp_path, {})
