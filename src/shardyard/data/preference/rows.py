"""Turn rows with a preferred and a rejected answer into two dialogues of one prompt, and token ids.

The shapes are those of TRL (a prompt, or dialogues that begin alike), LLaMA-Factory and common
datasets. Only the keys decide. What is ambiguous or broken is rejected with its place.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from shardyard.config.data_choices import PREFERENCE_KEYS
from shardyard.data.byte_ranges import TextSection
from shardyard.data.chat import Dialogue, parsed_row
from shardyard.data.conversations import (
    Messages,
    Row,
    RowError,
    checked_message,
    is_target,
    list_of_objects,
    messages_of_turns,
    row_text,
    system_messages,
    text_under,
)
from shardyard.data.readers.columns import some_keys
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import Column, Encoded
from shardyard.errors import RejectedRowError
from shardyard.io.files import parse_json

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
    return row_text(row, location, _pair_of, what="the pair", forms=_FORMS)


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


class AnswerPair:
    """Two dialogues of a chat template that begin alike; what is learnt are the answers."""

    columns: ClassVar[Mapping[str, Column]] = Dialogue.columns

    def __init__(self, tokenizer: TextEncoder) -> None:
        self._dialogue = Dialogue(tokenizer, loss_on="answers")

    @staticmethod
    def words(section: TextSection) -> str:
        """Return the words of both dialogues without speakers, to train a tokenizer on."""
        pair = parse_json(section.text)
        messages = [*pair["prompt"], *pair["chosen"], *pair["rejected"]]
        return "\n".join(message.get("content") or "" for message in messages)

    def encode(self, section: TextSection) -> list[Encoded]:
        """The preferred dialogue, and the rejected one.

        Raises:
            RejectedRowError: The template rejects one, or changes what came before an answer.
            SourceError: It holds characters that are used here.
        """
        pair = parsed_row(section)
        return [self._one(section, pair, key) for key in ("chosen", "rejected")]

    def _one(self, section: TextSection, pair: Mapping[str, list[dict[str, str]]], key: str,
             ) -> Encoded:  # fmt: skip
        messages = [*pair["prompt"], *pair[key]]
        found = self._dialogue.encode_messages(messages, pair.get("tools"), section.location)
        if len(found) > 1:
            reason = (
                f"the chat template changes earlier turns once there are later ones, so the "
                f"{len(found)} answers of {key!r} are no one text. Keep the last answer."
            )
            raise RejectedRowError(reason, section.location)
        return found[0]
