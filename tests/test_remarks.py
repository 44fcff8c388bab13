"""Importing what uses transformers and torchao prints nothing."""

import subprocess
import sys

import pytest


@pytest.mark.heavy
@pytest.mark.parametrize("module", ["shardyard.checkpoint.export", "shardyard.library"])
def test_no_library_speaks_into_an_answer(module: str) -> None:
    command = [sys.executable, "-c", f"import {module}, transformers.models.llama.modeling_llama"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
