"""Templates see what Hugging Face shows them, and every failure is the caller's 400."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import InvalidRequest
from services.text.assets import TextError
from services.text.template import Message, plain_messages
from tests.text.tiny import tiny_assets, tiny_template

HI: list[Message] = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list[Message] = HI) -> str:
    return tiny_template(template).render(plain_messages(messages))


def test_the_assistant_is_asked_to_go_on() -> None:
    assert tiny_template().render(plain_messages(HI)) == "<|user|>hi<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if true %}\n  a\n{% endif %}\n  b", "  a\n  b"),  # trim_blocks and lstrip_blocks
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ {'a': '<é>'} | tojson(indent=1) }}", '{\n "a": "<é>"\n}'),
        ("{{ eos_token }}{{ bos_token }}", "<|end|>"),
        ("{{ tools is none }}", "True"),
        ("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ strftime_now('%Y') }}", "2023"),  # the clock that was passed in
    ],
)
def test_what_templates_use(template: str, text: str) -> None:
    assert render(template) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[5].content + 'x' }}",
        "{{ 1 + messages[0].content }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ range(10 ** 9) | length }}",
    ],
)
def test_a_template_that_refuses_is_an_invalid_request(template: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("variables", "text"), [({}, "on"), ({"enable_thinking": True}, "on"), ({"enable_thinking": False}, "off")]
)
def test_a_request_sets_variables_that_the_template_knows(variables: dict[str, Any], text: str) -> None:
    template = tiny_template("{{ 'off' if enable_thinking is defined and enable_thinking is false else 'on' }}")
    assert template.render(HI, variables=variables) == text
    assert template.render(HI, variables={**variables, "unknown": [1, "x"]}) == text


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "eos_token",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
    ],
)
def test_what_the_template_is_given_stays(name: str) -> None:
    with pytest.raises(InvalidRequest, match="would replace") as caught:
        tiny_template().render(HI, variables={name: False})
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("name", ["self", "loop", "caller", "kwargs", "context", "environment"])
def test_names_that_mean_something_to_jinja_do_no_harm(name: str) -> None:
    expected = tiny_template().render(HI)
    assert tiny_template().render(HI, variables={name: "x"}) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}",
        "{% for i in range(n // 20) %}{{ 'x' * n }}{% endfor %}",
        "{{ 1 + flag }}",
        "{{ raise_exception('no: ' + flag) }}",
        "{{ flag.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_variables_make_no_template_go_on_for_long(template: str) -> None:
    """Nor fail other than by a refusal."""
    with pytest.raises(InvalidRequest) as caught:
        tiny_template(template).render(HI, variables={"n": 100_000, "flag": "x"})
    assert caught.value.param == "messages"


def test_the_template_s_own_words_reach_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_text_parts_and_null_become_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Message] = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert [message["content"] for message in plain_messages(messages)] == ["one\ntwo", ""]


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {}}], [{"type": "text"}], ["x"], [None], 3, {}])
def test_other_content_is_refused_with_its_place(content: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        plain_messages([*HI, {"role": "user", "content": content}])
    assert (caught.value.param or "").startswith("messages[1].content")


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    messages: list[Message] = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{% if false %}developer{% endif %}{{ messages[0].role }}", messages) == "developer"
    assert messages[0]["role"] == "developer"


@pytest.mark.parametrize("template", [None, "{% if %}", "{{ unclosed"])
def test_a_model_without_a_usable_template_is_an_error_at_start(template: str | None) -> None:
    from services.clock import ManualClock
    from services.text.template import ChatTemplate

    with pytest.raises(TextError):
        ChatTemplate(tiny_assets(template), ManualClock())
