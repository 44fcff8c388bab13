"""From the text of a dialogue to token ids, and which characters each of them stands for.

The ids are those that the tokenizer gives for the whole text, special tokens included, as a server
that renders the same dialogue gets them. One thing differs: what somebody said stays text, also
where it spells a special token. So such words are hidden from the template behind signs of the same
length, and the tokenizer reads a text in which the roles are changed: the words stand there as they
were said, and what the template itself wrote has signs that a copy of the tokenizer knows as its
special tokens.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from shardyard.errors import DataError
from shardyard.io.files import parse_json

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
        self._in_answers, self._elsewhere = one_of(self.special), one_of(self._written)

    def hidden(self, value: Any, *, is_answer: bool) -> Any:
        """The same value of JSON, with signs where a text in it spells a special token.

        Args:
            is_answer: Then tokens that are not special, such as those around thoughts and tool
                calls, are the model's own words.
        """
        pattern = self._in_answers if is_answer else self._elsewhere
        if isinstance(value, str):
            return pattern.sub(lambda found: self._sign(_SAID, found[0]), value)
        if isinstance(value, list):
            return [self.hidden(each, is_answer=is_answer) for each in value]
        if isinstance(value, dict):
            return {key: self.hidden(each, is_answer=is_answer) for key, each in value.items()}
        return value

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters of the text that each of them stands for.

        Args:
            text: What a template made of hidden values.
        """
        if RESERVED.search(text) is None:
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        else:
            written = self._elsewhere.sub(lambda found: self._sign(_WRITTEN, found[0]), text)
            said = _SAID_SIGNS.sub(lambda found: self._written[ord(found[0][0]) - _SAID], written)
            encoding = self._copy.encode(said, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _sign(self, first: int, token: str) -> str:
        """As long as the token, so that what stands behind it keeps its place."""
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
                    f"{self._name}: its token {token!r} cannot be told from the same words in a "
                    "dialogue. Take the dialogues that spell special tokens out of the data."
                )
        return copy


def one_of(words: Sequence[str]) -> re.Pattern[str]:
    """Matches the longest of some words; nothing, where there are none."""
    longest_first = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _merged(pair: str | list[str]) -> str:
    return "".join(pair.split(" ") if isinstance(pair, str) else pair)
