"""What a resume may change is listed; whatever is on no list is held."""

from dataclasses import replace
from typing import Any

import pytest

from shardyard.config.fingerprint import (
    SECTIONS_THAT_MAY_CHANGE,
    SETTINGS_THAT_MAY_CHANGE,
    compare,
    may_change,
)
from shardyard.config.resolved import DatasetMetadata, Resolved, fingerprint
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import settings
from shardyard.families.presets import PRESETS

ALL = list(settings())

# Held on the day the list was turned round. A new setting belongs here unless it cannot change
# what is learnt; then it goes on the list of those that may change.
HELD = {
    "run.seed", "model.preset", "model.path", "model.hub", "model.module", "model.weights",
    "model.dropout", "model.router_aux_loss", "model.router_z_loss", "task.name", "data.seq_len",
    "data.attend_across_documents", "optim.name", "optim.lr", "optim.betas", "optim.eps",
    "optim.weight_decay", "optim.momentum", "optim.grad_clip", "optim.schedule",
    "optim.warmup_steps", "optim.decay_steps", "optim.min_lr_ratio", "optim.global_batch",
}  # fmt: skip


def resolved(**sections: Any) -> Resolved:
    return Resolved(
        recipe=Recipe.model_validate(sections),
        reasons={},
        shape=PRESETS["llama-tiny"].shape,
        data=DatasetMetadata(
            dir="d", fingerprint="f", vocab_size=9, train_tokens=9, eval_tokens=9,
            train_documents=1, eval_documents=1, unigram_entropy=1.0,
        ),
        steps=1,
    )  # fmt: skip


def test_every_setting_is_held_or_listed_as_one_that_may_change() -> None:
    held = fingerprint(resolved()).keys() - {"model.shape", "data"}
    assert held == {name for name in ALL if not may_change(name)}
    assert held >= HELD
    assert not [name for name in HELD if may_change(name)]


def test_what_may_change_exists() -> None:
    assert set(SETTINGS_THAT_MAY_CHANGE) <= set(ALL)
    assert set(SECTIONS_THAT_MAY_CHANGE) <= set(Recipe.model_fields)
    twice = [name for name in SETTINGS_THAT_MAY_CHANGE if name.split(".")[0] in (
        SECTIONS_THAT_MAY_CHANGE
    )]  # fmt: skip
    assert twice == []


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "router_aux_loss", 0.5),
        ("model", "router_z_loss", 0.5),
        ("task", "name", "masked_lm"),
        ("optim", "lr", 0.5),
    ],
)
def test_a_changed_objective_is_named_old_and_new(section: str, key: str, value: Any) -> None:
    before, now = resolved(), resolved(**{section: {key: value}})
    (changed,) = compare(fingerprint(before), fingerprint(now)).changed
    was = fingerprint(before)[f"{section}.{key}"]
    assert changed == f"{section}.{key}: {was!r} -> {value!r}"


def test_what_only_one_side_knows_is_told_and_not_refused() -> None:
    now = fingerprint(resolved())
    before = {name: value for name, value in now.items() if name != "optim.eps"}
    before["optim.gone"] = 1
    before["model.shape"] = {**now["model.shape"]}
    del before["model.shape"]["rope_scaling"]
    compared = compare(before, now)
    assert compared.changed == ()
    assert compared.not_compared == ("model.shape.rope_scaling", "optim.eps", "optim.gone")


def test_a_size_of_the_model_that_changed_is_named() -> None:
    now = resolved()
    wider = replace(now, shape=replace(require_shape(now.shape), hidden_size=128))
    assert compare(fingerprint(now), fingerprint(wider)).changed == (
        "model.shape.hidden_size: 64 -> 128",
    )


OF_FORMAT_1 = "c8f65e1c8c74fe8e"
"""What commit ab19be9 made of the run below: the digest in its checkpoints."""


def test_the_digest_of_a_checkpoint_of_before_is_compared_as_far_as_it_goes() -> None:
    # as it was resolved then, where a default is another today
    run = resolved(model={"dropout": 0.0}, optim={"weight_decay": 0.1})
    compared = compare(OF_FORMAT_1, fingerprint(run))
    assert compared.changed == ()
    assert {"model.router_aux_loss", "model.router_z_loss", "task.name"} <= set(
        compared.not_compared
    )
    (changed,) = compare(OF_FORMAT_1, fingerprint(resolved(optim={"lr": 0.5}))).changed
    assert changed.startswith("at least one of run.seed, model.preset")


def test_a_run_whose_decay_was_a_part_of_its_momentum_is_not_gone_on_with_decoupled() -> None:
    optim = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    now = fingerprint(resolved(optim=optim))
    before = {name: value for name, value in now.items() if name != "optim.decay"}
    assert compare(before, now).changed == ("optim.decay: 'coupled' -> 'decoupled'",)
    assert compare(now, now) == compare(before, before)
    assert "optim.decay: 'coupled' -> 'decoupled'" in compare(OF_FORMAT_1, now).changed
    # without momentum both are the same step, and so are they without decay
    for same in ({"momentum": 0.0}, {"weight_decay": 0.0}):
        assert "optim.decay" not in fingerprint(resolved(optim={**optim, **same}))
