"""Chat templates of stock forms: rendered as transformers does, and the answers found."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shardyard.config.data_choices import chat_rows_of
from shardyard.data.chat_template import ChatTemplate
from shardyard.data.shards import LEARNT
from shardyard.data.tokenizer import TokenizerFiles
from shardyard.data.work_units import Encoded
from tests.data.chat.folders import encoded, files_of, tokenizer_of, write
from tests.data.chat.stock import STOCK

ASKED = ["What is two and two?", "Sure?\n\n  Say it again.", "日本語 \U0001f600 ok", "Yes", "a"]
ANSWERS = ["It is four.", "def four():\n    return 2 + 2", "はい \U0001f600", "Yes", "a"]


def turns(number: int) -> list[dict[str, Any]]:
    asked = [{"role": "user", "content": text} for text in ASKED[:number]]
    answers = [{"role": "assistant", "content": text} for text in ANSWERS[:number]]
    return [message for pair in zip(asked, answers, strict=True) for message in pair]


def dialogues(name: str) -> list[list[dict[str, Any]]]:
    system = {"role": "system", "content": "Be brief and kind."}
    plain = [turns(number) for number in (1, 2, 5)]
    return plain + ([[system, *turns(3)]] if STOCK[name].has_system else [])


def learnt_texts(name: str, documents: list[Encoded]) -> list[str]:
    """The words of each run of learnt tokens."""
    tokenizer, texts = tokenizer_of(name), []
    for document in documents:
        pairs = zip(document.ids, document.columns[LEARNT], strict=True)
        for is_learnt, run in groupby(pairs, key=lambda pair: pair[1]):
            if is_learnt:
                ids = [number for number, _ in run]
                texts.append(tokenizer.decode(ids, skip_special_tokens=False))
    return texts


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        name: AutoTokenizer.from_pretrained(write(files_of(stock), root / name))
        for name, stock in STOCK.items()
    }


def test_there_are_two_dozen() -> None:
    assert len(STOCK) >= 24


@pytest.mark.parametrize("name", STOCK)
def test_what_is_learnt_is_the_answers_and_what_ends_them(name: str) -> None:
    stock = STOCK[name]
    for messages in dialogues(name):
        answers = [each["content"] for each in messages if each["role"] == "assistant"]
        documents = encoded(name, {"messages": messages})
        assert all(document.is_whole for document in documents)
        assert len(documents) == (len(answers) if stock.is_turn_by_turn else 1)
        end = stock.end or stock.eos  # without an end of its own, the document's
        found = [text.removeprefix(stock.lead) for text in learnt_texts(name, documents)]
        assert all(text.endswith(end) for text in found)
        assert [text.removesuffix(end).strip() for text in found] == answers


@pytest.mark.parametrize("name", STOCK)
def test_text_and_ids_are_those_of_transformers(
    name: str, theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "llama-3.2":
        monkeypatch.setattr("shardyard.data.chat_template.TODAY", _today())
    template = ChatTemplate(files_of(STOCK[name]), name=name)
    for messages in dialogues(name):
        for shown, is_prompt in ((messages, False), (messages[:-1], True)):
            wanted = theirs[name].apply_chat_template(
                shown, tokenize=False, add_generation_prompt=is_prompt
            )
            assert template.render(shown, add_generation_prompt=is_prompt) == wanted
        for document in encoded(name, {"messages": messages})[-1:]:
            wanted = theirs[name].apply_chat_template(messages, return_dict=False)
            if not STOCK[name].end:  # the document's own end, behind the answer itself
                text = theirs[name].apply_chat_template(messages, tokenize=False).rstrip()
                wanted = theirs[name](text, add_special_tokens=False)["input_ids"]
                wanted.append(theirs[name].eos_token_id)
            assert document.ids == wanted


MARKED = {
    "chatml": ("{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}",
               "<|im_start|>assistant\\n", "m.content + '<|im_end|>'", "\\n"),
    "llama-2": ("{{- ' ' + m.content.strip() + ' ' + eos_token }}",
                "", "' ' + m.content.strip() + ' ' + eos_token", ""),
    "llama-3": ("{{- turn }}", "<|start_header_id|>assistant<|end_header_id|>\\n\\n",
                "m.content | trim + '<|eot_id|>'", ""),
    "mistral-v0.1": ("{{- m.content + eos_token + ' ' }}", "", "m.content + eos_token", " "),
    "mistral-v0.3": ("{{- ' ' + m.content | trim + eos_token }}",
                     "", "' ' + m.content | trim + eos_token", ""),
    "gemma-2": ("{{- m.content | trim + '<end_of_turn>\\n' }}",
                "", "m.content | trim + '<end_of_turn>'", "\\n"),
    "zephyr": ("{{ '<|assistant|>\\n'  + m['content'] + eos_token }}\n",
               "<|assistant|>\\n", "m.content + eos_token", "\\n"),
    "phi-3": ("{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}",
              "<|assistant|>\\n", "m.content + '<|end|>'", "\\n"),
}  # fmt: skip
"""Where a template writes an answer: the line, then what is before, in and behind the answer."""


def _marked_files(name: str) -> TokenizerFiles:
    """The files of a stock tokenizer whose template marks answers as transformers needs it."""
    written, before, answer, behind = MARKED[name]
    inside = f"{{%- generation %}}{{{{- {answer} }}}}{{%- endgeneration %}}"
    around = f"{{{{- '{before}' }}}}{inside}{{{{- '{behind}' }}}}"
    either = f"{{%- if m.role == 'assistant' %}}{around}{{%- else %}}{written}{{%- endif %}}"
    template = STOCK[name].template.replace(written, either)
    assert template != STOCK[name].template
    return files_of(replace(STOCK[name], template=template))


@pytest.mark.parametrize("name", MARKED)
def test_what_is_learnt_is_what_transformers_marks_as_answers(name: str, tmp_path: Path) -> None:
    """Transformers needs ``generation`` around an answer; here none is looked at."""
    theirs = AutoTokenizer.from_pretrained(write(_marked_files(name), tmp_path))
    for messages in dialogues(name):
        wanted = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        (found,) = encoded(name, {"messages": messages})
        assert found.ids == wanted["input_ids"]
        assert list(found.columns[LEARNT]) == wanted["assistant_masks"]


SHAPES: dict[str, tuple[Any, list[dict[str, str]]]] = {
    "question and answer": (
        {"question": "How far is it?", "answer": "Two miles."},
        [{"role": "user", "content": "How far is it?"},
         {"role": "assistant", "content": "Two miles."}],
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "2 and 3", "output": "5"},
        [{"role": "user", "content": "Add.\n\n2 and 3"}, {"role": "assistant", "content": "5"}],
    ),
    "sharegpt": (
        {"system": "Be brief.", "conversations": [
            {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
            {"from": "human", "value": "And?"}, {"from": "gpt", "value": "Bye."}]},
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
         {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And?"},
         {"role": "assistant", "content": "Bye."}],
    ),
    "instruction and response": (
        {"instruction": "Sum up.", "context": "It rains.", "response": "Rain."},
        [{"role": "user", "content": "Sum up.\n\nIt rains."},
         {"role": "assistant", "content": "Rain."}],
    ),
}  # fmt: skip
"""Kind of row -> a row, and its messages as written by hand."""


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_any_kind_has_the_tokens_and_loss_of_its_messages_in_transformers(
    shape: str, tmp_path: Path
) -> None:
    name = "chatml"
    row, messages = SHAPES[shape]
    assert chat_rows_of(row) == [shape]
    theirs = AutoTokenizer.from_pretrained(write(_marked_files(name), tmp_path))
    wanted = theirs.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert 0 < sum(wanted["assistant_masks"]) < len(wanted["input_ids"])
    (found,) = encoded(name, row)
    assert found.ids == wanted["input_ids"]
    assert list(found.columns[LEARNT]) == wanted["assistant_masks"]


def _today() -> tuple[int, int, int]:
    from datetime import datetime

    now = datetime.now()
    return now.year, now.month, now.day
