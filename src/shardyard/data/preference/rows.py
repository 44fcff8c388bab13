"""Turn rows with a preferred and a rejected answer into one shape: two dialogues of one prompt.

The shapes are those of TRL (a prompt, or dialogues that begin alike), LLaMA-Factory and common
datasets. Only the keys decide. What is ambiguous or broken is rejected with its place.
"""

import json
from collections.abc import Mapping
from typing import Any

from shardyard.config.data_choices import PREFERENCE_KEYS
from shardyard.data.conversations import (
    Messages,
    Row,
    RowError,
    checked_message,
    is_target,
    list_of_objects,
    messages_of_turns,
    system_messages,
    text_under,
)
from shardyard.data.readers.columns import check_surrogates, kind_of, some_keys
from shardyard.errors import SourceError

_BEFORE = ("system", "developer", "user")
"""Roles of messages that a whole dialogue begins with."""
_PROMPTS = ("prompt", "question", "instruction", "conversations")
"""Keys of what the answers are to; the first that a row has counts."""
_FORMS = (
    "data.format=preference_pairs takes prompt, chosen and rejected (texts, or lists of role and "
    "content); question or instruction is a prompt too. Rename the row's keys, or map them with "
    "data.keys, such as data.keys={prompt: YOURS}."
)


def pair_text(row: Any, location: object) -> str:
    """A pair as JSON: ``{"prompt": [...], "chosen": [...], "rejected": [...]}``, and ``tools``.

    Raises:
        SourceError: The row is none of the shapes, or a broken one.
    """
    try:
        if not isinstance(row, dict):
            raise RowError(f"{kind_of(row)}, not an object. {_FORMS}")
        there = {key: value for key, value in row.items() if value is not None}
        pair: dict[str, Any] = _pair_of(there)
        if there.get("tools"):
            pair["tools"] = there["tools"]
        text = json.dumps(pair, ensure_ascii=False, separators=(",", ":"))
    except RowError as error:
        raise SourceError(f"{location}: {error}") from error
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"{location}: the pair holds a value that JSON cannot express ({error}). Use only "
            "texts, numbers, lists and objects."
        ) from error
    check_surrogates(text, location, "the pair")
    return text


def _pair_of(row: Row) -> dict[str, Any]:
    missing = [key for key in PREFERENCE_KEYS if key not in row]
    if missing:
        raise RowError(f"the row has no {' and no '.join(missing)}; its keys: {some_keys(row)}. "
                       f"{_FORMS}")  # fmt: skip
    answers = {key: _answer(row, key) for key in PREFERENCE_KEYS}
    _check_answers(answers)
    prompt = _prompt(row)
    if _are_whole(answers):
        prompt, answers = _split(prompt, answers)
        _check_answers(answers)
    if not prompt:
        raise RowError(f"the row has no prompt; its keys: {some_keys(row)}. {_FORMS}")
    return {"prompt": [_untrained(message) for message in prompt], **answers}


def _answer(row: Row, key: str) -> Messages:
    """The messages of an answer: a text, a message, or a list of messages or turns."""
    value = row[key]
    if isinstance(value, str):
        return [checked_message({"role": "assistant", "content": value})]
    if isinstance(value, dict):
        value = [value]
    return _messages(list_of_objects({key: value}, key))


def _messages(turns: Messages) -> Messages:
    found = messages_of_turns({"conversations": turns})
    return [checked_message(message) for message in found]


def _prompt(row: Row) -> Messages:
    """The messages before the answers; none: the row has no key of them."""
    key = next((each for each in _PROMPTS if each in row), None)
    if key is None:
        return []
    if not isinstance(row[key], str):
        return [*system_messages(row), *_messages(list_of_objects(row, key))]
    further = [text_under(row, each) for each in ("input", "context") if each in row]
    words = "\n\n".join(part for part in (row[key], *further) if part)
    return [*system_messages(row), checked_message({"role": "user", "content": words})]


def _check_answers(answers: Mapping[str, Messages]) -> None:
    for key, messages in answers.items():
        if not any(map(is_target, messages)):
            raise RowError(f"{key!r} has no answer of the assistant. Take the row out.")


def _are_whole(answers: Mapping[str, Messages]) -> bool:
    """Whether both are dialogues with the prompt in them, and not its continuations."""
    begins = {key: messages[0]["role"] in _BEFORE for key, messages in answers.items()}
    if len(set(begins.values())) > 1:
        whole, other = sorted(begins, key=lambda key: not begins[key])
        raise RowError(
            f"{whole!r} is a whole dialogue and {other!r} only an answer. Write both alike."
        )
    return begins["chosen"]


def _split(prompt: Messages, answers: dict[str, Messages]) -> tuple[Messages, dict[str, Messages]]:
    """The messages that both dialogues begin with, and what follows in each."""
    chosen, rejected = answers.values()
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other or one is chosen[-1] or other is rejected[-1]:
            break
        same += 1
    common = chosen[:same]
    said = [message.get("content") for message in prompt if message["role"] == "user"]
    if said and said[-1] not in [message.get("content") for message in common]:
        raise RowError(
            "chosen and rejected are dialogues of their own, and do not have the row's prompt in "
            "what they begin with. Take the prompt out, or write only answers in them."
        )
    lead = [message for message in prompt if message["role"] == "system"]
    if common and common[0]["role"] != "system":
        common = [*lead, *common]
    return common, {"chosen": chosen[same:], "rejected": rejected[same:]}


def _untrained(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without loss."""
    weight = {"weight": 0} if message["role"] == "assistant" else {}
    return {**message, **weight}
