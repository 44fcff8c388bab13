"""The lease goes from a command to its agent without a gap, and never to a copy of the run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardyard.errors import RequestError
from shardyard.rundir.lease import Lease, is_locked


@pytest.mark.heavy
def test_a_lease_is_handed_over_without_a_moment_in_which_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    lease = Lease(path)
    program = (
        "import sys; from shardyard.rundir.lease import Lease; "
        "lease = Lease.handed_over([int(sys.argv[1])]); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, lease.descriptors)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=lease.descriptors,
    ) as child:  # fmt: skip
        lease.close()
        assert is_locked(path)
        assert child.stdout is not None and child.stdout.readline() == b"\n"
        with pytest.raises(RequestError, match=rf"trained already \(process {child.pid} on"):
            Lease(path)
        child.communicate()
    Lease(path).close()


def test_a_copy_by_hard_links_has_a_lease_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    original, copy = tmp_path / "lease.json", tmp_path / "copy" / "lease.json"
    Lease(original).close()
    os.link(original, copy)
    ours = Lease(copy)
    theirs = Lease(original)
    assert not original.samefile(copy) and is_locked(original) and is_locked(copy)
    ours.close()
    theirs.close()


def test_a_lease_that_is_held_under_another_name_says_how_to_copy_runs(tmp_path: Path) -> None:
    held = Lease(tmp_path / "lease.json")
    (tmp_path / "copy").mkdir()
    os.link(tmp_path / "lease.json", tmp_path / "copy" / "lease.json")
    with pytest.raises(RequestError, match=r"`cp -al`.*Copy runs with `cp -r`"):
        Lease(tmp_path / "copy" / "lease.json")
    held.close()
