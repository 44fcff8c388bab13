"""`shardyard top`: a table once in a pipe, again and again on a terminal, of 8 ranks and of 512."""

import json
import sys
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.cli.top import fitting, node_table, rank_table
from shardyard.control.live_status import read_board
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from tests.control.test_live_status import append, workers
from tests.report.compare.some_runs import write_run
from tests.terminal import terminal


def run_of(folder: Path, *, nodes: int, each: int) -> RunDir:
    run = write_run(folder, "run", steps=60)
    rows = [{"rank": n, "peak_bytes": (n + 1) * 2**20} for n in range(nodes * each)]
    append(
        run,
        {"kind": "rendezvous", "t": 2e9, "generation": 0, "workers": workers(nodes, each)},
        {"kind": "model_ready", "t": 2e9, "generation": 0, "memory_by_rank": rows},
        {"kind": "straggler", "t": 2e9, "rank": 5, "factor": 2.0, "is_over": False},
    )
    return run


def test_a_pipe_gets_one_table_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, nodes=2, each=4)
    assert main(["top", "run", "--runs-dir", str(tmp_path)]) == 0
    head, numbers, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("run  finished")
    for words in ("step 60 of 60", "loss 3.", "validation 3.", "tokens/s", "a step 620 ms", "3.2%"):
        assert words in numbers
    assert " ".join(columns.split()) == "rank node pid step a step waits memory used power"
    assert len(rows) == 8
    assert " ".join(rows[5].split()) == "5 node-1 1005 - - - 6.0 MiB - - computes 2 times as long"


def test_512_ranks_are_told_as_nodes_where_a_terminal_has_no_lines_for_them(tmp_path: Path) -> None:
    board = read_board(run_of(tmp_path, nodes=64, each=8))
    assert len(rank_table(board)[1]) == 512 and len(node_table(board)[1]) == 64
    assert len(fitting(board, 600)[1]) == 512
    heads, rows, more = fitting(board, 100)
    assert (heads[1], len(rows), more) == ("ranks", 64, "")
    assert rows[1] == ("node-1", "8-15", "-", "-", "-", "16.0 MiB", "-", "-", "")
    _, rows, more = fitting(board, 20)
    assert rows[0] == (
        "node-0",
        "0-7",
        "-",
        "-",
        "-",
        "8.0 MiB",
        "-",
        "-",
        "rank 5: computes 2 times as long",
    )
    assert (len(rows), more) == (19, "and 45 more nodes, all healthy")


def test_json_holds_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(tmp_path, nodes=1, each=8)
    assert main(["top", "run", "--runs-dir", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["nodes"][0]["ranks"]) == 8 and told["state"]["state"] == "finished"


def test_a_run_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "nothing", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err


def test_telemetry_fills_the_columns_and_a_node_shows_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path, nodes=1, each=8)
    head = {
        "t": 2e9, "node": "node-0", "attempt": 0, "cores": 96, "names": ["H100"] * 8,
        "memory_bytes": [80 * 2**30] * 8,
    }  # fmt: skip
    devices = {
        "utilisation": [0.97] * 7 + [None], "memory_used_bytes": [70 * 2**30] * 8,
        "power_w": [600.0] * 8,
    }  # fmt: skip
    ranks = {"step": [61] * 8, "step_s": [0.5] * 8, "compute_s": [0.4] * 7 + [None]}
    run.telemetry.mkdir()
    lines = [head, {"t": 2e9, "devices": devices, "ranks": ranks}]
    file = run.telemetry / "node-0.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["top", "run", "--runs-dir", str(tmp_path)]) == 0
    rows = [" ".join(row.split()) for row in capsys.readouterr().out.splitlines()[3:]]
    assert rows[0] == "0 node-0 1000 61 500 ms 20% 70.0 GiB 97% 600 W"
    assert rows[7] == "7 node-0 1007 61 500 ms - 70.0 GiB - 600 W"
    (row,) = node_table(read_board(run))[1]
    assert row[:-1] == ("node-0", "0-7", "61", "500 ms", "20%", "70.0 GiB", "97%", "4,800 W")


@pytest.mark.heavy
def test_a_terminal_is_drawn_until_the_run_is_over(tmp_path: Path) -> None:
    """Of 512 ranks with the newest mark first; the run takes a step and ends meanwhile."""
    run = run_of(tmp_path, nodes=64, each=8)
    events = run.events.read_text().splitlines()
    over = [line for line in events if '"run_finished"' in line or '"attempt_ended"' in line]
    run.events.write_text("\n".join(line for line in events if line not in over) + "\n")
    lease = Lease(run.lease)
    command = [sys.executable, "-m", "shardyard", "top", str(run.path), "--every", "0.2"]
    with terminal(command, folder=tmp_path, environ={"TERM": "xterm"}) as shown:
        shown.wait(r"run  running")
        shown.wait(r"node-0 +0-7 .* rank 5: computes 2 times as long")
        shown.wait(r"and 21 more nodes, all healthy")
        with run.metrics.open("a") as file:
            file.write(json.dumps({"step": 61, "loss": 1.2345, "step_time_s": 0.5}) + "\n")
        shown.wait(r"step 61 of 60 +loss 1\.2345")
        with run.events.open("a") as file:
            file.write("\n".join(over) + "\n")
        lease.close()
        shown.wait(r"run  finished")
