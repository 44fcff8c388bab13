"""EFA that is silently missing is told, or ends the run where it is required.

The lines are those of NVIDIA/nccl#1597 and aws/aws-ofi-nccl#22.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.node.network_check import network_checked, network_in
from shardyard.rundir.layout import RunDir
from shardyard.rundir.resolved import write_resolved
from tests.config.test_resolve import resolved

EFA = "8h200-3:6310:6318 [0] NCCL INFO NET/OFI Selected Provider is efa (found 16 nics)"
SOCKETS = "ip-10-0-0-1:88:95 [0] NCCL INFO Using network Socket"

LINES = [
    (EFA, "efa"),
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
    return check.is_refused


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
    ("given", "level"),
    [({}, "INFO"), ({"NCCL_DEBUG": "WARN"}, "INFO"), ({"NCCL_DEBUG": "TRACE"}, "TRACE")],
)
def test_nccl_is_told_to_name_its_network_unless_it_says_more(
    given: dict[str, str], level: str, tmp_path: Path
) -> None:
    environ = dict(given)
    train(a_run(tmp_path), EFA, [], environ)
    assert environ["NCCL_DEBUG"] == level
