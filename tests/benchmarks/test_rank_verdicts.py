"""Traces say what happened, and the score counts what is said of it."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.rank_traces import Fault, Trace, drawn, healthy
from benchmarks.rank_verdicts import (
    FixedThreshold,
    Score,
    Word,
    alarms,
    blocks_of,
    by_fixed_threshold,
    by_judge,
    score,
    table,
)

SMALL = (11, 14, 21, 23, 27)
"""Seeds of traces of 32 ranks at most, which are quick."""


def trace_with(*faults: Fault) -> Trace:
    zeros = np.zeros((480, 8))
    return Trace(seed=0, machine="usual", nodes=1, devices=8, stages=1, compute_s=zeros,
                 data_s=zeros, faults=list(faults))  # fmt: skip


FAULT = Fault(kind="compute", shape="step", units=((3,),), begin=200, end=481, factor=1.2)
WORD = Word(kind="compute", unit=(3,), step=216, is_over=False)


def scored(*words: Word, faults: tuple[Fault, ...] = (FAULT,)) -> dict[str, object]:
    one = Score()
    one.add(trace_with(*faults), words)
    return one.row()


@pytest.mark.parametrize(
    ("words", "precision", "recall", "right"),
    [
        ((WORD,), 1.0, 1.0, 1.0),
        ((), None, 0.0, None),
        ((replace(WORD, step=224),), 1.0, 0.0, None),  # too late, but true
        ((replace(WORD, step=192),), 0.0, 0.0, None),  # before it began
        ((replace(WORD, unit=(4,)),), 0.0, 0.0, None),
        ((replace(WORD, kind="data"),), 0.0, 0.0, None),
        ((WORD, replace(WORD, unit=(4,))), 0.5, 1.0, 0.0),
        ((WORD, replace(WORD, step=240, is_over=True)), 1.0, 1.0, 0.0),
    ],
)
def test_who_is_named_in_time_and_rightly_is_counted(
    words: tuple[Word, ...], precision: float | None, recall: float, right: float | None
) -> None:
    row = scored(*words)
    assert (row["precision"], row["recall"], row["right"]) == (precision, recall, right)


def test_what_may_be_told_is_neither_false_nor_due_and_what_is_lawful_is_false() -> None:
    may, no = replace(FAULT, tell="may"), replace(FAULT, tell="no")
    assert (scored(WORD, faults=(may,))["precision"], scored(faults=(may,))["due"]) == (1.0, 0)
    assert scored(WORD, faults=(no,))["precision"] == 0.0


def test_a_trace_is_the_same_for_the_same_seed_and_all_wait_for_the_last() -> None:
    one, other = drawn(11), drawn(11)
    assert np.array_equal(one.compute_s, other.compute_s) and one.faults == other.faults
    for ranks, seconds in one.exchange_s.items():
        assert seconds.shape == (one.steps, len(ranks)) and (seconds > 0).all()
    ranks = tuple(range(one.devices))
    came_s = (one.compute_s + one.data_s)[:, list(ranks)]
    left_s = came_s + one.exchange_s[ranks]
    assert np.allclose(left_s, left_s[:, :1])


def test_the_fixed_threshold_names_whose_speed_is_below_seven_tenths() -> None:
    trace = trace_with()
    trace.compute_s = np.full((48, 8), 0.1)
    trace.compute_s[16:32, 3] = 0.15
    judge = FixedThreshold(8)
    words = [word for blocks in blocks_of(trace) for word in judge.look(blocks)]
    assert [(word.unit, word.step, word.is_over) for word in words] == [
        ((3,), 24, False), ((3,), 40, True)
    ]  # fmt: skip


@pytest.mark.heavy
def test_the_judge_finds_more_in_seeded_traces_than_a_fixed_threshold_and_says_less_wrongly() -> (
    None
):
    mine, fixed = score(SMALL, drawn, (by_judge, by_fixed_threshold))
    assert mine.due >= 2 and mine.found >= mine.due - 1 and mine.told == mine.true
    assert fixed.found < mine.found
    row = {"judge": mine.row(), "fixed": fixed.row()}
    content = {
        "scores": row, "shared_machine": row, "bars": {"precision": 0, "recall": 0, "right": 0},
        "alarms_in_healthy_steps": {"steps": 9, "of_traces": {"judge": [0], "fixed": [2, 3]}},
    }  # fmt: skip
    assert "| 0 | 0 in 1 | 5 in 2 |" in table(content)


@pytest.mark.heavy
def test_healthy_steps_of_a_shared_machine_raise_no_alarm() -> None:
    trace = healthy(11, machine="shared", steps=2000)
    assert alarms(trace, by_judge) == 0
    assert alarms(trace, by_fixed_threshold) > 0
