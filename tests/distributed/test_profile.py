"""Profiles of real runs of two processes: what faults do to the table, and nothing to the run.

All are trained by the same two processes, one after the other.
"""

import gzip
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.data.loader import Loader
from shardyard.rundir.jsonl import EventWriter, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.rundir.profiles import (
    ProfileSummary,
    leave_request,
    new_request,
    read_profiles,
    take_request,
    unfinished,
)
from shardyard.train import profile as taking
from shardyard.train.hooks import Faults, Hooks
from shardyard.train.run import train
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import make_run, prepare_corpus

pytestmark = pytest.mark.system

SHARDED: dict[str, Any] = {
    "run": {"steps": 8},
    "cluster": {"devices": 2},
    "parallel": {"strategy": "FULL_SHARD"},
}
PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, and what is done to it."""

    sections: dict[str, Any]
    slow_rank: int | None = None
    data_pause_s: float = 0.0


def asked(at_step: int = 3, *, sections: dict[str, Any] | None = None, **others: Any) -> Any:
    return {**SHARDED, **(sections or {}), "observe": {"profile": {"at_step": at_step, **others}}}


def short(**parallel: Any) -> Case:
    """Two steps of a layout are profiled."""
    return Case(sections=asked(2, steps=2, sections={"run": {"steps": 3}, "parallel": parallel}))


SHORT = {
    "tensor parallel": short(tp=2),
    "context parallel": short(cp=2),
    "pipeline": short(pp=2),
    "data parallel": short(strategy="NO_SHARD"),
}
EVALUATED = {"task": {"eval_every_steps": 4}}
CASES = {
    "plain": Case(sections={**SHARDED, **EVALUATED}),
    # an evaluation is in the middle of it, and belongs to no step
    "profiled": Case(sections=asked(sections=EVALUATED)),
    "slow": Case(sections=asked(ranks="all"), slow_rank=1, data_pause_s=PAUSE_S),
    "requested": Case(sections=SHARDED, data_pause_s=0.05),
    "killed before": Case(sections=asked(8, steps=2), data_pause_s=0.02),
    "no such rank": Case(sections=SHARDED, data_pause_s=0.05),
    "over": Case(sections={**SHARDED, "run": {"steps": 1}}),
    **SHORT,
}
REQUESTS = {
    "requested": new_request(0, steps=2, ranks="1"),
    "killed before": new_request(0, steps=1, ranks="auto"),
    "no such rank": new_request(0, steps=1, ranks="7"),
    "over": new_request(0, steps=1, ranks="auto"),
}


@contextmanager
def _waiting_for_samples(seconds: float) -> Iterator[None]:
    usual = Loader.__next__

    def later(self: Loader) -> Any:
        time.sleep(seconds)
        return usual(self)

    Loader.__next__ = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        Loader.__next__ = usual  # type: ignore[method-assign]


def _train_all(run_dirs: Sequence[RunDir], cases: Sequence[Case]) -> list[str]:
    """Train this rank's part of each, with its faults; rank 0 writes events."""
    taking.LOOK_EVERY_S = 0.02
    rank, found = dist.get_rank(), []
    for run_dir, case in zip(run_dirs, cases, strict=True):

        def pause(_step: int, slow_rank: int | None = case.slow_rank) -> None:
            if rank == slow_rank:
                time.sleep(PAUSE_S)

        hooks = Hooks(
            generation=0,
            drain_requested=lambda: False,
            events=EventWriter(run_dir.events, attempt=0, generation=0) if rank == 0 else None,
            faults=Faults(before_step=pause),
        )
        with _waiting_for_samples(case.data_pause_s):
            found.append(train(run_dir, 0, hooks))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """All that were trained, by their names."""
    folder = tmp_path_factory.mktemp("profiles")
    corpus = prepare_corpus(folder)
    found = {
        name: make_run(folder / name.replace(" ", "-"), corpus, case.sections)
        for name, case in CASES.items()
    }
    for name, request in REQUESTS.items():
        assert leave_request(found[name], request)
    unfinished(found["killed before"].profile(3)).mkdir(parents=True)
    ends = run_on_ranks(_train_all, 2, list(found.values()), list(CASES.values()))
    assert ends == [["finished"] * len(found)] * 2
    return found


def profile_of(run_dir: RunDir) -> tuple[ProfileSummary, dict[str, dict[str, float]]]:
    """The one profile of a run, and the terms of each rank."""
    (found,) = read_profiles(run_dir)
    content = json.loads((run_dir.profile(found.step) / "profile.json").read_text())
    return found, content["by_rank"]


