"""What is known of this machine and refused before any process of a training starts."""

from dataclasses import replace

import pytest

from shardyard.cli.attempt import refuse_without_fp8
from shardyard.config.schema import Precision, Recipe
from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine

A100 = Machine(
    device="cuda", name="NVIDIA A100", count=8, memory_bytes=2**36, cores=96, hostname="a"
)


def test_fp8_is_refused_on_devices_without_it() -> None:
    recipe = Recipe(precision=Precision(compute="fp8"))
    with pytest.raises(RequestError, match=r"fp8 but NVIDIA A100 does not .*compute=bf16 here"):
        refuse_without_fp8(recipe, A100)
    refuse_without_fp8(recipe, replace(A100, name="NVIDIA H100", has_fp8=True))
    refuse_without_fp8(Recipe(), A100)
