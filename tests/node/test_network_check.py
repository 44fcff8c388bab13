"""The network that a run really used is an event; EFA that is missing is told, or ends the run.

The lines are those of NVIDIA/nccl#1597 and aws/aws-ofi-nccl#22.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.node.network_check import (
    _Sockets,
    interfaces_in,
    network_checked,
    network_in,
)
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from shardyard.rundir.network import read_network
from tests.config.test_resolve import resolved

EFA = "8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)"
SOCKETS = "ip-10-0-0-1:88:95 [0] NCCL INFO Using network Socket"

LINES = [
    (EFA, "efa"),
    ("x [0] NCCL INFO Using network IB", "infiniband"),
    ("x [0] NCCL INFO NET/OFI selected provider is EFA, fabric is efa (found 4 nics)", "efa"),
    ("x [0] NCCL INFO NET/OFI Selected Provider is tcp;ofi_rxm (found 1 nics)", "sockets"),
    (SOCKETS, "sockets"),
    ("8h200-2:6831:6840 [0] NCCL INFO Using network Libfabric", None),
    ("8h200-2:6831:6840 [0] NCCL INFO NET/OFI NIC group 7 device #0 0000:a3:00.0", None),
    ("step 10 loss 2.0", None),
]

pytestmark = pytest.mark.usefixtures("talk_on_stderr")


@pytest.mark.parametrize(("line", "network"), LINES)
def test_a_line_names_the_network_or_none(line: str, network: str | None) -> None:
    assert network_in(line) == network


def a_run(folder: Path, *overrides: str) -> RunDir:
    """Attempt 0 of a run on two p5.48xlarge."""
    given = ("cluster.instance=p5.48xlarge", "cluster.nodes=2", "cluster.device=auto", *overrides)
    recipe = load_recipe([], ["model.preset=llama-tiny", *given])
    run_dir = RunDir(folder / "run")
    write_resolved(run_dir.resolved(0), replace(resolved(), recipe=recipe))
    return run_dir


def train(run_dir: RunDir, line: str, stopped: list[bool], environ: dict[str, str]) -> bool:
    """Run a block that writes one line of rank 0; whether the run was refused."""
    stop = partial(stopped.append, True)
    with network_checked(run_dir, 0, node_rank=0, environ=environ, stop=stop) as check:
        log = run_dir.log(0, 0)
        log.parent.mkdir(parents=True)
        log.write_text(f"hello\n{line}\nstep 1\n")
    return check.is_rejected


@pytest.mark.parametrize(
    ("line", "overrides", "is_refused", "words"),
    [
        (EFA, (), False, ""),
        (SOCKETS, (), False, "warning: NCCL uses TCP sockets between nodes, although p5.48xlarge"),
        (SOCKETS, ("launch.require_efa=true",), True, "error: NCCL uses TCP sockets"),
        (EFA, ("launch.require_efa=true",), False, ""),
        (SOCKETS, ("cluster.nodes=1",), False, ""),
        (SOCKETS, ("cluster.instance=g5.2xlarge",), False, ""),
    ],
)
def test_sockets_where_efa_is_are_told_or_end_the_run(
    line: str,
    overrides: tuple[str, ...],
    is_refused: bool,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped: list[bool] = []
    assert train(a_run(tmp_path, *overrides), line, stopped, {}) == is_refused
    assert bool(stopped) == is_refused
    err = capsys.readouterr().err
    assert err.startswith(words) if words else err == ""
    assert not words or ("32 EFA interfaces" in err and "aws-ofi-nccl" in err)


@pytest.mark.parametrize(
    ("line", "overrides", "event"),
    [
        (EFA, (), ("efa", "NCCL")),
        (SOCKETS, (), ("sockets", "NCCL")),
        (SOCKETS, ("cluster.instance=g5.2xlarge",), ("sockets", "NCCL")),
        ("x [0] NCCL INFO Using network IB", ("cluster.instance=null",), ("infiniband", "NCCL")),
        ("", ("cluster.instance=null", "cluster.device=cpu"), ("sockets", "gloo")),
        (EFA, ("cluster.nodes=1",), None),
        ("step 2", (), None),
    ],
)
def test_every_run_of_several_nodes_writes_an_event_with_the_transport_really_used(
    line: str, overrides: tuple[str, ...], event: tuple[str, str] | None, tmp_path: Path
) -> None:
    run_dir = a_run(tmp_path, *overrides)
    train(run_dir, line, [], {})
    found = read_network(run_dir)
    assert (None if found is None else (found.transport, found.said_by)) == event
    assert found is None or line != EFA or found.words == "EFA (16 interfaces)"
    assert len(list(read_lines(run_dir.events))) == (event is not None)


@pytest.mark.parametrize(
    ("line", "interfaces"),
    [
        (EFA, "16 interfaces"),
        (
            "x [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>",
            "eth0, eth1",
        ),
        ("NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>", "mlx5_0"),
        (SOCKETS, ""),
    ],
)
def test_a_line_names_or_counts_interfaces(line: str, interfaces: str) -> None:
    assert interfaces_in(line) == interfaces


def test_interfaces_that_a_line_before_named_are_those_of_the_network(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, "cluster.instance=null")
    train(run_dir, f"x NCCL INFO NET/Socket : Using [0]ens5:10.0.0.1<0>\n{SOCKETS}", [], {})
    found = read_network(run_dir)
    assert found is not None and found.words == "TCP sockets (ens5)"


def test_gloo_is_told_once_a_step_of_this_attempt_was_made(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, "cluster.instance=null", "cluster.device=cpu")
    run_dir.metrics.write_text('{"step": 1}\n')  # of an attempt before
    sockets = _Sockets(run_dir, 1, is_one_machine=False)
    assert not sockets.poll() and read_network(run_dir) is None
    with run_dir.metrics.open("a") as file:
        file.write('{"step": 2}\n')
    assert sockets.poll() and sockets.poll()
    found = read_network(run_dir)
    assert found is not None and found.attempt == 1
    assert len(list(read_lines(run_dir.events))) == 1


def test_a_folder_that_went_with_its_run_is_not_made_again(tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    _Sockets(gone, 0, is_one_machine=True).report()
    assert not gone.path.exists()


def test_the_network_is_left_to_node_0(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, "cluster.instance=null", "cluster.device=cpu")
    with network_checked(run_dir, 0, node_rank=1, environ={}):
        pass
    assert read_network(run_dir) is None


@pytest.mark.parametrize(
    ("given", "level"),
    [({}, "INFO"), ({"NCCL_DEBUG": "WARN"}, "INFO"), ({"NCCL_DEBUG": "TRACE"}, "TRACE")],
)
def test_nccl_is_told_to_name_its_network_unless_it_says_more(
    given: dict[str, str], level: str, tmp_path: Path
) -> None:
    environ = dict(given)
    train(a_run(tmp_path), EFA, [], environ)
    assert environ["NCCL_DEBUG"] == level
