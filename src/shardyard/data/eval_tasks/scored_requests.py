"""Requests of tasks and texts, and the metrics that the answers come to.

It does not run a model: `shardyard evaluate` answers the requests by transformers, a training run
by the model in training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardyard.data.eval_tasks.prompts import Example
from shardyard.data.eval_tasks.scores import (
    TextTotals,
    sum_totals,
    task_metrics,
    text_metrics,
    total_of,
)
from shardyard.data.eval_tasks.task import EvalTask
from shardyard.data.eval_tasks.token_requests import Continuation, TokenRequest, TokenRequests
from shardyard.errors import RequestError

TEXT_METRICS = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Examples of one task, or texts, and the indices of their requests."""

    task: EvalTask | None
    name: str
    examples: Sequence[Example] = ()
    texts: Sequence[str] = ()
    indices: list[list[int]] = field(default_factory=list)
    """Places of its requests among all, by example or text."""


class Requests:
    """Requests of all tasks and texts, in one list."""

    def __init__(self, make: TokenRequests) -> None:
        """Take what turns texts into tokens, for one model."""
        self._make = make
        self.all: list[TokenRequest] = []

    def add_task(self, task: EvalTask, examples: Sequence[Example]) -> Scored:
        """Add the requests of a task.

        Raises:
            RequestError: A text has no token, or more than the model reads.
        """
        scored = Scored(task=task, name=task.name, examples=examples)
        if task.output_type == "loglikelihood_rolling":
            return self.add_texts(task.name, [each.continuations[0] for each in examples], task)
        for number, each in enumerate(examples):
            where = f"task {task.name}, row {number}"
            requests: list[TokenRequest] = [
                self._make.continuation(context, text, where)
                for context, text in zip(each.contexts, each.continuations, strict=False)
            ]
            if task.output_type == "generate_until":
                context = each.contexts[0]
                requests = [self._make.generation(context, task.until, task.max_tokens)]
            scored.indices.append(self._add(requests))
        return scored

    def add_texts(self, name: str, texts: Sequence[str], task: EvalTask | None = None) -> Scored:
        """Add the windows of whole texts.

        Raises:
            RequestError: There is no text.
        """
        if not any(texts):
            raise RequestError(f"{name} has no text, so there is nothing to predict. Give another.")
        scored = Scored(task=task, name=name, texts=texts)
        scored.indices.extend(self._add(self._make.windows(each)) for each in texts)
        return scored

    def _add(self, requests: Sequence[TokenRequest]) -> list[int]:
        self.all += requests
        return list(range(len(self.all) - len(requests), len(self.all)))


def result_of(
    scored: Scored, requests: Sequence[TokenRequest], answers: dict[int, Any]
) -> dict[str, Any]:
    """Return the result of one task, or of texts, as `shardyard evaluate` prints it.

    Args:
        requests: All requests, and ``answers`` to them by their indices.
    """
    results = [[answers[index] for index in indices] for indices in scored.indices]
    task = scored.task
    if scored.texts:
        totals = []
        for text, indices, each in zip(scored.texts, scored.indices, results, strict=True):
            windows = [requests[index] for index in indices]
            tokens = sum(len(w.targets) for w in windows if isinstance(w, Continuation))
            totals.append(total_of(text, sum(likelihood for likelihood, _ in each), tokens))
        whole = sum_totals(totals)
        metrics = text_metrics(whole, TEXT_METRICS if task is None else task.metrics)
        counts = _counts(whole)
    else:
        assert task is not None
        metrics, counts = task_metrics(task, scored.examples, results), {}
    return {
        "name": scored.name,
        "kind": "text" if task is None else task.output_type,
        "examples": len(scored.indices),
        "shots": 0 if task is None else task.shots.number,
        **({} if task is None else {"file": task.path, "sha256": task.sha256}),
        **counts,
        "metrics": [each.to_json() for each in metrics],
    }


def _counts(totals: TextTotals) -> dict[str, int]:
    return {"tokens": totals.tokens, "words": totals.words, "bytes": totals.bytes}
