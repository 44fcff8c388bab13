"""How a run stands, rank by rank: from the ends of its files."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardyard.control.live_status import Board, read_board
from shardyard.rundir.layout import RunDir
from tests.report.compare.some_runs import write_run


def append(run: RunDir, *events: dict[str, Any]) -> None:
    with run.events.open("a") as file:
        for event in events:
            file.write(json.dumps({"attempt": 0, "generation": 0, **event}) + "\n")


def workers(nodes: int, each: int) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "node": f"node-{rank // each}", "pid": 1000 + rank}
        for rank in range(nodes * each)
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return write_run(tmp_path, "run", steps=60)


def marks(board: Board) -> dict[int, str]:
    return {rank.rank: rank.mark for node in board.nodes for rank in node.ranks if rank.mark}


def test_the_whole_run_and_each_rank_are_told(run: RunDir) -> None:
    board = read_board(run)
    assert (board.state.state, board.state.step, board.last_step) == ("finished", 60, 60)
    assert board.is_over
    assert board.step_s == pytest.approx(0.62) and board.data_wait == pytest.approx(0.02 / 0.62)
    assert board.spent is not None and board.eval_loss is not None
    (node,) = board.nodes
    assert [(r.rank, r.local_rank, r.pid, r.memory_bytes) for r in node.ranks] == [
        (0, 0, 100, 390 * 2**20), (1, 1, 101, 390 * 2**20),
    ]  # fmt: skip
    json.dumps(board.to_json())


def test_a_straggler_is_marked_until_it_is_none(run: RunDir) -> None:
    slow = {"kind": "straggler", "t": 2e9, "rank": 1, "node": "laptop", "factor": 1.83}
    append(run, {**slow, "is_over": False})
    assert marks(read_board(run)) == {1: "computes 1.8 times as long"}
    append(run, {**slow, "what": "stopped", "stopped_share": 0.66, "is_over": False})
    assert marks(read_board(run)) == {1: "stopped now and then, 66% of the time"}
    append(run, {**slow, "is_over": True})
    assert marks(read_board(run)) == {}


def test_losses_are_marked_until_the_ranks_meet_again(run: RunDir) -> None:
    append(
        run,
        {"kind": "rendezvous", "t": 2e9, "generation": 1, "workers": workers(2, 2)},
        {"kind": "worker_lost", "t": 2e9, "rank": 3, "node": "node-1", "cause": "killed"},
        {"kind": "node_lost", "t": 2e9, "node": "node-1", "cause": "no answer"},
    )
    board = read_board(run)
    assert marks(board) == {3: "lost: killed"}
    assert [(node.node, node.mark) for node in board.nodes] == [
        ("node-0", ""), ("node-1", "lost: no answer"),
    ]  # fmt: skip
    append(run, {"kind": "rendezvous", "t": 2e9, "generation": 2, "workers": workers(1, 2)})
    board = read_board(run)
    assert marks(board) == {} and [node.node for node in board.nodes] == ["node-0"]


def test_a_node_that_is_left_out_is_told_though_it_has_no_ranks(run: RunDir) -> None:
    append(
        run,
        {"kind": "node_left_out", "t": 2e9, "node": "node-9", "node_rank": 9, "cause": "slow"},
        {"kind": "rendezvous", "t": 2e9, "generation": 1, "workers": workers(2, 4)},
    )
    board = read_board(run)
    assert [(node.node, len(node.ranks)) for node in board.nodes] == [
        ("node-0", 4), ("node-1", 4), ("node-9", 0),
    ]  # fmt: skip
    assert board.nodes[-1].marks == "left out: slow"


def test_a_run_that_has_just_begun_has_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {preset: llama-tiny}\n")
    board = read_board(RunDir(tmp_path))
    assert (board.state.state, board.step_s, board.nodes) == ("new", None, ())
