"""Dialogues: from a row to the ids of the text that a model's chat template makes of it, and to
which of them are learnt.

What a row may look like is said in ``dialogues.py``, how a template renders in
``chat_template.py``, where the answers are in ``answers.py``, and what becomes a token in
``chat_tokens.py``.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import ClassVar

from shardyard.data.answers import AnswerFinder, Script
from shardyard.data.byte_ranges import Section
from shardyard.data.chat_template import ChatTemplate, RenderError
from shardyard.data.chat_tokens import RESERVED, ChatTokens
from shardyard.data.conversations import words_of
from shardyard.data.encoders import LEARNT, Column, Encoded
from shardyard.data.tokenizer import TextEncoder
from shardyard.errors import RejectedRowError, SourceError
from shardyard.io.files import parse_json


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
            is_all_learnt=loss_on == "all",
        )
        self._end_id = tokenizer.end_of_text_id

    @staticmethod
    def words(section: Section) -> str:
        return words_of(section.text)

    def encode(self, section: Section) -> list[Encoded]:
        """The dialogue, or one for each answer where a template changes what came before it.

        Raises:
            RejectedRowError: The template rejects it, or does not show what is in it.
            SourceError: It holds characters that are used here.
        """
        if RESERVED.search(section.text):
            raise SourceError(
                f"{section.place}: a character above U+0FFFFF, of those that stand for nothing "
                "and are used here to tell texts apart. Take the row out."
            )
        dialogue = parse_json(section.text)
        messages = [
            self._tokens.hidden(message, is_answer=message["role"] == "assistant")
            for message in dialogue["messages"]
        ]
        tools = self._tokens.hidden(dialogue.get("tools"), is_answer=False)
        try:
            scripts = self._finder.scripts(messages, tools)
        except RenderError as error:
            reason = f"the chat template does not render this dialogue: {error}."
            raise RejectedRowError(reason, section.place) from error
        return [self._encoded(script) for script in scripts]

    def _encoded(self, script: Script) -> Encoded:
        ids, offsets = self._tokens.encode(script.text)
        learnt = [int(_is_in(script.spans, start, stop)) for start, stop in offsets]
        if script.is_open:  # the template writes no end, and a model has to learn when to stop
            ids, learnt = [*ids, self._end_id], [*learnt, 1]
        return Encoded(ids, {LEARNT: learnt}, is_whole=True)


def _is_in(spans: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether characters [start, stop), or the place ``start``, lie in part in a span."""
    number = bisect_right(spans, max(start, stop - 1), key=lambda span: span[0]) - 1
    return number >= 0 and start < spans[number][1]
