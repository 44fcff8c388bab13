"""What parallelize() refuses before any rank talks to another."""

from typing import Any

import pytest
import torch
from torch import nn

import shardyard
from shardyard.errors import RequestError


class Scaled(nn.Module):
    """A module with a learned temperature, as CLIP has one."""

    def __init__(self, *, is_scalar: bool) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0) if is_scalar else torch.ones(1))
        self.register_buffer("seen", torch.tensor(0))  # buffers are held whole


def test_a_parameter_without_a_dimension_is_refused_by_its_name() -> None:
    no_mesh: Any = None
    with pytest.raises(RequestError) as refused:
        shardyard.parallelize(Scaled(is_scalar=True), no_mesh, blocks="up")
    said = str(refused.value)
    assert said.startswith("the parameter temperature of this Scaled is a single number")
    assert "Give it one, with its value: nn.Parameter(torch.tensor([1.0]))" in said
    with pytest.raises(AttributeError):  # goes on to ask the mesh
        shardyard.parallelize(Scaled(is_scalar=False), no_mesh, blocks="up")
