"""Going back to an earlier checkpoint."""

from pathlib import Path

import pytest

from shardyard.config.resolved import BackTo
from shardyard.control.go_back import go_back
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
    assert go_back(run, BackTo(step=2)) == [4, 6]
    lease.close()
    assert run.latest.read_text() == "step-00000002\n"
    names = sorted(entry.name for entry in run.checkpoints.iterdir())
    assert [name for name in names if name.startswith("step")] == [
        "step-00000002", "step-00000004.replaced", "step-00000006.replaced",
    ]  # fmt: skip
