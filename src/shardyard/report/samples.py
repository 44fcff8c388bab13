"""Section of a report that shows what the model does: generated texts, or labelled images."""

import math
from collections.abc import Iterable, Iterator

from shardyard.config.tasks import metrics_of, target_metric
from shardyard.errors import RequestError
from shardyard.report.document import Block, Listing, Paragraph, Pictures, Table, Text
from shardyard.report.run_data import Line, RunRecord
from shardyard.rundir.jsonl import scores_of
from shardyard.units import format_percent

_MOST_PROMPTS = 4
_MOST_CHARACTERS = 4000


def sample_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield images with predictions, and generated texts: of several steps, or of the end."""
    yield from _predictions(record)
    found = {event["step"]: event for event in record.counted_events("generated")}
    texts = {step: _texts(event) for step, event in sorted(found.items())}
    if len(texts) > 1 or any(len(each) > 1 for each in texts.values()):
        yield from _texts_over_steps(texts, _best_step(record, texts))
        return
    if not record.sample:
        return
    task = record.resolved.recipe.task if record.resolved else None
    prompt = "" if task is None else (task.prompts or (task.prompt,))[0]
    begin = prompt if record.sample.startswith(prompt) else ""
    written = record.sample.removeprefix(begin)
    words = "What the model wrote at the end of the run" + ("; the prompt is blue." * bool(begin))
    nothing = "" if written.strip() else " It wrote only white space."
    yield Paragraph(words + nothing, "note", only=("page",))
    yield Listing((Text(begin, kind="prompt"), written))


def _texts(event: Line) -> list[tuple[str, str]]:
    """Return prompts and texts of an event; whatever else is there counts as none."""
    found = event.get("texts")
    pairs = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [(str(each.get("prompt", "")), str(each.get("text", ""))) for each in pairs]


def _texts_over_steps(texts: dict[int, list[tuple[str, str]]], best: int | None) -> Iterator[Block]:
    """Yield the texts of the first, the best and the last step."""
    steps = {min(texts): "first", max(texts): "last"}
    if best is not None:
        steps[best] = f"{steps[best]} and best" if best in steps else "best"
    count = max(map(len, texts.values()))
    more = f" Of {count} prompts, {_MOST_PROMPTS} are shown." if count > _MOST_PROMPTS else ""
    yield Paragraph(
        f"What the model wrote; samples.jsonl has the texts of all {len(texts):,} steps.{more}",
        "note",
    )
    for number in range(min(count, _MOST_PROMPTS)):
        for step, which in sorted(steps.items()):
            if number < len(texts[step]):
                prompt, text = texts[step][number]
                yield Paragraph(f"Step {step:,} ({which})")
                yield Listing((Text(prompt, kind="prompt"), text[:_MOST_CHARACTERS]))


def _best_step(record: RunRecord, steps: Iterable[int]) -> int | None:
    """The step with the best validation among these; None: none of them is validated."""
    if record.resolved is None:
        return None
    recipe = record.resolved.recipe
    try:
        metrics = metrics_of(recipe.task, recipe.data.eval_sets, recipe.data.eval_tasks)
    except RequestError:  # of a package that is not installed here
        return None
    by, best = target_metric(recipe.run.target), None
    scores = {line["step"]: scores_of(line).get(by) for line in record.evaluations}
    for step in steps:
        value = scores.get(step)
        if by not in metrics or value is None or not math.isfinite(value):
            continue
        if best is None or metrics[by].is_better(value, best[0]):
            best = value, step
    return None if best is None else best[1]


def _predictions(record: RunRecord) -> Iterator[Block]:
    """Yield images of the validation split with their labels and the model's predictions."""
    found = record.predictions
    if not found:
        return
    right = sum(each.label == each.predicted for each in found)
    yield Paragraph(
        f"{len(found)} validation images from all over the split, at the end of the run: {right} "
        "predicted right.", "note",
    )  # fmt: skip
    rows = [
        (
            each.label,
            Text(each.predicted, kind="good" if each.label == each.predicted else "bad"),
            format_percent(each.probability),
        )
        for each in found
    ]
    yield Pictures([
        (each.jpeg, (f"true: {label}", Text(f"predicted: {guess}", kind=guess.kind), share))
        for each, (label, guess, share) in zip(found, rows, strict=True)
    ])  # fmt: skip
    yield Table(["true", "predicted", "#probability"], rows, only=("markdown",))


_MOST_PAIRS = 10
_MOST_NAME = 24


def confusion_blocks(record: RunRecord) -> Iterator[Block]:
    """Yield which classes the last validation took for others: a matrix and the worst pairs."""
    found = record.confusion
    if found is None:
        return
    share = format_percent(found.right / found.predictions) if found.predictions else "none"
    part = ""
    if found.classes > len(found.names):
        part = f" The {len(found.names)} classes in most confusions, of {found.classes:,}:"
    yield Paragraph(
        f"The validation at step {found.step:,}: {share} of {found.predictions:,} predictions are "
        f"right, on the diagonal.{part}", "note",
    )  # fmt: skip
    names = [_short(name) for name in found.names]
    rows = [
        [name, *(_cell(count, is_right=row == column) for column, count in enumerate(counts))]
        for row, (name, counts) in enumerate(zip(names, found.matrix, strict=True))
    ]
    yield Table(["true \u2193 predicted \u2192", *(f"#{name}" for name in names)], rows)
    if found.pairs and len(found.names) > 2:
        pairs = [[_short(a), _short(b), f"{count:,}"] for a, b, count in found.pairs[:_MOST_PAIRS]]
        yield Paragraph("Most frequent confusions", "note")
        yield Table(["true", "predicted", "#number"], pairs)


def _cell(count: int, *, is_right: bool) -> Text:
    kind = "muted" if count == 0 else "good" if is_right else "bad"
    return Text(f"{count:,}", kind=kind)


def _short(name: str) -> str:
    return name if len(name) <= _MOST_NAME else f"{name[: _MOST_NAME - 1]}\u2026"
