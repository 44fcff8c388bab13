"""Buffers are named once, and ranks that hold different ones are found by name."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shardyard.checkpoint.buffers import buffers_of, check_buffers_equal, digests
from shardyard.errors import CheckpointError
from shardyard.families.presets import PRESETS
from shardyard.models.build import build_on_meta


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.endswith("-tiny")])
def test_models_of_recipes_make_all_their_buffers_themselves(preset: str) -> None:
    """What a load would have to bring back, ``give_storage`` leaves as garbage."""
    model = build_on_meta(replace(PRESETS[preset].shape, vocab_size=300))
    assert next(model.buffers(), None) is not None or preset == "gpt2-tiny"  # learnt positions
    assert buffers_of(model) == {}


def test_buffers_are_named_once_and_only_those_that_a_state_dict_has() -> None:
    norm = nn.BatchNorm1d(2)
    model = nn.ModuleDict({"a": norm, "again": norm, "without": nn.BatchNorm1d(2, affine=False)})
    model.register_buffer("own", torch.zeros(1))
    model.register_buffer("none", None)
    model.register_buffer("derived", torch.zeros(1), persistent=False)
    names = {f"buffer.{name}" for name in model.state_dict()} - {
        f"buffer.{name}" for name, _ in model.named_parameters(remove_duplicate=False)
    }
    found = buffers_of(model)
    assert found.keys() == {name for name in names if ".again." not in name}
    assert found["buffer.a.num_batches_tracked"] is norm.num_batches_tracked


def test_the_same_bytes_in_another_form_are_another_buffer() -> None:
    same = {"x": torch.zeros(4)}
    assert digests(same) == digests({"x": torch.zeros(8)[::2]})
    for other in (torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor(0)):
        assert digests(same) != digests({"x": other})


def test_stages_that_hold_other_buffers_agree_and_the_ranks_of_a_difference_are_named() -> None:
    check_buffers_equal([{"buffer.a": "1"}, {"buffer.b": "2"}, {"buffer.a": "1"}, {}])
    with pytest.raises(CheckpointError, match=r"buffer b of rank 1 is not that of rank 3"):
        check_buffers_equal([{"buffer.a": "1"}, {"buffer.b": "2"}, {}, {"buffer.b": "3"}])
