"""The benchmarks of memory run, at the smallest sizes, and record what they say."""

import json
from pathlib import Path

import pytest

from benchmarks import host_offload, loss_chunks

pytestmark = pytest.mark.heavy


def test_host_offload_measures_every_optimizer(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--width", "16", "--matrices", "2", "--pairs", "2"]
    assert host_offload.main([*sizes, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["optimizers"]
    assert {name: each["bytes_each_way"] for name, each in found.items()} == {
        "adamw": 4096, "sgd": 2048, "lamb": 4096,
    }  # fmt: skip
    assert all(len(each["update_s"]["offloaded"]) == 2 for each in found.values())
    assert len(json.loads(out.read_text())["weights"]["step_s"]["offloaded"]) == 2


def test_loss_chunks_compares_and_counts(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    sizes = ["--tokens", "512", "--vocabulary", "1000", "--width", "16", "--chunk", "64"]
    assert loss_chunks.main([*sizes, "--pairs", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert max(found["relative_difference"].values()) < 1e-5
    # all logits and their probabilities, 8 bytes each, against an eighth of them
    assert found["peak_bytes"]["whole"] > 8 * 512 * 1000
    assert found["peak_bytes"]["chunks"] < 3 * 8 * 64 * 1000
