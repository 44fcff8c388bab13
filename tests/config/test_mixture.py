"""Shares of a mixture in whole numbers, and what a recipe of one may not say."""

import json
import random
from dataclasses import asdict, replace
from typing import Any

import pytest

from shardyard.config.data_choices import SLOTS, slots_of
from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata, Resolved, SourceMetadata
from shardyard.config.rules.check import load_checked_recipe
from shardyard.control.attempt import mixture_lines, mixture_warnings
from shardyard.errors import RecipeError


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ([1.0], [1000]),
        ([1.0, 1.0, 1.0], [334, 333, 333]),
        ([0.7, 0.3], [700, 300]),
        ([2.0, 6.0], [250, 750]),
        ([1e-300, 1.0], [0, 1000]),
        ([5.0, 3.0, 0.0008 * 8], [624, 375, 1]),
    ],
)
def test_a_cycle_is_dealt_by_largest_remainder(weights: list[float], slots: list[int]) -> None:
    assert slots_of(weights) == slots


def test_no_share_is_a_whole_sample_off_and_none_is_lost() -> None:
    draw = random.Random(0)
    for _ in range(200):
        weights = [draw.random() ** 3 + 1e-9 for _ in range(draw.randint(1, 40))]
        slots = slots_of(weights)
        assert sum(slots) == SLOTS
        for weight, count in zip(weights, slots, strict=True):
            assert abs(count - weight / sum(weights) * SLOTS) < 1


def mixed(*shares: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {"model": {"preset": "llama-tiny"}, "data": {"mixture": list(shares), **settings}}


WEB = {"name": "web", "source": "/web", "weight": 0.9}
OWN = {"name": "own", "module": "json:loads", "weight": 0.1}
CODE = {"name": "code", "source": ["/code", "s3://b/code"], "weight": 0.1, "text_key": "content"}


def test_a_mixture_is_read_and_all_its_places_are_known() -> None:
    data = load_checked_recipe(mixed(WEB, CODE)).data
    assert [share.weight for share in data.mixture] == [0.9, 0.1]
    assert data.entries == (
        ("data.mixture[0].source", "/web"),
        ("data.mixture[1].source", "/code"),
        ("data.mixture[1].source", "s3://b/code"),
    )
    assert load_recipe(mixed(WEB)).data.mixture[0].text_key is None


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (mixed(WEB, CODE, source="/other"), "data.source both say where text comes from"),
        (mixed(WEB, WEB), "2 sources of the name 'web'"),
        (mixed(WEB, {**CODE, "weight": 1e-4}), "less than a sample in 1,000"),
        (mixed(WEB, {**CODE, "weight": 0.0}), "data.mixture"),
        (mixed(WEB, {**CODE, "format": "words"}), "words: unknown format"),
        (mixed(WEB, {**OWN, "source": "/x"}), r"\[1\].source: and module=json:loads both say"),
        (
            mixed(WEB, {**OWN, "eval_source": "/x"}),
            r"\[1\].eval_source: and module=json:loads bo",
        ),
        (
            mixed(WEB, {"name": "own", "weight": 1.0}),
            r"mixture\[1\]: has neither source nor mo",
        ),
        (mixed(WEB, {**CODE, "module_settings": {"a": 1}}), "is for module, and this source has n"),
        (mixed(WEB, {**OWN, "module_settings": {"split": 1}}), "has split, which the function ge"),
        (mixed(WEB, {**OWN, "format": "token_ids"}), "names files, and module=json:loads makes"),
        (mixed(WEB, {**OWN, "module": "nowhere:f"}), r"\[1\].module=nowhere:f: module nowhere is"),
        (mixed(WEB, {**CODE, "name": "a b"}), "data.mixture"),
        (mixed(WEB, {"name": "code", "source": "/code"}), "data.mixture"),
        (mixed({**WEB, "source": "s4://bucket/x"}), "is a URL that is not read"),
        (mixed({**WEB, "eval_source": "s4://bucket/x"}), "is a URL that is not read"),
        (mixed(WEB, CODE, eval_source="/v"), "Give eval_source in the entry of data.mixture"),
        ({"data": {"eval_source": "/v", "eval_fraction": 0.1}}, "=0.1, and data.eval_source both"),
        ({"data": {"source": "/v", "eval_source": "/v"}}, "and data.source are the same"),
    ],
)
def test_what_cannot_be_mixed_is_refused(recipe: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_checked_recipe(recipe)


def resolved(*, steps: int) -> Any:
    """Of two sources of 400 and 40 samples, with 8 samples a step."""
    facts = [facts_of(6401), facts_of(641)]
    parts = [
        SourceMetadata(name=name, slots=slots, data=each)
        for (name, slots), each in zip((("web", 900), ("code", 100)), facts, strict=True)
    ]
    data = replace(facts_of(7042), parts=tuple(parts))
    recipe = load_recipe(
        mixed(WEB, CODE, seq_len=16), ["optim.global_batch=8", "optim.micro_batch=8"]
    )
    return Resolved(recipe=recipe, reasons={}, shape=None, data=data, steps=steps)


def facts_of(tokens: int) -> DatasetMetadata:
    return DatasetMetadata(
        dir="/x", fingerprint="f", vocab_size=300, train_tokens=tokens, eval_tokens=50,
        train_documents=9, eval_documents=1, unigram_entropy=4.0,
    )  # fmt: skip


def test_what_each_source_is_read_is_told_and_facts_survive_json() -> None:
    of_run = resolved(steps=100)
    assert mixture_lines(of_run) == [
        "source web: 90.0% of the samples, 6,401 tokens, read 1.80 times",
        "source code: 10.0% of the samples, 641 tokens, read 2.00 times",
    ]
    assert mixture_warnings(of_run) == []
    assert of_run.data.num_samples("train", 16) == 440
    assert DatasetMetadata(**json.loads(json.dumps(asdict(of_run.data)))) == of_run.data


def test_a_source_that_is_read_over_and_over_is_warned_of() -> None:
    (warning,) = mixture_warnings(resolved(steps=210))
    assert "source code of data.mixture is read 4.2 times" in warning
    assert "lower its weight" in warning
