"""What the trial of torch's versions tells pip, and what it reads from pytest."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.torch_versions import ROOT, constraints_for, read_outcomes

TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "no\\nmore"
def test_skipped(): pytest.skip("no accelerator")
@pytest.fixture
def broken(): raise OSError("gone")
def test_without_its_fixture(broken): pass
"""


def test_all_packages_but_torch_stay_as_they_were() -> None:
    held = constraints_for("2.15.0", (ROOT / "constraints.txt").read_text()).splitlines()
    assert [line for line in held if line.startswith("torch==")] == ["torch==2.15.0"]
    assert "torchao==0.18.0" in held and any(line.startswith("numpy==") for line in held)


@pytest.mark.heavy
def test_each_test_that_failed_is_named_with_why(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=told.xml"]
    subprocess.run([*command, "test_some.py"], cwd=tmp_path, check=False, capture_output=True)
    passed, failed, skipped = read_outcomes((tmp_path / "told.xml").read_text())
    assert (passed, skipped) == (1, {"no accelerator": 1})
    assert set(failed) == {"test_some::test_wrong", "test_some::test_without_its_fixture"}
    assert failed["test_some::test_wrong"].startswith("AssertionError: no")
    assert "OSError: gone" in failed["test_some::test_without_its_fixture"]
