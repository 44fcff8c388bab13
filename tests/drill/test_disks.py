"""File systems of a case's own, in a mount namespace of the test's own."""

import subprocess
import sys
from pathlib import Path

import pytest

_BODY = """
import errno, sys
from pathlib import Path
from shardyard.drill.sandbox import fill, restore_size, mount_own

folder = Path(sys.argv[1])
mount_own(folder)
(folder / "before").write_bytes(bytes(4096))
fill(folder)
try:
    (folder / "more").write_bytes(bytes(4096))
except OSError as error:
    assert error.errno == errno.ENOSPC
else:
    raise SystemExit("there is room")
assert (folder / "before").stat().st_size == 4096
restore_size(folder)
(folder / "more").write_bytes(bytes(4096))
print(f"{folder.stat().st_mode & 0o7777:o}")
"""


@pytest.mark.heavy
@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_disk_is_full_for_a_while_and_others_may_write_there_no_more_than_before(
    tmp_path: Path, mode: int
) -> None:
    """`launch` and `resume` refuse a run folder into which everybody may write."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("a mount of a test's own needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    folder.chmod(mode)
    program = ["unshare", "-m", sys.executable, "-c", _BODY, str(folder)]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == (f"{mode:o}\n", "")
