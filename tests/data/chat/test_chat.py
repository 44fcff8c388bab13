"""Dialogues become tokens: what may not be forged, what is learnt of them, and what is refused."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from shardyard.data.byte_ranges import TextSection
from shardyard.data.chat import ChatTokens, Dialogue
from shardyard.data.chat_template import ChatTemplate, RenderError
from shardyard.data.shards import LEARNT
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import RequestError, SourceError
from shardyard.tasks.causal_lm import question
from tests.data.chat.folders import encoded, files_of, tokenizer_of
from tests.data.chat.stock import STOCK
from tests.data.chat.test_stock import learnt_texts, turns

TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds"}}]


def said(*texts: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {
        "messages": [
            {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
        ],
        **more,
    }


@pytest.mark.parametrize("name", STOCK)
def test_words_that_spell_special_tokens_stay_words(name: str) -> None:
    """The ids are those of the same dialogue with other words, but for these words."""
    stock, tokenizer = STOCK[name], tokenizer_of(name)
    forged = " ".join(stock.special)
    row = said(f"Ignore {forged} me.", f"No {forged} thanks.", "Sure?", "Yes.")
    harmless = said("Ignore it me.", "No it thanks.", "Sure?", "Yes.")
    special = {tokenizer.token_to_id(token) for token in stock.special}
    for document, other in zip(encoded(name, row), encoded(name, harmless), strict=True):
        assert [number for number in document.ids if number in special] == [
            number for number in other.ids if number in special
        ]
        text = tokenizer.decode(list(document.ids), skip_special_tokens=False)
        plain = tokenizer.decode(list(other.ids), skip_special_tokens=False)
        if forged.strip() == forged and not stock.is_turn_by_turn:
            assert text == plain.replace("Ignore it me", f"Ignore {forged} me").replace(
                "No it thanks", f"No {forged} thanks"
            )
    found = learnt_texts(name, encoded(name, row))
    assert f"No {forged} thanks." in found[0] and "Ignore" not in found[0]


@pytest.mark.parametrize("name", STOCK)
def test_the_tokenizer_with_other_words_gives_the_same_ids(name: str) -> None:
    """Only dialogues that spell special tokens are read by it."""
    stock = STOCK[name]
    files = files_of(stock)
    tokens = ChatTokens(files["tokenizer.json"], stock.template, name=name)
    text = ChatTemplate(files, name=name).render(turns(4)) + stock.special[0]
    marked = tokens.encode(
        f"{text}{tokens.escape_special_tokens(stock.special[0], is_answer=True)}"
    )
    ids, offsets = tokens.encode(text)
    assert (marked[0][: len(ids)], marked[1][: len(ids)]) == (ids, offsets)
    assert marked[0][len(ids) :]


def test_thoughts_and_calls_are_tokens_in_answers_and_words_elsewhere() -> None:
    (document,) = encoded("qwen3", said("<think> <tool_call>?", "<think>\nhm\n</think>\n\nYes."))
    tokenizer = tokenizer_of("qwen3")
    tokens = [tokenizer.id_to_token(number) for number in document.ids]
    assert tokens.count("<think>") == 1 and "<tool_call>" not in tokens
    (text,) = learnt_texts("qwen3", [document])
    assert text == "<think>\nhm\n</think>\n\nYes.<|im_end|>"


def test_a_thought_of_its_own_is_learnt_before_each_answer() -> None:
    messages = said("a?", "b.", "c?", "d.")["messages"]
    messages[1]["reasoning_content"] = "hm"
    found = learnt_texts("qwen3", encoded("qwen3", {"messages": messages}))
    assert found == [
        "<think>\nhm\n</think>\n\nb.<|im_end|>",
        "<think>\n\n</think>\n\nd.<|im_end|>",
    ]


@pytest.mark.parametrize("name", [name for name, stock in STOCK.items() if stock.has_tools])
def test_a_call_of_a_tool_is_an_answer(name: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": "two"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "four"},
            {"role": "assistant", "content": "It is four."},
        ],
        "tools": TOOLS,
    }
    documents = encoded(name, row)
    first, second = learnt_texts(name, documents)
    assert (
        '"add"' in first
        and '{"a": 2, "b": "two"}' in first
        and first.endswith("<|im_end|>" if name != "llama-3.2" else "<|eot_id|>")
    )
    assert "It is four." in second and "four" not in first
    whole = tokenizer_of(name).decode(list(documents[0].ids), skip_special_tokens=False)
    assert "adds" in whole


def test_an_answer_of_weight_0_is_read_and_not_learnt() -> None:
    row = said("a?", "b.", "c?", "d.")
    row["messages"][1]["weight"] = 0
    assert learnt_texts("chatml", encoded("chatml", row)) == ["d.<|im_end|>"]


def test_a_question_at_the_end_is_read_and_not_learnt() -> None:
    found = learnt_texts("chatml", encoded("chatml", said("a?", "b.", "c?")))
    assert found == ["b.<|im_end|>"]


@pytest.mark.parametrize("name", ["chatml", "alpaca"])
def test_all_of_a_dialogue_can_be_learnt(name: str) -> None:
    (document,) = encoded(name, said("a?", "b.", "c?", "d."), loss_on="all")
    assert set(document.columns[LEARNT]) == {1}
    end = tokenizer_of(name).token_to_id(STOCK[name].eos)
    assert document.ids[-1] == end if name == "alpaca" else document.ids[-2] == end


def test_a_token_that_stands_for_both_sides_of_a_border_is_learnt() -> None:
    """As it holds the first or last letter of an answer; the ids stay those of the whole text."""
    stock = replace(STOCK["vicuna"], plain=(":It", "four.</"), special=("<s>", "<unk>"))
    files = files_of(
        replace(stock, template=stock.template.replace("'ASSISTANT: '", "'ASSISTANT:'"))
    )
    dialogue = Dialogue(TextEncoder(files, name="x"), loss_on="answers")
    (document,) = dialogue.encode(TextSection(json.dumps(said("a?", "It is four.")), True, True))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokens = map(tokenizer.id_to_token, document.ids)
    marks = dict(zip(tokens, document.columns[LEARNT], strict=True))
    assert marks[":It"] == marks["four.</"] == 1


CHATML = STOCK["chatml"].template
THOUGHTLESS = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
FORCED = CHATML.replace("assistant\\n' }}{%- endif", "assistant\\n<think>\\n' }}{%- endif")


@pytest.mark.parametrize(
    ("template", "row", "why"),
    [
        (THOUGHTLESS, said("a?", "<think>b</think>c"), r"or leaves out what is in message 2"),
        (FORCED, said("a?", "b."), r"before answer 2 is not what it gives a model that is to ans"),
        (CHATML.replace("m.content", "'x'"), said("a?", "b."), r"leaves out message 1, of user"),
        (CHATML, said("a?", "b.", tools=TOOLS), r"leaves out the tools"),
        (STOCK["gemma-2"].template, {"messages": [{"role": "system", "content": "s"},
         *said("a?", "b.")["messages"]]}, r"no role of system\.$"),
        (STOCK["mistral-v0.3"].template, {"messages": [{"role": "system", "content": "s"},
         *said("a?", "b.")["messages"]]}, r"leaves out message 1, of system"),
        (STOCK["llama-2"].template, said("a?", "b.", "c?", "d.") | {"messages": said(
            "a?", "b.")["messages"] * 2 + [{"role": "assistant", "content": "e"}]}, r"turns!"),
        (CHATML.replace("m.role", "m.role + 1"), said("a?", "b."), r"can only concatenate str"),
        (CHATML, said("a?", "b \U00100007."), r"a character above U\+0FFFFF.*Take the row out"),
    ],
)  # fmt: skip
def test_what_a_template_does_not_show_is_refused(
    template: str, row: dict[str, Any], why: str
) -> None:
    stock = replace(STOCK["chatml"], template=template, bos="<|endoftext|>")
    dialogue = Dialogue(TextEncoder(files_of(stock), name="x"), loss_on="answers")
    section = TextSection(json.dumps(row, ensure_ascii=False), True, True, location="x.jsonl:3")
    with pytest.raises(SourceError, match=r"^x\.jsonl:3: .*" + why):
        dialogue.encode(section)


def test_a_tokenizer_without_a_template_is_refused_with_what_to_do() -> None:
    files = files_of(STOCK["chatml"])
    config = json.loads(files["tokenizer_config.json"])
    del config["chat_template"]
    files["tokenizer_config.json"] = json.dumps(config).encode()
    with pytest.raises(RequestError, match=r"x has no chat template.*Set data\.chat_template to"):
        ChatTemplate(files, name="x")
    files["chat_template.jinja"] = b"{% for %}"
    with pytest.raises(
        RequestError, match=r"not a template that Jinja can read \(.*Fetch it again"
    ):
        ChatTemplate(files, name="x")


def test_of_several_templates_the_one_for_tools_is_taken_with_tools() -> None:
    files = files_of(STOCK["chatml"])
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": named}).encode()
    template = ChatTemplate(files, name="x")
    assert (template.render([]), template.render([], tools=[{}])) == ("plain", "tools")
    files["chat_template.jinja"] = b"file"
    assert ChatTemplate(files, name="x").render([]) == "file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ dict.__mro__[0] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_reaches_nothing_of_python(template: str) -> None:
    files = files_of(replace(STOCK["chatml"], template=template))
    with pytest.raises(RenderError):
        ChatTemplate(files, name="x").render([{"role": "user", "content": "a"}])


def test_a_token_that_a_template_needs_and_nobody_names_is_told_with_where_to_set_it() -> None:
    files = files_of(replace(STOCK["chatml"], template="{{ bos_token + messages[0].content }}"))
    config = json.loads(files["tokenizer_config.json"])
    config.pop("bos_token", None)
    files["tokenizer_config.json"] = json.dumps(config).encode()
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(
        RequestError,
        match=r"chat template of x writes bos_token, and no such token is named there\. Set "
        r"bos_token in tokenizer_config\.json next to the template .* data\.chat_template",
    ):
        ChatTemplate(files, name="x").render(messages)
    files["tokenizer_config.json"] = json.dumps({**config, "bos_token": "<s>"}).encode()
    assert ChatTemplate(files, name="x").render(messages) == "<s>a"


def test_a_prompt_is_asked_as_a_user_does_and_its_answer_ends_at_the_template_s_end() -> None:
    tokenizer = TextEncoder(files_of(STOCK["chatml"]), name="x")
    ids, ends = question(tokenizer, "Two and two? <|im_end|>")
    text = Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode()).decode(
        ids, skip_special_tokens=False
    )
    assert text.endswith(
        "<|im_start|>user\nTwo and two? <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.id_of("<|im_end|>") in ends
    assert ids.count(tokenizer.id_of("<|im_end|>")) == text.count("<|im_end|>") - 1
