"""Profiles of real runs of two processes: what faults do to the table, and nothing to the run."""

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardyard.data.loader import Loader
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lines import EventWriter, read_lines, read_steps
from shardyard.rundir.profiles import (
    StepProfile,
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
from tests.distributed.runs import Corpus, make_run, prepare_corpus

SHARDED: dict[str, Any] = {
    "run": {"steps": 12},
    "cluster": {"devices": 2},
    "parallel": {"strategy": "FULL_SHARD"},
    "task": {"eval_every_steps": 6},
}
PAUSE_S = 0.1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def asked(at_step: int = 5, **others: Any) -> dict[str, Any]:
    return {**SHARDED, "observe": {"profile": {"at_step": at_step, **others}}}


def _train(run_dir: RunDir, *, slow_rank: int | None = None, data_pause_s: float = 0.0) -> str:
    """Train this rank, with a fault if one is asked for; rank 0 writes events."""

    def pause(_step: int) -> None:
        if dist.get_rank() == slow_rank:
            time.sleep(PAUSE_S)

    if data_pause_s:
        usual = Loader.__next__

        def later(self: Loader) -> Any:
            time.sleep(data_pause_s)
            return usual(self)

        Loader.__next__ = later  # type: ignore[method-assign]
    events = EventWriter(run_dir.events, attempt=0, generation=0) if dist.get_rank() == 0 else None
    hooks = Hooks(
        generation=0, drain_requested=lambda: False, events=events,
        faults=Faults(before_step=pause),
    )  # fmt: skip
    return train(run_dir, 0, hooks)


def _late_and_starved(run_dir: RunDir) -> str:
    return _train(run_dir, slow_rank=1, data_pause_s=PAUSE_S)


def profile_of(run_dir: RunDir) -> tuple[StepProfile, dict[str, dict[str, float]]]:
    """The one profile of a run, and the terms of each rank."""
    (found,) = read_profiles(run_dir)
    content = json.loads((run_dir.profile(found.step) / "profile.json").read_text())
    return found, content["by_rank"]


def losses(run_dir: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_steps(run_dir.metrics)]


def abandoned(run_dir: RunDir) -> list[str]:
    return [e["reason"] for e in read_lines(run_dir.events) if e["kind"] == "profile_abandoned"]


def test_a_profile_changes_no_bit_and_its_terms_are_the_time_of_its_steps(
    corpus: Corpus, tmp_path: Path
) -> None:
    plain = make_run(tmp_path / "plain", corpus, SHARDED)
    # an evaluation is in the middle of it, and belongs to no step
    profiled = make_run(tmp_path / "profiled", corpus, asked())
    run_on_ranks(_train, 2, plain)
    run_on_ranks(_train, 2, profiled)
    assert losses(profiled) == losses(plain)

    found, by_rank = profile_of(profiled)
    assert (found.step, found.steps, found.ranks, found.missing) == (5, 3, (0, 1), {})
    times = {line["step"]: line["step_time_s"] for line in read_steps(profiled.metrics)}
    measured_s = sum(times[step] for step in (5, 6, 7)) / 3
    assert sum(by_rank["0"].values()) == pytest.approx(measured_s, rel=0.01, abs=1e-3)
    whole = [term for term in found.terms if not term.is_part]
    assert sum(term.measured_s for term in whole) == pytest.approx(found.step_s, rel=1e-6)
    rows = {term.name: term for term in found.terms}
    assert rows["matrix products"].measured_s > 0 < rows["data parallel"].measured_s
    assert rows["attention"].measured_s > 0 < rows["optimizer"].measured_s
    assert "other collectives" not in rows
    assert found.usual_s is not None and found.slowdown is not None
    assert found.stood_still_s > 0
    for rank in (0, 1):
        with gzip.open(profiled.profile(5) / f"rank-{rank}.json.gz") as file:
            assert len(json.load(file)["traceEvents"]) > 100
    left = sorted(each.name for each in profiled.profile(5).iterdir())
    assert left == ["profile.json", "rank-0.json.gz", "rank-1.json.gz"]


def test_slow_samples_and_a_slow_rank_show_in_their_own_terms(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Samples at both; the rank at itself as time in no operator, at the other as a wait."""
    run_dir = make_run(tmp_path / "run", corpus, asked(ranks="all"))
    run_on_ranks(_late_and_starved, 2, run_dir)
    _, by_rank = profile_of(run_dir)
    waits = {rank: terms["data parallel"] + terms["stragglers"] for rank, terms in by_rank.items()}
    assert by_rank["1"]["launch"] - by_rank["0"]["launch"] > 0.9 * PAUSE_S
    assert waits["0"] - waits["1"] > 0.7 * PAUSE_S
    for terms in by_rank.values():
        assert terms["data"] == pytest.approx(PAUSE_S, rel=0.2)


def _asked_while_it_trains(run_dir: RunDir) -> str:
    taking.LOOK_EVERY_S = 0.02
    return _train(run_dir, data_pause_s=0.05)


def test_a_request_is_taken_up_while_it_trains(corpus: Corpus, tmp_path: Path) -> None:
    """Of one rank of two; the other only marks time."""
    run_dir = make_run(tmp_path / "run", corpus, SHARDED)
    request = new_request(0, steps=2, ranks="1")
    assert leave_request(run_dir, request)
    run_on_ranks(_asked_while_it_trains, 2, run_dir)
    found, by_rank = profile_of(run_dir)
    assert (found.id, found.ranks, list(by_rank)) == (request.id, (1,), ["1"])
    assert [e["id"] for e in read_lines(run_dir.events) if e["kind"] == "profiled"] == [request.id]
    assert take_request(run_dir) is None


def test_what_cannot_be_taken_is_told_and_the_run_goes_on(corpus: Corpus, tmp_path: Path) -> None:
    """Ranks that are not there; a part that a kill has left; the last step, where two are asked."""
    run_dir = make_run(tmp_path / "run", corpus, asked(at_step=12, steps=2))
    leave_request(run_dir, new_request(0, steps=1, ranks="7"))
    unfinished(run_dir.profile(3)).mkdir(parents=True)
    assert run_on_ranks(_asked_while_it_trains, 2, run_dir) == ["finished", "finished"]
    (reason,) = abandoned(run_dir)
    assert "processes were lost in the middle of it" in reason
    found, _ = profile_of(run_dir)
    assert (found.step, found.steps) == (12, 1)

    again = make_run(tmp_path / "again", corpus, SHARDED)
    leave_request(again, new_request(0, steps=1, ranks="7"))
    run_on_ranks(_asked_while_it_trains, 2, again)
    (reason,) = abandoned(again)
    assert "the run has 2 ranks" in reason
    assert read_profiles(again) == []
    assert take_request(again) is None


def test_a_request_after_the_last_step_is_told(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, {**SHARDED, "run": {"steps": 1}})
    leave_request(run_dir, new_request(0, steps=1, ranks="auto"))
    run_on_ranks(_asked_while_it_trains, 2, run_dir)
    assert abandoned(run_dir) == ["the run ended before another step began"]


@pytest.mark.parametrize(
    ("parallel", "devices", "term"),
    [
        ({"tp": 2}, 2, "tensor parallel"),
        ({"cp": 2}, 2, "context parallel"),
        ({"pp": 2}, 2, "pipeline"),
        ({"strategy": "NO_SHARD"}, 2, "data parallel"),
    ],
)
def test_each_axis_has_its_exchanges(
    parallel: dict[str, Any], devices: int, term: str, corpus: Corpus, tmp_path: Path
) -> None:
    sections = {**asked(at_step=2, steps=2), "run": {"steps": 3}, "parallel": parallel}
    sections |= {"cluster": {"devices": devices}, "task": {}}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(_train, devices, run_dir)
    found, by_rank = profile_of(run_dir)
    for terms in by_rank.values():
        assert terms[term] > 0, terms
        axes = ("tensor parallel", "context parallel", "pipeline", "data parallel")
        assert all(not terms[axis] for axis in axes if axis not in (term, "data parallel"))
        assert not terms["other collectives"]
    assert found.step_s > 0
