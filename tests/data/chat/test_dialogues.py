"""Rows of dialogues: the shapes that are known, and each way in which one is wrong."""

import json
from typing import Any

import pytest

from shardyard.data.conversations import dialogue_text, words_of
from shardyard.data.readers.columns import TextOf
from shardyard.errors import SourceError

ASK, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}
SYSTEM = {"role": "system", "content": "s"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def messages_of(row: object) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = json.loads(dialogue_text(row, "x:1"))["messages"]
    return messages


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"messages": [SYSTEM, ASK, ANSWER], "id": 7, "prompt": "a?"}, [SYSTEM, ASK, ANSWER]),
        ({"prompt": "a?", "completion": "b."}, [ASK, ANSWER]),
        ({"prompt": [ASK], "completion": [ANSWER]}, [ASK, ANSWER]),
        (
            {"prompt": [ASK, ANSWER, ASK], "completion": [ANSWER]},
            [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER],
        ),
        ({"instruction": "a?", "output": "b."}, [ASK, ANSWER]),
        ({"instruction": "a?", "input": "", "output": "b.", "label": None}, [ASK, ANSWER]),
        (
            {"instruction": "a", "input": "x", "output": "b.", "system": "s"},
            [SYSTEM, {"role": "user", "content": "a\n\nx"}, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b."}]},
            [ASK, ANSWER],
        ),
        ({"conversations": [ASK, {**ANSWER, "weight": 1}]}, [ASK, {**ANSWER, "weight": 1}]),
        ({"question": "a?", "answer": "b."}, [ASK, ANSWER]),
        ({"prompt": "a?", "response": "b."}, [ASK, ANSWER]),
        ({"input": "a?", "output": "b."}, [ASK, ANSWER]),
        (
            {"instruction": "a", "context": "x", "response": "b.", "category": "c"},
            [{"role": "user", "content": "a\n\nx"}, ANSWER],
        ),
        ({"messages": [ASK, ANSWER], "question": "q", "answer": "r"}, [ASK, ANSWER]),
        # as Parquet gives them: every key that one message has
        ({"messages": [{**ASK, "name": None, "at": 3}, ANSWER], "tools": None}, [ASK, ANSWER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a?"}]}, ANSWER]},
         [ASK, ANSWER]),
        (
            {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [ASK, {"role": "assistant", "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": {"x": 1}}}]}],
        ),
    ],
)  # fmt: skip
def test_shapes_are_known_by_their_keys(row: object, wanted: list[dict[str, Any]]) -> None:
    assert messages_of(row) == wanted


def test_tools_come_with_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = dialogue_text({"messages": [ASK, ANSWER], "tools": tools}, "x:1")
    assert json.loads(text)["tools"] == tools
    assert words_of(text) == "a?\nb."


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([ASK], r"a JSON list, not an object\. data\.format=chat takes messages"),
        ({"text": "a"}, r"of no known shape; its keys: text\..*Rename the row's keys"),
        ({"prompt": "a"}, r"of no known shape; its keys: prompt"),
        ({"messages": [ANSWER], "conversations": []}, r"several shapes \(messages, sharegpt\)"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, r"a pair of .*task.name=preference"),
        ({"prompt": "a", "completion": "b", "label": True}, r"'label' is of preference tuning"),
        ({"messages": [ASK, ANSWER], "images": ["x"]}, r"'images' is of training on pictures"),
        ({"messages": "a"}, r"'messages' holds a JSON string, not a list of objects\. Fix"),
        ({"messages": ["a"]}, r"'messages' holds a JSON list, not a list of objects"),
        ({"messages": [ASK]}, r"no answer to learn\. Take the row out"),
        ({"messages": [ASK, {**ANSWER, "weight": 0}]}, r"no answer to learn"),
        ({"messages": [ASK, {**ANSWER, "weight": 2}]}, r"has weight 2: an answer's weight is 0"),
        ({"messages": [{**ASK, "weight": 1}, ANSWER]}, r"a message of user has weight 1"),
        ({"messages": [{"role": "human", "content": "a"}]}, r"role is \"human\", not system, dev"),
        ({"messages": [{"content": "a"}]}, r"role is null"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, r"an answer is empty"),
        ({"messages": [{"role": "user", "content": 7}, ANSWER]}, r"content of a message is 7 with"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]},
         r"is a JSON list with a part that is not text\. Dialogues are learnt only as text"),
        ({"messages": [ASK, {**ANSWER, "function_call": {"name": "f"}}]}, r"OpenAI's older form"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{"id": "1"}]}]}, r"names no function"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]}, r"arguments of a tool call are not"),
        ({"prompt": "a", "completion": 7}, r"'completion' holds 7, not a string\. Fix the row"),
        ({"prompt": [7], "completion": []}, r"'prompt' holds a JSON list, not a list of objects"),
        ({"instruction": None, "output": "b"}, r"of no known shape"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, r"'history' holds earlier"),
        ({"conversations": [{"from": "observation", "value": "a"}]},
         r"turn 1 is from \"observation\"; known are system, human"),
        ({"messages": [ASK, {**ANSWER, "content": "\ud83d"}]}, r"half of a surrogate pair"),
        ({"messages": [ASK, ANSWER], "tools": [{1, 2}]}, r"a value that JSON cannot express"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_told_with_its_place(row: object, why: str) -> None:
    with pytest.raises(SourceError, match=r"^x:1: .*" + why):
        dialogue_text(row, "x:1")


GERMAN = [
    ({"frage": "a?", "antwort": "b.", "id": 3}, {"prompt": "frage", "completion": "antwort"}),
    ({"frage": "a?", "antwort": "b."}, {"question": "frage", "answer": "antwort"}),
    (
        {"verlauf": [{"wer": "user", "text": "a?"}, {"wer": "assistant", "text": "b."}]},
        {"messages": "verlauf", "role": "wer", "content": "text"},
    ),
    # a key that is ours and means another thing
    ({"prompt": "b.", "question": "a?"}, {"prompt": "question", "completion": "prompt"}),
]


@pytest.mark.parametrize(("row", "keys"), GERMAN)
def test_other_keys_are_mapped(row: object, keys: dict[str, str]) -> None:
    read = TextOf(whole_row="shardyard.data.conversations:dialogue_text", keys=(*keys.items(),))
    assert json.loads(read(row, "x:1")) == {"messages": [ASK, ANSWER]}


def test_a_mapped_key_that_is_not_there_is_told_with_the_keys_of_the_row() -> None:
    read = TextOf(
        whole_row="shardyard.data.conversations:dialogue_text",
        keys=(("prompt", "frage"), ("completion", "antwort")),
    )
    why = r"x:1: no key 'antwort' \(its keys: answer, frage\), which data\.keys reads as completion"
    with pytest.raises(SourceError, match=why):
        read({"frage": "a?", "answer": "b."}, "x:1")


def test_texts_of_other_keys_are_told_how_to_be_mapped() -> None:
    why = r"of no known shape.*data\.keys\.prompt=frage data\.keys\.completion=antwort"
    with pytest.raises(SourceError, match=why):
        dialogue_text({"frage": "a?", "antwort": "b."}, "x:1")


def test_chat_rows_that_are_read_as_text_are_told_by_their_name() -> None:
    why = r"its keys: answer, question\)\. It is a dialogue: set data\.format=chat"
    with pytest.raises(SourceError, match=why):
        TextOf()({"question": "a?", "answer": "b."}, "x:1")
    with pytest.raises(SourceError) as told:
        TextOf()({"title": "a"}, "x:1")
    assert "chat" not in str(told.value)
