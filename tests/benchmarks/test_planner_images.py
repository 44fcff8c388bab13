"""Published training on images: what is met after one number a device, and what is missed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import planner_images as images


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("result") / "planner-images.json"
    assert images.main(["--out", str(out)]) == 0
    content: dict[str, Any] = json.loads(Path(out).read_text())
    return content


@pytest.mark.heavy
def test_resnets_are_met_after_one_number_a_device(result: dict[str, Any]) -> None:
    rows = [row for row in result["nvidia"] if row["model"] == "resnet50"] + result["ffcv"]
    assert len(rows) == 8 + 12
    assert [row for row in rows if abs(row["error"]) > images.BAR] == []
    assert set(result["slower_than_predicted"]) == {
        "A100 80GB (NVIDIA)", "V100 16GB (NVIDIA)", "A100 40GB (FFCV)",
    }  # fmt: skip


@pytest.mark.heavy
def test_eight_devices_in_16_bit_wait_for_decoding(result: dict[str, Any]) -> None:
    bound = [row for row in result["nvidia"] if row["bound_by"] == "decoding"]
    assert [(row["accelerator"], row["devices"], row["number_format"]) for row in bound] == [
        ("A100 80GB", 8, "fp16"), ("V100 16GB", 8, "fp16"),
    ]  # fmt: skip
    assert all(row["error_without_decoding"] > images.BAR for row in bound)


@pytest.mark.heavy
def test_misses_stay_in_the_table(result: dict[str, Any]) -> None:
    missed = [row for row in result["nvidia"] if abs(row["error"]) > images.BAR]
    assert {(row["model"][:12], row["number_format"]) for row in missed} == {
        ("efficientnet", "fp16")
    }
    assert abs(result["composer"]["error"]) > images.BAR
    assert "its README names none" in result["composer"]["assumed"]


def test_resolutions_are_those_of_the_script() -> None:
    # as train_imagenet.py rounds: half way is 5.5 x 32, and NumPy takes the even 6
    assert [images.resolution(epoch, (11, 13)) for epoch in (0, 11, 12, 13, 15)] == [
        160, 160, 192, 192, 192,
    ]  # fmt: skip
