"""Turn texts into requests to a model, in tokens, by the rules of lm-evaluation-harness 0.4.13.

- A context and its continuation are tokenized together. Spaces at the end of the context belong to
  the continuation.
- An empty context is the tokenizer's first token (bos), else its end token (eos).
- A whole text is cut into windows of the model's length, and each token is predicted once. The
  first window begins with bos (or eos), later ones with the last token of the window before, and
  the last one with as many earlier tokens as fill it.
- A context that is too long loses its beginning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardyard.errors import RequestError


@dataclass(frozen=True)
class Continuation:
    """Request for the log-likelihood of tokens that follow others."""

    inputs: tuple[int, ...]
    """Tokens that the model reads: the context and all but the last of the targets."""
    targets: tuple[int, ...]
    """Tokens that are predicted: by the last inputs, as many as there are targets."""


@dataclass(frozen=True)
class TextGeneration:
    """Request for text that follows a prompt, greedily."""

    prompt: tuple[int, ...]
    until: tuple[str, ...]
    max_tokens: int


TokenRequest = Continuation | TextGeneration


class TokenRequests:
    """Makes the requests of one model."""

    def __init__(self, tokenizer: Any, context_tokens: int) -> None:
        """Args:
            tokenizer: Of transformers.
            context_tokens: Most tokens that the model reads at once.

        Raises:
            RequestError: The tokenizer names neither bos nor eos.
        """
        self._tokenizer = tokenizer
        self._context_tokens = context_tokens
        first = tokenizer.bos_token_id
        first = tokenizer.eos_token_id if first is None else first
        if first is None:
            raise RequestError(
                "the tokenizer names neither bos_token nor eos_token, so the first token of a "
                "text cannot be predicted. Set one of them in tokenizer_config.json."
            )
        self._first: int = first
        self._first_text: str = tokenizer.decode(first)

    def continuation(self, context: str, text: str, where: str) -> Continuation:
        """Return the request for a text after a context.

        Raises:
            RequestError: No token is left to predict, or more than the model reads.
        """
        stripped = context.rstrip()
        text, context = context[len(stripped) :] + text, stripped
        if context:
            whole, before = self._encode(context + text), self._encode(context)
            targets = whole[len(before) :]
        else:
            targets = self._tokenizer.encode(text, add_special_tokens=False)
            before = [self._first]
            if targets[:1] == before:
                before, targets = targets[:1], targets[1:]
        if not targets or len(targets) > self._context_tokens:
            raise RequestError(
                f"{where}: {text[:60]!r} has {len(targets)} tokens after its context, and the "
                f"model predicts 1 to {self._context_tokens}. Change the task, or give --context."
            )
        return self._cut(before, targets)

    def windows(self, text: str) -> list[Continuation]:
        """Return the requests that together predict each token of a text once."""
        tokens, length = self._encode(text), self._context_tokens
        requests = []
        for start in range(0, len(tokens), length):
            stop = min(start + length, len(tokens))
            # the last window begins earlier, so that it has the model's whole length too
            reads = [self._first] if start == 0 else tokens[stop - length - 1 : start]
            requests.append(self._cut(reads, tokens[start:stop]))
        return requests

    def generation(self, context: str, until: Sequence[str], max_tokens: int) -> TextGeneration:
        """Return the request for text after a context.

        Raises:
            RequestError: No room is left for the context.
        """
        room = self._context_tokens - max_tokens
        if room < 1:
            raise RequestError(
                f"max_gen_toks={max_tokens} leaves no room for a question: the model reads "
                f"{self._context_tokens} tokens. Set a smaller generation_kwargs.max_gen_toks in "
                "the task."
            )
        prompt = self._encode(context)[-room:] or [self._first]
        return TextGeneration(tuple(prompt), tuple(until), max_tokens)

    def _cut(self, before: Sequence[int], targets: Sequence[int]) -> Continuation:
        inputs = [*before, *targets][-(self._context_tokens + 1) :][:-1]
        return Continuation(tuple(inputs), tuple(targets))

    def _encode(self, text: str) -> list[int]:
        """Tokens of a text, with special tokens as the tokenizer adds them."""
        # a text that spells the first token, as a chat template writes it, gets no second one
        adds = not text.startswith(self._first_text)
        options = {} if adds else {"add_special_tokens": False}
        tokens: list[int] = self._tokenizer.encode(text, **options)
        return tokens


def model_length(config: Any, tokenizer: Any) -> int:
    """Return the number of tokens that a model reads: of its config, its tokenizer, or 2,048."""
    config = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    length = getattr(tokenizer, "model_max_length", None)
    return 2048 if length is None or length > 10**9 else int(length)
