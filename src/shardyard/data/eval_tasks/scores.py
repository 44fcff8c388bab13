"""Metrics of a task: the score of each example, their mean, and its standard error."""

import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, assert_never

from shardyard.data.eval_tasks.prompts import Example
from shardyard.data.eval_tasks.task import EvalTask, TextFilter

LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class MetricValue:
    """A metric over all examples of a task."""

    metric: str
    filter: str
    """Filter of the generated text; none: the text as it is."""
    value: float
    stderr: float | None
    """Standard error; None: the metric has none, or there is one example."""

    def to_json(self) -> dict[str, Any]:
        """Return its fields; a value beyond the largest float is null."""
        value = self.value if math.isfinite(self.value) else None
        return {
            **asdict(self),
            "value": value,
            "higher_is_better": self.metric not in LOWER_IS_BETTER,
        }


@dataclass(frozen=True, kw_only=True)
class TextTotals:
    """Sums over whole texts."""

    log_likelihood: float
    tokens: int
    words: int
    bytes: int

    def value(self, metric: str) -> float:
        match metric:
            case "perplexity":
                return _exp(-self.log_likelihood / self.tokens)
            case "word_perplexity":
                return _exp(-self.log_likelihood / self.words)
            case "byte_perplexity":
                return _exp(-self.log_likelihood / self.bytes)
            case "bits_per_byte":
                return -self.log_likelihood / self.bytes / math.log(2)
        raise AssertionError(metric)


def _exp(exponent: float) -> float:
    try:
        return math.exp(exponent)
    except OverflowError:  # of a word that an untrained model finds impossible
        return math.inf


def total_of(text: str, log_likelihood: float, tokens: int) -> TextTotals:
    """Count one text, with words as the harness counts them."""
    return TextTotals(
        log_likelihood=log_likelihood,
        tokens=tokens,
        words=len(re.split(r"\s+", text)),
        bytes=len(text.encode()),
    )


def sum_totals(totals: Sequence[TextTotals]) -> TextTotals:
    """Sum over texts."""
    return TextTotals(
        log_likelihood=math.fsum(each.log_likelihood for each in totals),
        tokens=sum(each.tokens for each in totals),
        words=sum(each.words for each in totals),
        bytes=sum(each.bytes for each in totals),
    )


def text_metrics(totals: TextTotals, metrics: Sequence[str]) -> list[MetricValue]:
    """Return metrics of whole texts; they have no standard error, as in the harness."""
    return [
        MetricValue(metric=each, filter="none", value=totals.value(each), stderr=None)
        for each in metrics
    ]


def task_metrics(
    task: EvalTask, examples: Sequence[Example], answers: Sequence[Sequence[Any]]
) -> list[MetricValue]:
    """Return the metrics of a task that has an answer for each request of its examples.

    Args:
        answers: By example: pairs of log-likelihood and whether it is greedy, or generated texts.
    """
    found = []
    for each in task.filters or (TextFilter(name="none", steps=()),):
        scores = [
            _scores(task, example, given, each)
            for example, given in zip(examples, answers, strict=True)
        ]
        found += [_aggregate(metric, each.name, [s[metric] for s in scores])
                  for metric in task.metrics]  # fmt: skip
    return found


def _aggregate(metric: str, filter_name: str, values: Sequence[float]) -> MetricValue:
    mean = math.fsum(values) / len(values)
    stderr = None
    if len(values) > 1:
        squares = math.fsum((value - mean) ** 2 for value in values)
        stderr = math.sqrt(squares / (len(values) - 1) / len(values))
    if metric == "perplexity":
        # of exp(-mean): its derivative times the error of the mean; the harness draws samples
        mean = _exp(-mean)
        stderr = None if stderr is None or math.isinf(mean) else stderr * mean
    return MetricValue(metric=metric, filter=filter_name, value=mean, stderr=stderr)


def _scores(
    task: EvalTask, example: Example, answers: Sequence[Any], text_filter: TextFilter
) -> Mapping[str, float]:
    match task.output_type:
        case "multiple_choice":
            return _of_choices(example, [log_likelihood for log_likelihood, _ in answers])
        case "loglikelihood":
            ((log_likelihood, is_greedy),) = answers
            return {"perplexity": log_likelihood, "acc": float(is_greedy)}
        case "generate_until":
            text = _filtered(answers[0], text_filter)
            wanted = example.target if isinstance(example.target, list) else [example.target]
            matches = [_is_match(text, each, task.match) for each in wanted]
            return {"exact_match": float(any(matches))}
        case "loglikelihood_rolling":
            raise AssertionError("summed over texts")
        case _:
            assert_never(task.output_type)


def _of_choices(example: Example, log_likelihoods: Sequence[float]) -> Mapping[str, float]:
    characters = [len(each) for each in example.choices]
    bytes_ = [len(each.encode()) for each in example.choices]
    right = example.target if isinstance(example.target, list) else [example.target]

    def accuracy(divisors: Sequence[int]) -> float:
        scores = [each / by for each, by in zip(log_likelihoods, divisors, strict=True)]
        return float(scores.index(max(scores)) in right)

    return {
        "acc": accuracy([1] * len(characters)),
        "acc_norm": accuracy(characters),
        "acc_bytes": accuracy(bytes_),
    }


def _filtered(text: str, text_filter: TextFilter) -> str:
    for step in text_filter.steps:
        match step["function"]:
            case "regex":
                text = _extracted(text, step)
            case "remove_whitespace":
                text = text.strip()
            case "lowercase":
                text = text.lower()
            case "uppercase":
                text = text.upper()
            case "take_first":
                pass  # there is one text
            case other:
                raise AssertionError(other)
    return text


def _extracted(text: str, step: Mapping[str, Any]) -> str:
    """The part of a text that a regular expression finds, or the fallback."""
    fallback = str(step.get("fallback", "[invalid]"))
    found = re.findall(step.get("regex_pattern", r"#### (\-?[0-9\.\,]+)"), text)
    if not found:
        return fallback
    chosen = found[step.get("group_select", 0)]
    if isinstance(chosen, tuple):
        chosen = next((part for part in chosen if part), fallback)
    return str(chosen).strip()


def _is_match(text: str, wanted: str, options: Mapping[str, Any]) -> bool:
    def normal(each: str) -> str:
        for pattern in options.get("regexes_to_ignore") or ():
            each = re.sub(pattern, "", each)
        if options.get("ignore_case"):
            each = each.lower()
        removed = string.punctuation if options.get("ignore_punctuation") else ""
        removed += string.digits if options.get("ignore_numbers") else ""
        return each.translate(str.maketrans("", "", removed))

    return normal(text) == normal(wanted)
