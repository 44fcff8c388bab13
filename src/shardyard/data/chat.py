"""Turn dialogues into token ids of a chat template's text, and mark those to train on.

``conversations.py`` describes what a row may look like, ``chat_template.py`` how a template
renders. This file finds the answers in the text, and which characters become which token.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from tokenizers import Tokenizer

from shardyard.data.byte_ranges import TextSection
from shardyard.data.chat_template import ChatTemplate, RenderError
from shardyard.data.conversations import is_target, words_of
from shardyard.data.shards import LEARNT
from shardyard.data.tokenizer import TextEncoder
from shardyard.data.work_units import Column, Encoded
from shardyard.errors import DataError, RejectedRowError, SourceError
from shardyard.io.files import parse_json

# From the text of a dialogue to token ids, and which characters each of them stands for.
#
# The ids are those that the tokenizer gives for the whole text, special tokens included, as a
# server that renders the same dialogue gets them. One thing differs: what somebody said stays text,
# also where it spells a special token. So such words are hidden from the template behind signs of
# the same length, and the tokenizer reads a text in which the roles are changed: the words stand
# there as they were said, and what the template itself wrote has signs that a copy of the tokenizer
# knows as its special tokens.

RESERVED = re.compile("[\U00100000-\U0010ffff]")
"""Characters of the second private plane, which signs and probes are made of."""

_SAID, _WRITTEN = 0x100000, 0x108000
"""First sign of a special token that somebody said, and of one that the template wrote."""
_FILL = {_SAID: "\U00107fff", _WRITTEN: "\U0010fffc"}
_SAID_SIGNS = re.compile("[\U00100000-\U00107ffe]\U00107fff*")


class ChatTokens:
    """A tokenizer that tells what a template wrote from what was said."""

    def __init__(self, content: bytes, template: str, *, name: str) -> None:
        """Args:
        content: Of tokenizer.json.
        template: Text of the chat template.
        name: What messages call the tokenizer.
        """
        self._json = parse_json(content)
        self._json["post_processor"] = None  # one may cut spaces off the characters of a token
        self._json["truncation"] = self._json["padding"] = None
        self._name = name
        added = [each for each in self._json["added_tokens"] if each["content"]]
        self.special = [each["content"] for each in added if each["special"]]
        """Tokens that no text may become."""
        self._written = [
            each["content"]
            for each in added
            if each["special"] or (each["content"] in template and not each["content"].isspace())
        ]
        self._number = {token: number for number, token in enumerate(self._written)}
        self._in_answers, self._outside_answers = (
            alternatives_pattern(self.special),
            alternatives_pattern(self._written),
        )

    def escape_special_tokens(self, value: Any, *, is_answer: bool) -> Any:
        """The same value of JSON, with signs where a text in it spells a special token.

        Args:
            is_answer: Then tokens that are not special, such as those around thoughts and tool
                calls, are the model's own words.
        """
        pattern = self._in_answers if is_answer else self._outside_answers
        if isinstance(value, str):
            return pattern.sub(lambda match: self._sign(_SAID, match[0]), value)
        if isinstance(value, list):
            return [self.escape_special_tokens(each, is_answer=is_answer) for each in value]
        if isinstance(value, dict):
            return {
                key: self.escape_special_tokens(each, is_answer=is_answer)
                for key, each in value.items()
            }
        return value

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids, and the characters of the text that each of them covers.

        Args:
            text: Text that a template made of hidden values.
        """
        if RESERVED.search(text) is None:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            written = self._outside_answers.sub(lambda match: self._sign(_WRITTEN, match[0]), text)
            said = _SAID_SIGNS.sub(lambda match: self._written[ord(match[0][0]) - _SAID], written)
            encoding = self._copy.encode(said, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _sign(self, first: int, token: str) -> str:
        """Return a sign as long as the token, so that the text behind it keeps its place."""
        return chr(first + self._number[token]) + _FILL[first] * (len(token) - 1)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(json.dumps(self._json))

    @cached_property
    def _copy(self) -> Tokenizer:
        """The same tokenizer with other words for the tokens that templates write."""
        signs = {token: self._sign(_WRITTEN, token) for token in self._written}
        model = dict(self._json["model"])
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {signs.get(key, key): number for key, number in model["vocab"].items()}
        elif "vocab" in model:  # of pieces with their scores
            model["vocab"] = [[signs.get(key, key), score] for key, score in model["vocab"]]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in signs]
        if model.get("unk_token") in signs:
            model["unk_token"] = signs[model["unk_token"]]
        added = [
            {**each, "content": signs.get(each["content"], each["content"])}
            for each in self._json["added_tokens"]
        ]
        copy = Tokenizer.from_str(json.dumps({**self._json, "model": model, "added_tokens": added}))
        for token, sign in signs.items():
            if copy.token_to_id(sign) != self._tokenizer.token_to_id(token):
                raise DataError(
                    f"{self._name}: its token {token!r} cannot be distinguished from the same "
                    "words in a dialogue. Take the dialogues that spell special tokens out of the "
                    "data."
                )
        return copy


