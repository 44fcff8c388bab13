"""Requests for profiles, and profiles that were taken, as both halves read them."""

import json
from pathlib import Path
from typing import Any

from shardyard.rundir.contracts import is_fetched
from shardyard.rundir.layout import RunDir
from shardyard.rundir.profiles import (
    ProfileSummary,
    drop_request,
    leave_request,
    new_request,
    read_profiles,
    remove_unfinished,
    take_request,
)


def profile_of(step: int, **others: object) -> ProfileSummary:
    term = {
        "name": "launch", "reason": "", "predicted_s": None, "measured_s": 0.5, "lowest_s": 0.5,
        "lowest_rank": 0, "highest_s": 0.5, "highest_rank": 0,
    }  # fmt: skip
    content = {
        "id": "a", "step": step, "steps": 2, "attempt": 0, "world_size": 1, "ranks": [0],
        "step_s": 0.5, "usual_s": 0.4, "stood_still_s": 1.0, "trace_bytes": 10, "missing": {},
        "terms": [term],
    }  # fmt: skip
    return ProfileSummary.from_json({**content, **others})


def test_one_profile_is_asked_for_at_a_time_by_the_attempt_that_trains(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert take_request(run) is None
    first = new_request(0, steps=3, ranks="auto")
    assert leave_request(run, first)
    assert take_request(run) == first
    assert not leave_request(run, new_request(0, steps=1, ranks="all"))
    assert take_request(run) == first
    # another attempt does not wait for what one before it never did
    second = new_request(1, steps=1, ranks="all")
    assert leave_request(run, second)
    assert take_request(run) == second
    drop_request(run)
    assert take_request(run) is None
    drop_request(run)


def test_a_request_that_is_torn_or_strange_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_request(run, new_request(0, steps=3, ranks="auto"))
    strange = {**json.loads(run.profile_request.read_text()), "steps": "x"}
    for text in ("", "{", "[]", '{"id": 1}', json.dumps(strange)):
        run.profile_request.write_text(text)
        assert take_request(run) is None


def test_profiles_are_read_from_their_folders_and_else_from_events(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_profiles(run) == []
    here, told = profile_of(20), profile_of(10)
    run.profile(20).mkdir(parents=True)
    (run.profile(20) / "profile.json").write_text(json.dumps(here.to_json()))
    run.profile(30).mkdir()
    (run.profile(30) / "profile.json").write_text('{"format": 9}')
    events: list[dict[str, Any]] = [
        {"kind": "profiled", "profile": told.to_json()},
        {"kind": "profiled", "profile": {**here.to_json(), "steps": 7}},
        {"kind": "profiled", "profile": None},
        {"kind": "evaluated"},
    ]
    assert read_profiles(run, events) == [told, here]
    assert here.to_json()["slowdown"] == here.slowdown
    assert profile_of(1, usual_s=None).slowdown is None


def test_what_a_kill_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert remove_unfinished(run) == []
    for name in ("step-00000010", "step-00000020.tmp"):
        (run.profiles / name).mkdir(parents=True)
        (run.profiles / name / "rank-0.json.gz").write_bytes(b"")
    assert remove_unfinished(run) == ["step-00000020.tmp"]
    assert [each.name for each in run.profiles.iterdir()] == ["step-00000010"]


def test_traces_are_brought_here_and_requests_are_not() -> None:
    assert is_fetched("profiles/step-00000020/rank-0.json.gz")
    assert not is_fetched("profiles/step-00000020.tmp/rank-0.json.gz")
    assert not is_fetched("requests/profile.json")
