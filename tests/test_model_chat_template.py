"""Chat templates: what they can use, and that none can hang, exhaust or read the process that renders them."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpool.model.text import chat_template
from kvpool.model.text.chat_template import ChatTemplate, TemplateError
from tests.support.tiny_model import CHAT_TEMPLATE

HELLO = [{"role": "user", "content": "Hé 🦙?"}]


@contextmanager
def template(source: str, **options: float | str) -> Iterator[ChatTemplate]:
    made = ChatTemplate(source, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()


def test_messages_become_a_prompt() -> None:
    with template(CHAT_TEMPLATE) as made:
        assert made.render(HELLO) == "<|im_start|>user\nHé 🦙?<|im_end|>\n<|im_start|>assistant\n"
        assert made.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHé 🦙?<|im_end|>\n"
        assert made.render([]) == "<|im_start|>assistant\n"


def test_what_templates_in_the_wild_use() -> None:
    source = """{{ bos_token }}{%- for m in messages %}
    {% if loop.index0 == 3 %}{% break %}{% endif %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% generation %}{{ m['content'] | trim }}{{ eos_token }}{% endgeneration %}
{% endfor %}{{ messages | tojson }}{{ {'a': 1} | tojson(indent=2) }}{{ strftime_now('%Y') }}"""
    messages = [{"role": "u", "content": " a<é> "}, {"role": "skip", "content": "b"}]
    with template(source, bos_token="<s>", eos_token="</s>") as made:
        text = made.render(messages)
    year = datetime.datetime.now().year
    expected = '[{"role": "u", "content": " a<é> "}, {"role": "skip", "content": "b"}]{\n  "a": 1\n}'
    assert text.replace(" \n", "").startswith("<s>")
    assert "a<é></s>" in text
    assert text.endswith(f"{expected}{year}")


def test_blocks_leave_no_white_space() -> None:
    with template("  {% if true %}\nyes\n  {% endif %}\nno") as made:
        assert made.render([]) == "yes\nno"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if", "TemplateSyntaxError"),
        ("{{ raise_exception('only user roles') }}", "only user roles"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError|no loader"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}", "more than 4194304 bytes"),
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ '%9999999999d' | format(1) }}", "memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 0.3 s"),
        ("{{ (10 ** 9) ** (10 ** 9) }}", "longer than 0.3 s"),  # folded while compiling, in one long operation
        ("{% set n = messages | length + 10 ** 9 %}{{ n ** n }}", "longer than 0.3 s"),
    ],
)
def test_hostile_and_broken_templates_get_a_typed_error_soon(source: str, message: str) -> None:
    with template(source, time_limit_s=0.3 if "longer" in message else 10.0) as made:
        started = time.monotonic()
        for _ in range(2):
            with pytest.raises(TemplateError, match=message):
                made.render([])
        assert time.monotonic() - started < 30  # two processes start within this, however loaded the machine is


def test_one_failure_does_not_spoil_the_next_rendering() -> None:
    source = (
        "{% if messages[0].content == 'hang' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        "{% elif messages[0].content == 'raise' %}{{ raise_exception('no') }}{% else %}fine{% endif %}"
    )
    with template(source, time_limit_s=1.0) as made:
        for content, failure in (("x", None), ("hang", "longer"), ("x", None), ("raise", "no"), ("x", None)):
            messages = [{"role": "user", "content": content}]
            if failure is None:
                assert made.render(messages) == "fine"
            else:
                with pytest.raises(TemplateError, match=failure):
                    made.render(messages)


def test_the_helper_is_reused_and_ends_with_close() -> None:
    with template("{{ messages | length }}") as made:
        made.render(HELLO)
        helper = made._helper
        made.render(HELLO)
        assert helper is not None
        assert made._helper is helper
        helper.kill()
        helper.wait()
        assert made.render(HELLO) == "1"  # somebody killed it: a new one takes over
        pid = made._helper.pid if made._helper else 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_messages_over_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_INPUT_BYTES", 100)
    with template("x") as made, pytest.raises(TemplateError, match="the limit is 100"):
        made.render([{"role": "user", "content": "a" * 100}])


def test_long_messages_pass_through_the_pipes() -> None:
    text = "é\n\"'" * 300_000
    with template("{{ messages[0].content }}", time_limit_s=20.0) as made:
        assert made.render([{"role": "user", "content": text}]) == text
