"""Where the answers of a dialogue stand in the text that its chat template makes.

No template says so reliably, so it is asked by what it renders: with an answer, without it, and
with another text in its place. What a model is given before an answer is the text without it and
with the generation prompt; what it then has to write is the rest of the text with the answer, up to
the token that ends the turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.data.chat_template import ChatTemplate, RenderError
from shardyard.data.chat_tokens import one_of
from shardyard.data.conversations import is_learnt

PROBE = "\U0010fffd\U0010fffdanother answer\U0010fffd\U0010fffd"
"""Stands where an answer would; its ends are in no text (``chat_tokens.RESERVED``)."""

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Script:
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
    """Of what is learnt: behind the token that ends the turn, or what the template has for it."""
    is_marked: bool
    """Whether the template writes anything behind the answer."""
    is_open: bool
    """Whether that is no token of its own."""


class AnswerFinder:
    """Turns dialogues into texts, and says where in them the answers are."""

    def __init__(
        self, template: ChatTemplate, end_tokens: Sequence[str], *, is_all_learnt: bool
    ) -> None:
        """Args:
        end_tokens: The tokenizer's special tokens: the first behind an answer ends the turn.
        is_all_learnt: Then a text is one span.
        """
        self._template = template
        self._is_all_learnt = is_all_learnt
        self._end_tokens = tuple(end_tokens)
        self._ends = one_of(end_tokens)

    def scripts(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[Script]:
        """The dialogue as one text, where each answer stands in it as it would be generated; else
        a text for each answer, which ends with it.

        Raises:
            RenderError: The template did not render, or leaves out what is in a message.
        """
        whole = self._template.render(messages, tools=tools)
        self._refuse_lost(messages, tools, whole)
        if self._is_all_learnt:
            is_open = messages[-1]["role"] == "assistant" and not self._ends_in_token(whole)
            stop = len(whole.rstrip()) if is_open else len(whole)
            return [_script(whole, ((0, stop),), is_open=is_open)]
        numbers = [number for number, message in enumerate(messages) if is_learnt(message)]
        answers = [self._answer(messages, number, tools) for number in numbers]
        ends_in_answer = numbers[-1] == len(messages) - 1
        unmarked = answers[:-1] if ends_in_answer else answers
        if all(whole.startswith(each.text[: each.stop]) for each in answers) and all(
            each.is_marked for each in unmarked
        ):
            spans = tuple((each.start, each.stop) for each in answers)
            return [_script(whole, spans, is_open=ends_in_answer and answers[-1].is_open)]
        return [
            _script(each.text, ((each.start, each.stop),), is_open=each.is_open) for each in answers
        ]

    def _answer(
        self, messages: Sequence[Message], number: int, tools: Sequence[Any] | None
    ) -> _Answer:
        before, answer = messages[:number], messages[number]
        given = self._template.render(before, tools=tools, add_generation_prompt=True)
        text = self._template.render([*before, answer], tools=tools)
        other = self._template.render([*before, _in_its_place(answer)], tools=tools)
        if not text.startswith(given):
            raise RenderError(
                f"what it writes before answer {number + 1} is not what it gives a model that is "
                f"to answer, which ends with {given[-60:]!r}"
            )
        start, content_end = len(given), len(text) - _same_end(text, other)
        lead = text[start : _same_start(text, other)]
        if lead.strip() and given == self._template.render(before, tools=tools):
            # it knows no generation prompt, so the head of the turn is still to be left out
            headed = [*before, {**answer, "content": PROBE}]
            start = _same_start(text, self._template.render(headed, tools=tools))
        if other == text or not _holds(text[start:content_end], answer.get("content") or ""):
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

    def _refuse_lost(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, whole: str
    ) -> None:
        """Raise if the template leaves out what somebody said, or the tools."""
        at = 0
        for number, message in enumerate(messages):
            content = (message.get("content") or "").strip()
            found = whole.find(content, at) if message["role"] == "user" else -1
            if found >= 0:
                at = found + len(content)
            elif not is_learnt(message):
                changed = [*messages[:number], _in_its_place(message), *messages[number + 1 :]]
                if self._template.render(changed, tools=tools) == whole:
                    raise RenderError(f"it leaves out message {number + 1}, of {message['role']}")
        if tools and self._template.render(messages) == whole:
            raise RenderError("it leaves out the tools")


def _script(text: str, spans: tuple[tuple[int, int], ...], *, is_open: bool) -> Script:
    """Without the spaces behind an answer that the end token is put behind."""
    return Script(text[: spans[-1][1]] if is_open else text, spans, is_open)


def _in_its_place(message: Message) -> Message:
    """The same message with another text at its end, which is in a tool call if it has any."""
    if not message.get("tool_calls"):
        return {**message, "content": PROBE}
    *others, last = message["tool_calls"]
    if "function" in last:
        last = {**last, "function": {**last["function"], "name": PROBE}}
    else:
        last = {**last, "name": PROBE}
    return {**message, "tool_calls": [*others, last]}


def _same_start(one: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # by halves: comparing slices is fast, comparing characters is not
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _same_end(one: str, other: str) -> int:
    """Characters that two texts end with alike."""
    return _same_start(one[::-1], other[::-1])


def _holds(text: str, content: str) -> bool:
    """Whether a text holds another, but for spaces and line ends."""
    return "".join(content.split()) in "".join(text.split())
