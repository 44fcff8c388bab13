"""What rank 0 says becomes tables, marked lines and the event of the network; real nodes too."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.load import load_recipe
from shardyard.launchers.log_markers import parse
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.node.bench import _BenchOutput, bench_node
from shardyard.rundir.layout import RunDir
from shardyard.rundir.network import NetworkBench, answer_line, read_network
from tests.e2e.shardyard import make_place

Captured = pytest.CaptureFixture[str]
NONCE = "abc"
PLACE = NodeAssignment(node_rank=0, nodes=2, host="10.0.0.1", port=29400, session="s")
ROW = {
    "collective": "all_reduce", "size_bytes": 1024, "count": 256, "out_s": 1e-4, "out_wrong": 0,
    "in_s": 1e-4, "in_wrong": 0,
}  # fmt: skip


def asked(*, is_pairs: bool = False) -> NetworkBench:
    return NetworkBench(
        collectives=("all_reduce",), begin_bytes=1024, end_bytes=1024, warmup=0, iterations=10,
        is_pairs=is_pairs, processes=1,
    )  # fmt: skip


def told(run: RunDir, *lines: str, is_pairs: bool = False, code: int = 0) -> int:
    found = _BenchOutput(asked(is_pairs=is_pairs), run, PLACE, NONCE)
    for line in lines:
        found.take(line)
    return found.end(code)


def ranks(kind: str) -> str:
    every = [{"node": f"n{k}", "pid": 10 + k, "device": 0, "kind": kind} for k in range(2)]
    return answer_line("ranks", ranks=every)


def table(sent: list[dict[str, int]], **row: Any) -> list[str]:
    return [
        answer_line("begins", collective="all_reduce"),
        answer_line("row", **ROW | row),
        answer_line("traffic", collective="all_reduce", sent=sent, calls={1024: 22}),
    ]


def marked(text: str) -> list[dict[str, Any]]:
    found = [parse(line, nonce=NONCE) for line in text.splitlines()]
    return [each.content for each in found if each is not None and each.kind == "answer"]


@pytest.mark.usefixtures("talk_on_stderr")
def test_efa_is_proven_by_its_own_counters_beside_what_the_log_says(
    tmp_path: Path, capsys: Captured
) -> None:
    run, log = RunDir(tmp_path / "run"), "NCCL INFO NET/OFI Selected Provider is efa (found 4 nics)"
    sent = [{"efa/a": 30_000, "efa/b": 10_000, "eth0": 900}, {"efa/a": 40_000}]
    assert told(run, ranks("A100"), log, *table(sent)) == 0
    out = capsys.readouterr().out
    assert "# efa carried 78.1 KiB of 44.0 KiB that nodes must send" in out
    assert "# network between nodes: EFA (4 interfaces), as NCCL says" in out
    network = read_network(run)
    assert network is not None and network.words == "EFA (4 interfaces)"
    kinds = [each["bench"] for each in marked(out)]
    assert kinds == ["ranks", "row", "traffic", "network", "done"]


def test_gloos_sockets_are_named_by_the_interface_that_sent_most(
    tmp_path: Path, capsys: Captured
) -> None:
    run = RunDir(tmp_path / "run")
    assert told(run, ranks("CPU"), *table([{"lo": 9999, "eth0": 40, "eth1": 20_000}, {}])) == 0
    network = read_network(run)
    assert network is not None
    assert (network.transport, network.interfaces, network.said_by) == ("sockets", "eth1", "gloo")
    assert "# Avg bus bandwidth    : 0.01024 " in capsys.readouterr().out


@pytest.mark.usefixtures("talk_on_stderr")
def test_pairs_on_one_node_alone_are_refused(tmp_path: Path, capsys: Captured) -> None:
    recipe = load_recipe([], ["model.preset=llama-tiny", "cluster.nodes=4"])
    alone = replace(PLACE, nodes=1)
    assert bench_node(asked(is_pairs=True), recipe, RunDir(tmp_path / "run"), alone, NONCE) == 2
    captured = capsys.readouterr()
    (failed,) = marked(captured.out)
    assert failed["bench"] == "failed" and failed["exit_code"] == 2
    assert "the job came up on one node, although cluster.nodes=4" in failed["error"]
    assert "give the launcher all its nodes" in captured.err


@pytest.mark.usefixtures("talk_on_stderr")
def test_ranks_that_end_without_a_word_are_told_as_that(tmp_path: Path, capsys: Captured) -> None:
    assert told(RunDir(tmp_path / "run"), ranks("CPU"), "out of luck", code=1) == 1
    captured = capsys.readouterr()
    assert marked(captured.out)[-1]["bench"] == "failed"
    assert "out of luck" in captured.err and "lower --end" in captured.err


@pytest.mark.system
def test_two_nodes_on_this_machine_measure_all_collectives_and_leave_nothing(
    tmp_path: Path,
) -> None:
    recipe = ["model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=1"]
    sizes = ["--end", "64K", "--iters", "2", "--warmup", "1"]
    words = ["bench", "network", *recipe, "cluster.nodes=2", "run.id=b", "--on", "local", "--yes"]
    with make_place(tmp_path) as place:
        answer = place.run(*words, *sizes)
        assert answer.code == 0, answer.err
        table_file = tmp_path / "table.txt"
        table_file.write_text(answer.out)
        assert answer.out.count("# Avg bus bandwidth") == 4
        assert answer.out.count("# Out of bounds values : 0 OK") == 4
        assert "# network between nodes: TCP sockets (lo), as gloo says" in answer.out
        seen = json.loads(place.run("status", "b", "--json").out)
        assert (seen["state"], seen["network"]["interfaces"]) == ("succeeded", "lo")
        place.assert_nothing_left()
