"""Chat templates that loop, grow or compute without end are rejected in a sentence, in bounds."""

import json
import resource
import time
from dataclasses import replace

import pytest

from shardyard.data import template_bounds
from shardyard.data.chat_template import ChatTemplate
from shardyard.errors import RequestError
from tests.data.chat.folders import files_of
from tests.data.chat.stock import STOCK

DOUBLING = (
    "{% set n = namespace(x='xx') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
SHARED = (
    "{{% set n = namespace(x=['x']) %}}{{% for i in range(40) %}}{{% set n.x = {} %}}{{% endfor %}}"
)
NESTED = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (NESTED, "takes more than .* steps"),
        (
            "{% macro m() %}{% endmacro %}"
            "{% for i in range(99999) %}{{ m() ~ m() ~ m() }}{% endfor %}",
            "steps",
        ),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "writes more than"),
        ("{{ 'x' * 10**10 }}", "bytes of memory"),
        ("{{ [0] * 10**10 }}", "bytes of memory"),
        ("{{ 'x'.center(10**10) }}", "bytes of memory"),
        ("{{ 'x' | center(9999999999) }}", "bytes of memory"),
        ("{{ '%9999999999d' | format(1) }}", "bytes of memory"),
        ("{{ '%9999999999d' % 1 }}", "bytes of memory"),
        ("{{ '{:>9999999999}'.format(1) }}", "bytes of memory"),
        ("{{ 'xxxxxxxxx'.replace('x', 'x' * 2**28) }}", "bytes of memory"),
        (DOUBLING + "{{ n.x }}", "bytes of memory"),
        (SHARED.format("[n.x, n.x]") + "{{ n.x }}", "value of more than"),
        (SHARED.format("{'a': n.x, 'b': n.x}"), "value of more than"),
        (SHARED.format("dict(a=n.x, b=n.x)"), "value of more than"),
        (SHARED.format("namespace(a=n.x, b=n.x)"), "value of more than"),
        (SHARED.format("n"), "value of more than"),
        ("{{ 10 ** (10 ** 10) }}", "number of more than"),
        (
            "{% set n = namespace(x=3) %}"
            "{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
            "number of more than",
        ),
    ],
)
def test_a_template_without_bounds_is_rejected_in_one_sentence_that_names_its_file(
    template: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_bounds, "MOST_STEPS", 20_000)
    monkeypatch.setattr(template_bounds, "MOST_PARTS", 10_000)
    monkeypatch.setattr(template_bounds, "MOST_CHARACTERS", 2**20)
    monkeypatch.setattr(template_bounds, "MOST_BYTES", 2**28)
    before = resource.getrlimit(resource.RLIMIT_AS)
    files = files_of(replace(STOCK["chatml"], template=template))
    with pytest.raises(RequestError, match=rf"of x \(in tokenizer_config\.json\) .*{why}.*Read it"):
        ChatTemplate(files, name="x").render([{"role": "user", "content": "a"}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_the_time_of_a_template_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_bounds, "MOST_S", 0.1)
    files = files_of(replace(STOCK["chatml"], template=NESTED))
    began_s = time.thread_time()
    with pytest.raises(RequestError, match=r"takes more than 0\.1 s of processor time"):
        ChatTemplate(files, name="x").render([])
    assert time.thread_time() - began_s < 5


@pytest.mark.parametrize(
    "opened", ["{{ " + "[" * 100_000, "{% if a %}" * 5_000, "{{ " + "(" * 9_999]
)
def test_a_template_of_too_many_levels_is_none_that_can_be_read(opened: str) -> None:
    files = files_of(STOCK["chatml"])
    files["chat_template.jinja"] = opened.encode()
    with pytest.raises(RequestError, match="not a template that Jinja can read"):
        ChatTemplate(files, name="x")


def test_what_templates_use_stays_within_bounds() -> None:
    """Length and place of a loop, filters that take a context, recursion: as Jinja has them."""
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
        "{{ messages | map(attribute='content') | join('|') }}"
        "{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | list | tojson }}"
    )
    files = files_of(replace(STOCK["chatml"], template=source))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = ChatTemplate(files, name="x").render(messages)
    assert text == "1/2False 2/2True a|b3210" + json.dumps(messages[:1])
