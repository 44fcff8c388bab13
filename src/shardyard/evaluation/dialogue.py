"""Dialogues with a model: prompts in tokens, within the number that the model reads.

With a chat template, a prompt is the whole dialogue so far, and the oldest turns are left out once
it becomes too long. Without one, a prompt is the text itself, which the model continues.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.data.chat import RESERVED, DialoguePrompts, Message
from shardyard.data.chat_template import RenderError
from shardyard.data.tokenizer import TextEncoder, TokenizerFiles
from shardyard.errors import RequestError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
          "mask_token")  # fmt: skip
_ANSWER_SHARE = 4
"""An answer gets a quarter of what the model reads, or its most tokens if those are fewer, before
older turns are kept."""


@dataclass(frozen=True, kw_only=True)
class DialoguePrompt:
    """Tokens that a model reads before it answers."""

    ids: list[int]
    turns_left_out: int
    """Oldest turns, each a question with its answer, that had no room."""
    room: int
    """Most tokens of the answer."""


def encoder_of(tokenizer: Any, name: str) -> TextEncoder:
    """Return our own reader of a tokenizer of transformers, in which text stays text.

    Raises:
        RequestError: It has no form that the tokenizers library reads, or no end token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RequestError(
            f"{name}: {type(tokenizer).__name__} has no tokenizer.json. Save it once with "
            "transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    config: dict[str, Any] = {each: getattr(tokenizer, each, None) for each in _NAMED}
    templates = tokenizer.chat_template
    if isinstance(templates, dict):
        templates = [{"name": key, "template": each} for key, each in templates.items()]
    config["chat_template"] = templates
    files: TokenizerFiles = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config, default=str).encode(),
    }
    return TextEncoder(files, name=name)


class ChatDialogue:
    """One dialogue, and the prompt of its next answer."""

    def __init__(
        self,
        encoder: TextEncoder,
        *,
        has_template: bool,
        context_tokens: int,
        max_tokens: int,
        system: str | None,
    ) -> None:
        """Args:
            context_tokens: Most tokens that the model reads, its answer included.
            max_tokens: Most tokens of an answer.
            system: Message that sets the model's role; None: none.

        Raises:
            RequestError: The template takes no system message, or there is no template for it.
        """
        self._encoder = encoder
        self._prompts = DialoguePrompts(encoder) if has_template else None
        self._context_tokens = context_tokens
        self._max_tokens = max_tokens
        self._system: list[Message] = []
        self._turns: list[list[Message]] = []
        self._question = ""
        if system is not None:
            self._set_system(system)

    def _set_system(self, text: str) -> None:
        if self._prompts is None:
            raise RequestError(
                f"--system: {self._encoder.name} has no chat template, so it knows no roles. Leave "
                "--system out, or write its text at the beginning of --prompt."
            )
        check_text(text, "--system")
        self._system = [{"role": "system", "content": text}]
        try:
            self._prompts.encode([*self._system, {"role": "user", "content": "a"}])
        except RenderError as error:
            raise RequestError(
                f"--system: the chat template of {self._encoder.name} takes no system message "
                f"({error}). Leave --system out, or write its text at the beginning of --prompt."
            ) from error

    @property
    def has_template(self) -> bool:
        """Whether turns are kept; else each prompt is a text of its own."""
        return self._prompts is not None

    def ends(self) -> tuple[set[int], str | None]:
        """Return what ends an answer: ids of tokens, and a text, if the template writes one."""
        ids, end = {self._encoder.end_of_text_id}, None
        if self._prompts is not None:
            end = self._prompts.turn_end()
            if end in self._prompts.special_tokens:
                ids, end = {*ids, self._encoder.id_of(end)}, None
        return ids, end

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns = []

    def ask(self, text: str) -> DialoguePrompt:
        """Return the prompt for a question.

        Raises:
            RequestError: The question is empty, too long, or rejected by the template.
        """
        check_text(text, "the prompt")
        self._question = text
        if self._prompts is None:
            return self._prompt(self._continued(text), 0)
        for left_out in range(len(self._turns) + 1):
            ids = self._encode(self._turns[left_out:], text)
            wanted = min(self._max_tokens, self._context_tokens // _ANSWER_SHARE)
            if len(ids) + wanted <= self._context_tokens:
                break
        prompt = self._prompt(ids, left_out)
        self._turns = self._turns[left_out:]
        return prompt

    def answered(self, text: str) -> None:
        """Keep an answer to the last question."""
        if self._prompts is not None:
            said, answer = {"role": "user", "content": self._question}, text
            self._turns.append([said, {"role": "assistant", "content": RESERVED.sub("", answer)}])

    def _encode(self, turns: Sequence[Sequence[Message]], text: str) -> list[int]:
        assert self._prompts is not None
        earlier = [message for turn in turns for message in turn]
        try:
            return self._prompts.encode(
                [*self._system, *earlier, {"role": "user", "content": text}]
            )
        except RenderError as error:
            raise RequestError(
                f"the chat template of {self._encoder.name} rejects the dialogue: {error}. Begin a "
                "new one with /reset, or change the question."
            ) from error

    def _continued(self, text: str) -> list[int]:
        """A text as documents begin in training, without what a tokenizer puts behind it."""
        first = [self._encoder.id_of(each) for each in self._encoder.leading_tokens()]
        return [*first, *self._encoder.encode(text)]

    def _prompt(self, ids: list[int], left_out: int) -> DialoguePrompt:
        room = self._context_tokens - len(ids)
        if room < 1:
            system = " with the system message" if self._system else ""
            raise RequestError(
                f"the prompt{system} has {len(ids):,} tokens, and the model reads "
                f"{self._context_tokens:,} with its answer. Shorten it by "
                f"{1 - room:,} tokens or more."
            )
        return DialoguePrompt(ids=ids, turns_left_out=left_out, room=room)


def check_text(text: str, name: str) -> None:
    """Raise for a text that no model can read.

    Raises:
        RequestError: It is empty, not Unicode, or holds characters that Shardyard reserves.
    """
    if not text.strip():
        raise RequestError(f"{name} is empty. Write a question, or a text to continue.")
    if not text.isascii() and any("\ud800" <= each <= "\udfff" for each in text):
        raise RequestError(
            f"{name} is no UTF-8 text. Convert it: `iconv -f latin1 -t utf-8 FILE`, or the "
            "encoding that it has in place of latin1."
        )
    if RESERVED.search(text):
        raise RequestError(
            f"{name} holds a character between U+100000 and U+10FFFF, which Shardyard uses for "
            "markers of its own. Remove it."
        )