def alternatives_pattern(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern for the longest of some words; without words, it never matches."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _merged(pair: str | list[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)


# Where the answers of a dialogue stand in the text that its chat template makes.
#
# No template says so reliably, so it is asked by what it renders: with an answer, without it, and
# with another text in its place. What a model is given before an answer is the text without it and
# with the generation prompt; what it then has to write is the rest of the text with the answer, up
# to the token that ends the turn.

PROBE = "\U0010fffd\U0010fffdanother answer\U0010fffd\U0010fffd"
"""Placeholder for an answer; its ends are in no text (``RESERVED``)."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class SupervisedText:
    """A text to learn from."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Characters [start, stop) that are learnt, in order."""
    is_open: bool
    """Whether it ends in an answer that the template put no token behind."""


@dataclass(frozen=True)
class _Answer:
    """One answer, as the last message of a dialogue."""

    text: str
    start: int
    stop: int
    """End of what is trained on: behind the token that ends the turn, or its substitute in the
    template.
    """
    is_marked: bool
    """Whether the template writes anything behind the answer."""
    is_open: bool
    """Whether that is no token of its own."""


class AnswerFinder:
    """Turns dialogues into texts, and says where in them the answers are."""

    def __init__(
        self, template: ChatTemplate, end_tokens: Sequence[str], *, loss_on_all: bool
    ) -> None:
        """Args:
        end_tokens: The tokenizer's special tokens: the first behind an answer ends the turn.
        loss_on_all: Then a text is one span.
        """
        self._template = template
        self._loss_on_all = loss_on_all
        self._end_tokens = tuple(end_tokens)
        self._ends = alternatives_pattern(end_tokens)

    def supervised_texts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> list[SupervisedText]:
        """Return the dialogue as one text, where each answer is as it would be generated.

        Else return a text for each answer, which ends with it.

        Raises:
            RenderError: The template did not render, or leaves out what is in a message.
        """
        whole = self._template.render(messages, tools=tools)
        self._check_all_rendered(messages, tools, whole)
        if self._loss_on_all:
            is_open = messages[-1]["role"] == "assistant" and not self._ends_in_token(whole)
            stop = len(whole.rstrip()) if is_open else len(whole)
            return [_supervised_text(whole, ((0, stop),), is_open=is_open)]
        numbers = [number for number, message in enumerate(messages) if is_target(message)]
        answers = [self._answer(messages, number, tools) for number in numbers]
        ends_in_answer = numbers[-1] == len(messages) - 1
        unmarked = answers[:-1] if ends_in_answer else answers
        if all(whole.startswith(each.text[: each.stop]) for each in answers) and all(
            each.is_marked for each in unmarked
        ):
            spans = tuple((each.start, each.stop) for each in answers)
            return [_supervised_text(whole, spans, is_open=ends_in_answer and answers[-1].is_open)]
        return [
            _supervised_text(each.text, ((each.start, each.stop),), is_open=each.is_open)
            for each in answers
        ]

    def _answer(
        self, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> _Answer:
        before, answer = messages[:number], messages[number]
        given = self._template.render(before, tools=tools, add_generation_prompt=True)
        text = self._template.render([*before, answer], tools=tools)
        other = self._template.render([*before, _with_probe(answer)], tools=tools)
        if not text.startswith(given):
            raise RenderError(
                f"what it writes before answer {number + 1} is not what it gives a model that is "
                f"to answer, which ends with {given[-60:]!r}"
            )
        start, content_end = len(given), len(text) - _common_suffix_length(text, other)
        lead = text[start : _common_prefix_length(text, other)]
        if lead.strip() and given == self._template.render(before, tools=tools):
            # it knows no generation prompt, so the head of the turn is still to be left out
            headed = [*before, {**answer, "content": PROBE}]
            start = _common_prefix_length(text, self._template.render(headed, tools=tools))
        if other == text or not _contains_text(
            text[start:content_end], answer.get("content") or ""
        ):
            raise RenderError(f"it changes or leaves out what is in message {number + 1}")
        behind = text[content_end:]
        end = self._ends.search(behind)
        return _Answer(
            text=text,
            start=start,
            stop=content_end + (end.end() if end else len(behind.rstrip())),
            is_marked=end is not None or bool(behind.strip()),
            is_open=end is None,
        )

    def _ends_in_token(self, text: str) -> bool:
        return text.rstrip().endswith(self._end_tokens)

    def _check_all_rendered(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str
    ) -> None:
        """Raise if the template leaves out what somebody said, or the tools."""
        at = 0
        for number, message in enumerate(messages):
            content = (message.get("content") or "").strip()
            found = whole.find(content, at) if message["role"] == "user" else -1
            if found >= 0:
                at = found + len(content)
            elif not is_target(message):
                changed = [*messages[:number], _with_probe(message), *messages[number + 1 :]]
                if self._template.render(changed, tools=tools) == whole:
                    raise RenderError(f"it leaves out message {number + 1}, of {message['role']}")
        if tools and self._template.render(messages) == whole:
            raise RenderError("it leaves out the tools")


def _supervised_text(
    text: str, spans: tuple[tuple[int, int], ...], *, is_open: bool
) -> SupervisedText:
    """Without the spaces behind an answer that the end token is put behind."""
    return SupervisedText(text[: spans[-1][1]] if is_open else text, spans, is_open)


def _with_probe(message: Message) -> Message:
    """The same message with another text at its end, which is in a tool call if it has any."""
    if not message.get("tool_calls"):
        return {**message, "content": PROBE}
    *others, last = message["tool_calls"]
    if "function" in last:
        last = {**last, "function": {**last["function"], "name": PROBE}}
    else:
        last = {**last, "name": PROBE}
    return {**message, "tool_calls": [*others, last]}


def _common_prefix_length(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is fast, comparing characters is not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _common_suffix_length(one: str, other: str) -> int:
    """Characters that two texts end with alike."""
    return _common_prefix_length(one[::-1], other[::-1])


def _contains_text(text: str, content: str) -> bool:
    """Whether a text holds another, but for spaces and line ends."""
    return "".join(content.split()) in "".join(text.split())


class DialoguePrompts:
    """Turns dialogues into what a model reads before it answers, by its chat template."""

    def __init__(self, encoder: TextEncoder) -> None:
        """Args:
            encoder: Tokenizer, with the template among its files.

        Raises:
            RequestError: It has no template, or none that Jinja can read.
        """
        self._template = ChatTemplate(encoder.files, name=encoder.name)
        self._tokens = ChatTokens(
            encoder.files["tokenizer.json"], self._template.source, name=encoder.name
        )

    @property
    def special_tokens(self) -> list[str]:
        """Tokens that no text may become."""
        return self._tokens.special

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of messages, up to where the next answer begins.

        Raises:
            RenderError: The template does not take them.
        """
        escape = self._tokens.escape_special_tokens
        escaped = [escape(each, is_answer=each["role"] == "assistant") for each in messages]
        ids, _ = self._tokens.encode(self._template.render(escaped, add_generation_prompt=True))
        return ids

    def turn_end(self) -> str | None:
        """Return what ends an answer: the special token that the template writes behind one, else
        its words there; None: it writes none."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        try:
            _, _, behind = self._template.render(messages).rpartition(PROBE)
        except RenderError:
            return None
        token = alternatives_pattern(self._tokens.special).search(behind)
        return token[0] if token else behind.strip() or None


def parsed_row(section: TextSection) -> Any:
    """The JSON of a row of messages.

    Raises:
        SourceError: It holds characters that are used here.
    """
    if RESERVED.search(section.text):
        raise SourceError(
            f"{section.location}: a character above U+0FFFFF, which is private use; Shardyard "
            "uses these to separate texts. Take the row out."
        )
    return parse_json(section.text)


class Dialogue:
    """Text of a chat template, of which the answers are learnt, or all of it."""

    columns: ClassVar[Mapping[str, Column]] = {LEARNT: Column(dtype="|u1", begin=0, end=1)}

    def __init__(self, tokenizer: TextEncoder, *, loss_on: str) -> None:
        template = ChatTemplate(tokenizer.files, name=tokenizer.name)
        content = tokenizer.files["tokenizer.json"]
        self._tokens = ChatTokens(content, template.source, name=tokenizer.name)
        self._finder = AnswerFinder(
            template,
            [*self._tokens.special, tokenizer.end_token],
            loss_on_all=loss_on == "all",
        )
        self._end_id = tokenizer.end_of_text_id

    @staticmethod
    def words(section: TextSection) -> str:
        return words_of(section.text)

    def encode(self, section: TextSection) -> list[Encoded]:
        """The dialogue, or one for each answer where a template changes what came before it.

        Raises:
            RejectedRowError: The template rejects it, or does not show what is in it.
            SourceError: It holds characters that are used here.
        """
        row = parsed_row(section)
        return self.encode_messages(row["messages"], row.get("tools"), section.location)

    def encode_messages(
        self, messages: Sequence[Message], tools: Any, location: object
    ) -> list[Encoded]:
        """One dialogue; raises ``RejectedRowError`` as ``encode``."""
        messages = [
            self._tokens.escape_special_tokens(message, is_answer=message["role"] == "assistant")
            for message in messages
        ]
        tools = self._tokens.escape_special_tokens(tools, is_answer=False)
        try:
            scripts = self._finder.supervised_texts(messages, tools)
        except RenderError as error:
            reason = f"the chat template does not render this dialogue: {error}."
            raise RejectedRowError(reason, location) from error
        return [self._encoded(script) for script in scripts]

    def _encoded(self, script: SupervisedText) -> Encoded:
        ids, offsets = self._tokens.encode(script.text)
        learnt = [int(_is_in(script.spans, start, stop)) for start, stop in offsets]
        if script.is_open:  # the template writes no end, and a model has to learn when to stop
            ids, learnt = [*ids, self._end_id], [*learnt, 1]
        return Encoded(ids, {LEARNT: learnt}, is_whole=True)


def _is_in(spans: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether characters [start, stop), or the place ``start``, lie in part in a span."""
    number = bisect_right(spans, max(start, stop - 1), key=lambda span: span[0]) - 1
    return number >= 0 and start < spans[number][1]
