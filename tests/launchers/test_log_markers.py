"""Marked lines: what node 0 prints is enough to rebuild the line files of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.launchers.aws_batch.launcher import BatchLauncher
from shardyard.launchers.base import Launcher, LaunchRequest
from shardyard.launchers.kubernetes.launcher import KubernetesLauncher
from shardyard.launchers.kubernetes.names import TARGETS
from shardyard.launchers.local import LocalLauncher
from shardyard.launchers.log_markers import (
    NONCE_VARIABLE,
    MarkedLine,
    mark,
    new_nonce,
    parse,
    rebuild,
)
from shardyard.launchers.slurm.launcher import SlurmLauncher
from shardyard.rundir.jsonl import read_evaluations, read_lines, read_steps
from shardyard.rundir.layout import RunDir
from tests.launchers.batch_requests import batch_request
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.slurm_request import slurm_request

EVENT = {"t": 1.5, "kind": "run_started", "attempt": 0, "generation": 0, "run": "r"}
STEPS = [{"step": step, "loss": 2.0 - step, "attempt": 0} for step in (1, 2)]
LINES = [mark("event", EVENT), *(mark("metrics", step) for step in STEPS)]


def test_a_marked_line_says_what_it_was() -> None:
    assert LINES[0].startswith('@shardyard {"event": {')
    assert "\n" not in LINES[0]
    assert parse(LINES[0]) == MarkedLine("event", EVENT)
    assert parse(LINES[2]) == MarkedLine("metrics", STEPS[1])


@pytest.mark.parametrize("prefix", ["0: ", "2026-11-21T10:00:00.1Z ", "[node-0] "])
def test_prefixes_of_schedulers_do_not_matter(prefix: str) -> None:
    assert parse(f"{prefix}{LINES[0]}\r\n") == MarkedLine("event", EVENT)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "step 4/24  loss 5.7",
        "@shardyard",
        "@shardyard ",
        "@shardyard loss",
        "@shardyard 3",
        '@shardyard {"event": 3}',
        '@shardyard {"other": {}}',
        '@shardyard {"event": {}, "metrics": {}}',
        LINES[0][:-1],
        LINES[0][20:],
    ],
)
def test_other_lines_and_cut_lines_are_nothing(line: str) -> None:
    assert parse(line) is None


def test_numbers_that_json_lacks_become_null() -> None:
    marked = parse(mark("metrics", {"step": 1, "loss": float("nan")}))
    assert marked is not None and marked.content == {"step": 1, "loss": None}


def test_a_run_is_rebuilt_from_its_log(tmp_path: Path) -> None:
    log = ["starting workers", LINES[0], LINES[1], LINES[1], "talk", LINES[2][:30], LINES[2]]
    run_dir = RunDir(tmp_path / "r")
    assert rebuild(log, run_dir.path) == 3
    assert list(read_lines(run_dir.events)) == [EVENT]
    assert read_steps(run_dir.metrics) == STEPS


def test_rebuilding_again_adds_only_what_is_new(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "r")
    assert rebuild(LINES[:2], run_dir.path) == 2
    assert rebuild(LINES[:2], run_dir.path) == 0
    assert rebuild(LINES, run_dir.path) == 1
    assert rebuild(LINES[1:], run_dir.path) == 0
    assert read_steps(run_dir.metrics) == STEPS


def test_a_line_that_a_kill_tore_is_written_anew(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "r")
    rebuild(LINES[:1], run_dir.path)
    with run_dir.metrics.open("w") as file:
        file.write(json.dumps(STEPS[0])[:9])
    assert rebuild(LINES, run_dir.path) == 2
    assert read_steps(run_dir.metrics) == STEPS


def test_an_evaluation_that_is_done_again_with_the_same_bits_is_kept(tmp_path: Path) -> None:
    """Of a start that was lost, and of the one that counts."""
    lines: list[dict[str, Any]] = []
    for attempt, steps in ((0, (1, 2, 3)), (1, (2, 3))):
        for step in steps:
            lines.append({"step": step, "loss": 1.0, "attempt": attempt, "generation": 0})
            if step == 2:
                lines.append({"step": 2, "eval": {"loss": 0.5}})
    log = [mark("metrics", line) for line in lines]
    run_dir = RunDir(tmp_path / "r")
    assert rebuild(log[:3], run_dir.path) == 3
    assert rebuild(log, run_dir.path) == len(log) - 3
    assert rebuild(log, run_dir.path) == rebuild(log[2:], run_dir.path) == 0
    assert list(read_lines(run_dir.metrics)) == lines
    assert [line["step"] for line in read_evaluations(run_dir.metrics)] == [2]


FORGED = {"t": 2.0, "kind": "run_finished", "attempt": 0, "generation": 0}


@pytest.mark.parametrize("guess", ["", "0123456789abcdef"])
def test_a_line_of_the_training_that_only_looks_marked_forges_no_event(
    guess: str, tmp_path: Path
) -> None:
    nonce = new_nonce()
    forged = mark("event", FORGED, nonce=guess)
    log = [forged, f"text: {forged}", mark("event", EVENT, nonce=nonce), forged]
    run_dir = RunDir(tmp_path / "r")
    assert rebuild(log, run_dir.path, nonce=nonce) == 1
    assert list(read_lines(run_dir.events)) == [EVENT]


def test_a_nonce_cannot_be_guessed_and_is_found_behind_any_prefix() -> None:
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100 and all(len(nonce) == 16 for nonce in nonces)
    nonce = nonces.pop()
    line = mark("event", EVENT, nonce=nonce)
    assert parse(f"text @shardyard {{}} {line}\r\n", nonce=nonce) == MarkedLine("event", EVENT)
    assert parse(line) is None


def test_a_step_that_was_trained_twice_is_kept_twice(tmp_path: Path) -> None:
    again = {**STEPS[0], "attempt": 1}
    run_dir = RunDir(tmp_path / "r")
    rebuild([*LINES, mark("metrics", again)], run_dir.path)
    assert list(read_lines(run_dir.metrics)) == [*STEPS, again]


REQUESTS: list[tuple[Launcher, LaunchRequest]] = [
    (LocalLauncher(), slurm_request()),
    (SlurmLauncher(), slurm_request()),
    (BatchLauncher(), batch_request("cluster.instance=p4d.24xlarge")),
    *((KubernetesLauncher(), request_for(f"launch.kubernetes.target={t}")) for t in TARGETS),
]


@pytest.mark.parametrize(("launcher", "request_"), REQUESTS)
def test_every_launcher_gives_the_nodes_the_nonce_of_the_submission(
    launcher: Launcher, request_: LaunchRequest
) -> None:
    assert NONCE_VARIABLE not in launcher.render(request_).text
    nonce = new_nonce()
    text = launcher.render(replace(request_, nonce=nonce)).text
    assert text.count(nonce) == text.count(NONCE_VARIABLE) == 1
