"""Answers of a causal language model, token by token: transformers' ``generate`` with its KV cache.

Special tokens are left out of the text. A character that takes several tokens comes with the last.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Literal

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from shardyard.errors import OutOfMemoryError
from shardyard.evaluation.language_model import first_line

Finish = Literal["end", "max_tokens", "context", "interrupted"]
"""Reason for the end of an answer: the model's end token, a limit of tokens, the model's context,
or a request to stop."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Rule by which the next token is chosen."""

    temperature: float = 0.0
    """0: the likeliest token."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; 0: all; None: as the model's folder says, else
    all."""
    seed: int | None = None
    """Seed of each answer; None: another one each time."""


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """An answer, and why it ended."""

    ids: list[int]
    """Token ids, those of special tokens included."""
    text: str
    finish: Finish


class AnsweringModel:
    """A model on its device with its tokenizer."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        end_ids: Collection[int],
        end_text: str | None,
        sampling: Sampling,
    ) -> None:
        """Args:
        end_ids: Tokens that end an answer, in addition to those that the model's folder names.
        end_text: Text that ends an answer and is no part of it; None: only tokens do.
        """
        self._end_text = end_text
        self._model = model
        self._backend = tokenizer.backend_tokenizer
        self._tokenizer = tokenizer
        self.sampling = sampling
        named = model.generation_config.eos_token_id
        named = [named] if isinstance(named, int) else named or []
        self.end_ids = sorted({*end_ids, *named})

    def answer(
        self,
        prompt: Sequence[int],
        *,
        room: int,
        max_tokens: int,
        continues: bool,
        on_text: Callable[[str], None],
        stop: Event,
    ) -> GeneratedAnswer:
        """Answer a prompt.

        Args:
            room: Tokens that the model can read after the prompt.
            max_tokens: Most tokens of the answer.
            continues: Whether the text continues the prompt's, and so may begin with a space.
            on_text: Called with each piece of the text.
            stop: Ends the answer once it is set.

        Raises:
            OutOfMemoryError: The device has too little memory.
        """
        before = list(prompt) if continues else []
        pieces = _TextPieces(self._backend, before, on_text, self._end_text)
        budget = min(room, max_tokens)
        try:
            ids = self._generate(prompt, budget, pieces, stop)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"an answer after {len(prompt):,} tokens does not fit on {self._model.device} "
                f"({first_line(error)}). Begin a new dialogue with /reset, or start again with "
                "--dtype bfloat16 or smaller --max-tokens."
            ) from error
        finish: Finish = "end"
        if not (pieces.has_ended or (ids and ids[-1] in self.end_ids)):
            if stop.is_set():
                finish = "interrupted"
            elif len(ids) >= budget:
                finish = "max_tokens" if budget == max_tokens else "context"
        text = pieces.finish(ids)
        return GeneratedAnswer(ids=ids, text=text, finish=finish)

    @torch.inference_mode()
    def _generate(
        self, prompt: Sequence[int], budget: int, pieces: "_TextPieces", stop: Event
    ) -> list[int]:
        sampling, config = self.sampling, self._model.generation_config
        drawn: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            top_k = config.top_k if sampling.top_k is None else sampling.top_k
            drawn = {
                "do_sample": True, "temperature": sampling.temperature, "top_k": top_k or 0,
            }  # fmt: skip
            if sampling.seed is not None:
                torch.manual_seed(sampling.seed)
        ids_BL = torch.tensor([list(prompt)], device=self._model.device)
        pad = self.end_ids[0] if config.pad_token_id is None else config.pad_token_id
        output_BL = self._model.generate(
            input_ids=ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=budget,
            num_beams=1,
            num_return_sequences=1,
            use_cache=True,
            eos_token_id=self.end_ids,
            pad_token_id=pad,
            streamer=pieces,
            stopping_criteria=[_Stopped(stop, pieces)],
            tokenizer=self._tokenizer,  # for stop_strings that the folder may name
            **drawn,
        )
        found: list[int] = output_BL[0, len(prompt) :].tolist()
        return found


class _Stopped(StoppingCriteria):  # type: ignore[misc]
    """Ends all sequences once an event is set, or the text has ended."""

    def __init__(self, stop: Event, pieces: "_TextPieces") -> None:
        self._stop, self._pieces = stop, pieces

    def __call__(self, input_ids: Tensor, _scores: Tensor, **_: Any) -> Tensor:
        is_over = self._stop.is_set() or self._pieces.has_ended
        return torch.full((len(input_ids),), is_over, device=input_ids.device)


class _TextPieces(BaseStreamer):  # type: ignore[misc]
    """Text of an answer in pieces, as its tokens come."""

    def __init__(
        self,
        backend: Any,
        before: Sequence[int],
        on_text: Callable[[str], None],
        end_text: str | None,
    ) -> None:
        self._backend, self._before, self._on_text = backend, list(before), on_text
        self._end_text = end_text
        self._stream: DecodeStream | None = DecodeStream(ids=self._before, skip_special_tokens=True)
        self._is_prompt = True
        self._found = ""
        self._sent = 0
        self.has_ended = False
        """Whether the end text has come."""

    def put(self, value: Tensor) -> None:
        """Take the prompt, then each token."""
        if self._is_prompt:
            self._is_prompt = False
            return
        for token in value.flatten().tolist():
            self._step(token)

    def _step(self, token: int) -> None:
        if self._stream is None:
            return
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # noqa: BLE001 - the Rust library raises plain Exception
            self._stream = None  # a decoder that changes earlier text: the rest comes at the end
            return
        if piece:
            self._found += piece
            self.has_ended = self._end_text is not None and self._end_text in self._found
            self._send(self._without_end(self._found))

    def _without_end(self, text: str) -> str:
        """Return a text up to its end text, or to what may become one."""
        end = self._end_text
        if end is None:
            return text
        begun = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
        return text.partition(end)[0] if end in text else text[: len(text) - begun]

    def _send(self, text: str) -> None:
        if len(text) > self._sent:
            self._on_text(text[self._sent :])
            self._sent = len(text)

    def end(self) -> None:
        """Called after the last token."""

    def finish(self, ids: Sequence[int]) -> str:
        """Send what was held back, and return the whole text."""
        text, before = self._text([*self._before, *ids]), self._text(self._before)
        text = text[len(before) :] if text.startswith(before) else self._text(ids)
        if self._end_text is not None:
            text = text.partition(self._end_text)[0]
        if text.startswith(self._found[: self._sent]):
            self._send(text)
        return text

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text
