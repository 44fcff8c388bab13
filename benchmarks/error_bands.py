"""Write the planner's error on every published run to the file that its bands are made of.

Each source is left out in turn, and its runs are held against the bands that the others give.
The widening of the bands is learnt from the others, too: the coverage is of runs that had no say.
The figures are also written to ``benchmarks/results/``, as those of every measurement.

    python -m benchmarks.error_bands [--check]
"""

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planner_accuracy import COUNTED_QUALITIES, Prediction, predict
from benchmarks.planner_table import read_table
from benchmarks.record import write_result
from shardyard.planner.error_bands import (
    DATA,
    SHARE,
    PublishedRuns,
    RunKind,
    kind_of_run,
    scaled,
    spread_of,
)

TABLES = tuple(
    Path(__file__).parent / "groundtruth" / name
    for name in ("measured_runs.csv", "measured_runs_more.csv")
)
_DIGITS = 3

Errors = Sequence[PublishedRuns]


def errors_of_tables() -> tuple[PublishedRuns, ...]:
    """Return the planner's errors on all rows of quality A and B that print a speed."""
    from shardyard.planner.estimate import estimate

    found = defaultdict[tuple[str, RunKind], list[float]](list)
    for table in TABLES:
        for prediction in predict(read_table(table), estimate).predictions:
            if prediction.rate and prediction.case.quality in COUNTED_QUALITIES:
                key = prediction.case.family, _kind(prediction)
                found[key].append(round(math.log(prediction.rate.ratio), _DIGITS))
    return tuple(
        PublishedRuns(source=source, kind=kind, errors=tuple(sorted(errors)))
        for (source, kind), errors in sorted(found.items(), key=lambda item: str(item[0]))
    )


def _kind(prediction: Prediction) -> RunKind:
    case = prediction.case
    return kind_of_run(case.cluster.accelerator, case.workload, case.workload.layout)


def widening(runs: Errors, *, without: Iterable[str] = ()) -> float:
    """Return the factor under which the wanted share of runs lie in bands without their source."""
    left_out = set(without)
    used = [each for each in runs if each.source not in left_out]
    scores = sorted(score for each in used for score in _scores(each, _others(used, each.source)))
    return scores[math.ceil(SHARE * len(scores)) - 1]


def _others(runs: Errors, source: str) -> list[PublishedRuns]:
    return [each for each in runs if each.source != source]


def _scores(of: PublishedRuns, others: Errors) -> list[float]:
    """Distance of each run from the middle of its band, over that of the band's end."""
    low, middle, high = spread_of(of.kind, others)
    return [
        (error - middle) / (high - middle if error >= middle else low - middle)
        for error in of.errors
    ]


def coverage(runs: Errors) -> dict[str, tuple[int, int]]:
    """Return, for each source, how many of its runs lie in the bands of the others, and of all."""
    found = {}
    for source in dict.fromkeys(each.source for each in runs):
        others, factor = _others(runs, source), widening(runs, without=[source])
        inside = [
            score <= factor
            for each in runs
            if each.source == source
            for score in _scores(each, others)
        ]
        found[source] = sum(inside), len(inside)
    return found


def content_of(runs: Errors) -> dict[str, Any]:
    """Return the content of the file."""
    return {
        "command": "python -m benchmarks.error_bands",
        "tables": [table.name for table in TABLES],
        "widening": round(widening(runs), _DIGITS),
        "scaled_widening": round(widening(scaled(runs)), _DIGITS),
        "coverage": _figures(coverage(runs)),
        "scaled_coverage": _figures(coverage(scaled(runs))),
        "runs": [
            {"source": each.source, "kind": asdict(each.kind), "errors": list(each.errors)}
            for each in runs
        ],
    }


def _figures(found: dict[str, tuple[int, int]]) -> dict[str, Any]:
    inside, total = (sum(pair[place] for pair in found.values()) for place in (0, 1))
    mean = statistics.fmean(hits / of for hits, of in found.values())
    return {
        "of_runs": round(inside / total, _DIGITS),
        "mean_of_sources": round(mean, _DIGITS),
        "sources": {source: list(pair) for source, pair in found.items()},
    }


def text_of(content: dict[str, Any]) -> str:
    """Return the file's text: a line for each source and kind, so that a change can be read."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in content["runs"])
    head = [f" {json.dumps(key)}: {json.dumps(content[key])}" for key in content if key != "runs"]
    return "{\n" + ",\n".join([*head, f' "runs": [\n{rows}\n ]']) + "\n}\n"


def main(argv: Sequence[str] | None = None, *, say: Callable[[str], None] = print) -> int:
    """Write the file, or compare it with what would be written; returns 1 if it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args(argv)
    content = content_of(errors_of_tables())
    for name in ("coverage", "scaled_coverage"):
        figures = content[name]
        say(
            f"{name.replace('_', ' ')}: {figures['of_runs']:.1%} of runs, "
            f"{figures['mean_of_sources']:.1%} mean of sources"
        )
        for source, (hits, of) in figures["sources"].items():
            say(f"  {source:22}{hits:5} of {of}")
    text = text_of(content)
    if args.check:
        return int(DATA.read_text(encoding="utf-8") != text)
    DATA.write_text(text, encoding="utf-8")
    say(f"written: {DATA.name}")
    write_result("error-bands", {key: content[key] for key in content if key != "command"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
