"""Going back to an earlier checkpoint."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from shardyard.config.resolved import Resolved, RollbackTarget
from shardyard.control.resume import go_back
from shardyard.errors import RequestError
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.node.main import _LeadNode
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease


def test_the_process_that_holds_the_lease_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    for step in (2, 4, 6):
        run.checkpoint(step).mkdir(parents=True)
    monkeypatch.setattr(RunDir, "checkpoint_steps", lambda _: [2, 4, 6])
    lease = Lease(run.lease)
    assert go_back(run, RollbackTarget(step=2)) == [4, 6]
    lease.close()
    assert run.latest.read_text() == "step-00000002\n"
    names = sorted(entry.name for entry in run.checkpoints.iterdir())
    assert [name for name in names if name.startswith("step")] == [
        "step-00000002", "step-00000004.replaced", "step-00000006.replaced",
    ]  # fmt: skip


def test_a_launched_job_goes_back_once_though_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    monkeypatch.setattr(RunDir, "checkpoint_steps", lambda _: [2, 4])
    asked = RollbackTarget(step=2, submission=3, is_requested=True)
    place = NodeAssignment(node_rank=0, nodes=1, host="", port=1, session="s")
    lead = _LeadNode(tmp_path / "r.yaml", run, place, None, asked)
    before, done = (
        cast(Resolved, SimpleNamespace(back_to=RollbackTarget(step=2, submission=number)))
        for number in (2, 3)
    )
    assert lead._step_back(before) == asked
    assert lead._step_back(done) is None
    missing = _LeadNode(tmp_path / "r.yaml", run, place, None, replace(asked, step=3))
    with pytest.raises(RequestError, match=r"--step 3: .*steps 2, 4"):
        missing._step_back(before)