def losses(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


def told(run_dir: RunDir, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(run_dir.events) if event["kind"] == kind]


def test_a_profile_changes_no_bit(runs: dict[str, RunDir]) -> None:
    assert len(losses(runs["plain"])) == 8
    assert losses(runs["profiled"]) == losses(runs["plain"])


def test_the_terms_of_a_profile_are_the_time_of_its_steps(runs: dict[str, RunDir]) -> None:
    beyond = {}
    for name in ("profiled", *SHORT):
        found, by_rank = profile_of(runs[name])
        times = {line["step"]: line["step_time_s"] for line in read_steps(runs[name].metrics)}
        steps = range(found.step, found.step + found.steps)
        measured_s = sum(times[step] for step in steps) / found.steps
        allowed_s = max(0.01 * measured_s, 1e-3)
        beyond[name] = abs(sum(by_rank["0"].values()) - measured_s) / allowed_s
    # of five the middle one: what is written beside an evaluation counts to the step's time alone,
    # and a process may be held up at any edge
    assert median(beyond.values()) < 1, beyond


def test_its_table_has_a_row_for_each_thing_that_took_time(runs: dict[str, RunDir]) -> None:
    found, _ = profile_of(runs["profiled"])
    assert (found.step, found.steps, found.ranks, found.missing) == (3, 3, (0, 1), {})
    whole = [term for term in found.terms if not term.is_part]
    assert sum(term.measured_s for term in whole) == pytest.approx(found.step_s, rel=1e-6)
    rows = {term.name: term.measured_s for term in found.terms}
    for name in ("matrix products", "attention", "memory-bound", "data parallel", "optimizer"):
        assert rows[name] > 0
    assert "other collectives" not in rows
    assert found.usual_s is not None and found.slowdown is not None
    assert found.stood_still_s > 0


def test_its_traces_are_whole_and_nothing_lies_beside_them(runs: dict[str, RunDir]) -> None:
    folder = runs["profiled"].profile(3)
    sizes = []
    for rank in (0, 1):
        trace = folder / f"rank-{rank}.json.gz"
        sizes.append(trace.stat().st_size)
        with gzip.open(trace) as file:
            assert len(json.load(file)["traceEvents"]) > 100
    assert profile_of(runs["profiled"])[0].trace_bytes == sum(sizes)
    left = sorted(each.name for each in folder.iterdir())
    assert left == ["profile.json", "rank-0.json.gz", "rank-1.json.gz"]


def test_slow_samples_and_a_slow_rank_show_in_their_own_terms(runs: dict[str, RunDir]) -> None:
    """Samples at both; the rank at itself as time in no operator, at the other as a wait."""
    _, by_rank = profile_of(runs["slow"])
    waits = {rank: terms["data parallel"] + terms["stragglers"] for rank, terms in by_rank.items()}
    assert by_rank["1"]["launch"] - by_rank["0"]["launch"] > 0.5 * PAUSE_S
    assert waits["0"] - waits["1"] > 0.5 * PAUSE_S
    for terms in by_rank.values():
        assert 0.95 * PAUSE_S < terms["data"] < 1.5 * PAUSE_S


def test_a_request_is_taken_up_while_it_trains(runs: dict[str, RunDir]) -> None:
    """Of one rank of two; the other only marks time."""
    run_dir, request = runs["requested"], REQUESTS["requested"]
    found, by_rank = profile_of(run_dir)
    assert (found.id, found.steps, found.ranks, list(by_rank)) == (request.id, 2, (1,), ["1"])
    (event,) = told(run_dir, "profiled")
    assert ProfileSummary.from_json(event["profile"]) == found
    assert take_request(run_dir) is None


def test_what_a_kill_has_left_is_told_and_removed(runs: dict[str, RunDir]) -> None:
    """The recipe's own profile comes after it, of the last step alone, where it asks for two."""
    run_dir = runs["killed before"]
    (event,) = told(run_dir, "profile_abandoned")
    assert event["id"] == REQUESTS["killed before"].id
    assert "processes were lost in the middle of it" in event["reason"]
    found, _ = profile_of(run_dir)
    assert (found.step, found.steps) == (8, 1)
    assert [each.name for each in run_dir.profiles.iterdir()] == ["step-00000008"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no such rank", "--ranks 7: the run has 2 ranks, counted from 0"),
        ("over", "the run ended before another step began"),
    ],
)
def test_what_cannot_be_taken_is_told(name: str, reason: str, runs: dict[str, RunDir]) -> None:
    (event,) = told(runs[name], "profile_abandoned")
    assert reason in event["reason"]
    assert read_profiles(runs[name]) == []
    assert take_request(runs[name]) is None


@pytest.mark.parametrize("term", SHORT)
def test_each_axis_has_its_exchanges(term: str, runs: dict[str, RunDir]) -> None:
    _, by_rank = profile_of(runs[term])
    for terms in by_rank.values():
        assert terms[term] > 0
        # ranks that split samples hold the same weights: these are exchanged, too
        shared = {"data parallel"} if term == "context parallel" else set()
        assert {axis for axis in SHORT if terms[axis]} == {term} | shared
        assert not terms["other collectives"]
