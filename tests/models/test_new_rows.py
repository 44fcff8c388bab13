"""Rows for added tokens are those of transformers' resize_token_embeddings, in every family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from shardyard.families.registry import FAMILIES
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta, fill_weights, materialize
from shardyard.models.local_shard import LocalShard
from shardyard.models.new_rows import split_new_rows
from tests.families.random_models import cases, theirs

NEW = 3
SHAPES = [
    pytest.param(shape, id=f"{kind} {name}")
    for kind in FAMILIES
    for name, shape in cases(kind).items()
    if name == "plain" or "tied" in name or "own head" in name
]


def filled(shape: ModelShape, folder: Path, how: Any = "mean") -> dict[str, torch.Tensor]:
    model = build_on_meta(shape)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=folder, seed=0, new_embeddings=how)
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("shape", SHAPES)
def test_new_rows_are_the_mean_as_in_transformers(shape: ModelShape, tmp_path: Path) -> None:
    theirs(shape).save_pretrained(tmp_path / "small")
    kind = AutoModelForCausalLM if shape.is_causal else AutoModelForMaskedLM
    resized = kind.from_pretrained(tmp_path / "small")
    resized.resize_token_embeddings(shape.vocab_size + NEW, mean_resizing=True)
    resized.save_pretrained(tmp_path / "large")
    grown = replace(shape, vocab_size=shape.vocab_size + NEW)
    ours, expected = filled(grown, tmp_path / "small"), filled(grown, tmp_path / "large")
    assert ours.keys() == expected.keys()
    for name, param in ours.items():
        torch.testing.assert_close(param, expected[name], rtol=1e-5, atol=1e-5)
    table = ours[f"{shape.family.embedding.module}.weight"]
    assert torch.equal(table[-1], table[-2]) and not torch.equal(table[-1], table[0])


def test_random_rows_are_those_of_a_random_model(tmp_path: Path) -> None:
    shape = cases("llama")["plain"]
    theirs(shape).save_pretrained(tmp_path)
    grown = replace(shape, vocab_size=shape.vocab_size + NEW)
    model = build_on_meta(grown)
    materialize(model, torch.device("cpu"))
    fill_weights(model, folder=None, seed=0)
    table = "model.embed_tokens.weight"
    ours = filled(grown, tmp_path, "random")[table]
    assert torch.equal(ours[-NEW:], model.get_parameter(table)[-NEW:])
    assert torch.equal(ours[:-NEW], filled(shape, tmp_path)[table])


@pytest.mark.parametrize(("first", "size", "old"), [(0, 4, 4), (4, 4, 2), (8, 4, 0), (6, 0, 0)])
def test_a_ranks_part_is_split_where_the_files_end(first: int, size: int, old: int) -> None:
    whole = torch.arange(24.0).reshape(12, 2)
    shard = LocalShard(whole[first : first + size], (first, 0), (12, 2))
    before, after = split_new_rows(shard, 6)
    assert (before.tensor.shape[0], after.tensor.shape[0]) == (old, size - old)
    assert after.offsets == (first + old, 0) and before.whole_shape == (6, 2)
    assert torch.equal(whole[after.slices], after.tensor)
    assert torch.equal(whole[before.slices], before.tensor)
