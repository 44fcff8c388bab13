"""Results of each attempt and each number of ranks, computed once for every form of the report.

Steps are those that count. An attempt may have several numbers of ranks, because an elastic
run loses and gains nodes within an attempt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from shardyard.report.against_plan import steady
from shardyard.report.run_data import AttemptRecord, Line, RunRecord
from shardyard.report.walltime import WAITING, AttemptTime, trained_s
from shardyard.units import ABSENT, format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True)
class RanksPace:
    """Speed of the steps that one number of ranks did."""

    ranks: int
    steps: int
    step_time_s: float | None
    """Median, without the first step of each start."""
    tokens_per_s: float | None
    """Median of all ranks together."""


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """Result of one attempt."""

    number: int
    ranks: tuple[int, ...]
    """Numbers of ranks that it trained on, in order; without steps, those that met."""
    steps: int
    """Steps that count."""
    lost_steps: int
    """Steps whose result was lost."""
    trained_s: float
    running_s: float
    """Wall time of the attempt, without the wait before it."""
    between_s: float
    """Wait between the attempt before it and this one."""
    step_time_s: float | None
    """Median, without the first step of each start."""
    peak_memory_bytes: int | None
    """Peak of the rank with the highest known peak."""
    peak_memory_ranks: int
    """Ranks whose peak is known to the end; a drained attempt only reports rank 0."""

    def ranks_words(self) -> str:
        """``2`` or ``2, then 1``."""
        return ", then ".join(map(str, self.ranks)) or ABSENT

    def peak_words(self) -> str:
        """Peak, and of which ranks."""
        if self.peak_memory_bytes is None:
            return ABSENT
        only = " (rank 0)" if self.peak_memory_ranks == 1 < max(self.ranks, default=1) else ""
        return f"{format_bytes(self.peak_memory_bytes)}{only}"


def paces(record: RunRecord) -> tuple[RanksPace, ...]:
    """Speed by number of ranks, the one with most steps first."""
    by_ranks: dict[int, list[Line]] = {}
    for line in record.steps:
        by_ranks.setdefault(int(line.get("world_size") or 0), []).append(line)
    rows = [
        RanksPace(
            ranks=ranks,
            steps=len(lines),
            step_time_s=_median(steady(tuple(lines), "step_time_s")),
            tokens_per_s=_median(steady(tuple(lines), "tokens_per_s")),
        )
        for ranks, lines in reversed(by_ranks.items())  # of equal ones the newest comes first
    ]
    return tuple(sorted(rows, key=lambda row: -row.steps))


def main_lines(record: RunRecord, pace: RanksPace | None) -> tuple[Line, ...]:
    """Lines of the steps that a pace is of."""
    if pace is None:
        return ()
    return tuple(line for line in record.steps if (line.get("world_size") or 0) == pace.ranks)


def results(record: RunRecord, times: Sequence[AttemptTime]) -> tuple[AttemptResult, ...]:
    """Result of each attempt that left any event.

    Args:
        times: Wall time of the attempts, from ``account``.
    """
    by_number = {attempt.number: attempt for attempt in record.attempts}
    return tuple(_result(record, by_number[time.number], time) for time in times)


def _result(record: RunRecord, attempt: AttemptRecord, time: AttemptTime) -> AttemptResult:
    steps = tuple(s for s in record.steps if (s.get("attempt") or 0) == attempt.number)
    ranks = tuple(dict.fromkeys(_ranks(attempt)))
    finished = attempt.last("run_finished") or {}
    peaks = tuple(peak for peak in _peaks(attempt) if peak)
    return AttemptResult(
        number=attempt.number,
        ranks=ranks,
        steps=len(steps),
        lost_steps=sum((s.get("attempt") or 0) == attempt.number for s in record.lost),
        trained_s=trained_s(time.phases),
        running_s=time.seconds - time.phases.get(WAITING, 0.0),
        between_s=time.phases.get(WAITING, 0.0),
        step_time_s=_median(steady(steps, "step_time_s")),
        peak_memory_bytes=max(peaks, default=None),
        peak_memory_ranks=len(finished.get("peak_bytes_by_rank") or peaks[:1]),
    )


def _ranks(attempt: AttemptRecord) -> Iterator[int]:
    """Numbers of ranks in the order of the steps; without steps, of the rendezvous."""
    found = [line["world_size"] for line in attempt.lines if line.get("world_size")]
    met = [event["world_size"] for event in attempt.all("rendezvous") if event.get("world_size")]
    yield from map(int, found or met)


def _peaks(attempt: AttemptRecord) -> Iterator[int]:
    """Every peak that the attempt reports: by rank at its start and end, by rank 0 in each step."""
    for line in attempt.lines:
        yield int(line.get("peak_memory_bytes") or 0)
    for event in attempt.all("model_ready"):
        for row in event.get("memory_by_rank") or []:
            yield int(row.get("peak_bytes") or 0)
    for event in attempt.all("run_finished"):
        yield from map(int, event.get("peak_bytes_by_rank") or [])


def attempts_table(results: Sequence[AttemptResult]) -> tuple[list[str], list[list[str]]]:
    """Heads, a # before those of numbers, and a row an attempt."""
    heads = [
        "attempt", "#ranks", "#steps", "#time trained", "#running time", "#wait before it",
        "#step time", "#peak memory",
    ]  # fmt: skip
    rows = [
        [
            f"attempt {each.number}",
            each.ranks_words(),
            f"{each.steps:,}" + (f" ({each.lost_steps:,} lost)" if each.lost_steps else ""),
            format_seconds(each.trained_s),
            format_seconds(each.running_s),
            format_seconds(each.between_s) if each.between_s else ABSENT,
            ABSENT if each.step_time_s is None else format_seconds(each.step_time_s),
            each.peak_words(),
        ]
        for each in results
    ]
    return heads, rows


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
