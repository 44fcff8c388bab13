"""A stage has its own modules alone, under the names that they have in the whole model."""

from dataclasses import replace

from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of
from shardyard.models.build import build_on_meta, keep_blocks, stage_of
from shardyard.models.submodules import blocks_of, dropout_modules, part_of

SHAPE = replace(PRESETS["llama-tiny-deep"].shape, vocab_size=300)
LLAMA = family_of("llama")


def _names(is_first: bool, is_last: bool, numbers: list[int]) -> set[str]:
    model = build_on_meta(SHAPE)
    keep_blocks(model, LLAMA, numbers, is_first=is_first, is_last=is_last)
    return {name for name, _ in model.named_parameters()}


def test_the_stages_together_have_every_parameter_of_the_model_once() -> None:
    whole = {name for name, _ in build_on_meta(SHAPE).named_parameters()}
    parts = [_names(True, False, [0, 1]), _names(False, False, [2, 5]), _names(False, True, [7])]
    assert all(part <= whole for part in parts)
    assert sum(len(part) for part in parts) == len(set.union(*parts))
    assert {name for name in whole if name not in set.union(*parts)} == {
        name for name in whole if name.startswith(("model.layers.3", "model.layers.4",
                                                   "model.layers.6"))
    }  # fmt: skip
    assert "model.embed_tokens.weight" in parts[0]
    assert "lm_head.weight" in parts[2]


def test_dropout_comes_after_positions_where_no_norm_follows_them() -> None:
    shape = replace(PRESETS["gpt2-tiny"].shape, vocab_size=300)
    model = build_on_meta(shape)
    assert list(dropout_modules(model, shape.family)) == [
        "transformer.drop",
        *(f"transformer.h.{number}.{name}" for number in (0, 1) for name in ("attn", "mlp")),
    ]
    first = stage_of(model, shape.family, [0], is_first=True, is_last=False)
    last = stage_of(model, shape.family, [1], is_first=False, is_last=True)
    assert part_of(first, "transformer.drop") is part_of(model, "transformer.drop") is not None
    assert part_of(last, "transformer.drop") is None


def test_two_stages_of_a_rank_share_the_modules_of_its_model() -> None:
    model = build_on_meta(SHAPE)
    keep_blocks(model, LLAMA, [0, 7], is_first=True, is_last=True)
    first = stage_of(model, LLAMA, [0], is_first=True, is_last=False)
    last = stage_of(model, LLAMA, [7], is_first=False, is_last=True)
    assert list(blocks_of(first, LLAMA)) == ["model.layers.0"]
    assert list(blocks_of(last, LLAMA)) == ["model.layers.7"]
    assert blocks_of(last, LLAMA)["model.layers.7"] is blocks_of(model, LLAMA)["model.layers.7"]
    assert part_of(first, LLAMA.head) is None and part_of(last, LLAMA.embedding) is None
    assert part_of(first, LLAMA.rotary) is part_of(last, LLAMA.rotary) is not None
    names = {name for stage in (first, last) for name, _ in stage.named_parameters()}
    assert names == {name for name, _ in model.named_parameters()}
    assert list(dropout_modules(last, LLAMA)) == [
        "model.layers.7.self_attn", "model.layers.7.mlp",
    ]  # fmt: skip
