"""Recipes for labels: settings that have no effect on them, and labels in other recipes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from shardyard.config.model.source import shape_or_none
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.check import check
from shardyard.config.rules.labels import check_label_targets, is_tagged
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError, RequestError


def _recipe(**sections: dict[str, Any]) -> Recipe:
    given = {"model": {"preset": "bert-tiny"}, "task": {"name": "sequence_classification"}}
    names = {*given, *sections}
    return Recipe.model_validate(
        {name: {**given.get(name, {}), **sections.get(name, {})} for name in names}
    )


def test_either_kind_of_model_has_labels() -> None:
    check(_recipe(data={"keys": {"label": "stars"}, "too_long": "cut"}))
    check(_recipe(model={"preset": "llama-tiny"}, run={"target": {"matthews": 0.5}}))
    check(_recipe(model={"lora": {"rank": 4, "modules_to_save": ["pooler"]}}))
    check(_recipe(model={"preset": "llama-tiny", "frozen": ["model.layers"]}))


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"data": {"pack": "whole", "seq_len": 8}}, "data.pack=whole has no effect"),
        ({"data": {"keys": {"lable": "x"}}}, r"data.keys=\{label: x\}"),
        ({"data": {"labels": ["a", "a"]}}, "names a label twice"),
        ({"run": {"target": {"perplexity": 3}}}, "not a metric of sequence_classification"),
        (
            {"data": {"labels": ["a", "b"]}, "task": {"problem_type": "regression"}},
            "names classes",
        ),
        (
            {"task": {"name": "token_classification", "problem_type": "regression"}},
            "each token has a class",
        ),
        (
            {"task": {"name": "token_classification"}, "data": {"text_key": "body"}},
            "data.keys={tokens: COLUMN}",
        ),
        (
            {"task": {"name": "masked_lm"}, "data": {"labels": ["a", "b"]}},
            "Use task.name=sequence_classification or token_classification",
        ),
    ],
)
def test_what_labels_do_not_read_is_rejected(
    sections: dict[str, dict[str, Any]], says: str
) -> None:
    with pytest.raises(RecipeError, match=says):
        check(_recipe(**sections))


TAGS = ("O", "B-PER", "I-PER")
SAMPLES, WORDS = "sequence_classification", "token_classification"


@pytest.mark.parametrize(
    ("task", "names", "target", "says"),
    [
        (SAMPLES, ("no", "yes"), "pearson", "pearson, and the labels are classes. They have loss"),
        (SAMPLES, (), "f1", "f1, and the labels are numbers to predict. They have loss, mse"),
        (WORDS, ("NOUN", "VERB"), "f1", "no tags of entities such as B-PER"),
        (SAMPLES, ("no", "yes"), "f1", None),
        (SAMPLES, (), "spearman", None),
        (WORDS, TAGS, "f1", None),
    ],
)
def test_a_target_that_the_labels_have_no_metric_for_is_rejected(
    task: str, names: tuple[str, ...], target: str, says: str | None
) -> None:
    recipe = _recipe(task={"name": task}, run={"target": {target: 0.5}})
    data = DatasetMetadata(
        dir="", fingerprint="", vocab_size=300, train_tokens=0,
        eval_tokens=0, train_documents=0, eval_documents=0, unigram_entropy=0.0,
        num_labels=max(1, len(names)), label_names=names,
    )  # fmt: skip
    found = [str(each) for each in check_label_targets(recipe, data)]
    assert [says in each for each in found] == [True] if says else not found


def test_parts_of_speech_are_no_entities() -> None:
    assert is_tagged(TAGS)
    assert not is_tagged(["NOUN", "VERB"]) and not is_tagged(["B-PER", "I-PER"])


def test_another_dropout_of_the_head_is_rejected(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, attention_probs_dropout_prob=0.0, classifier_dropout=0.3,
    )  # fmt: skip
    content = {**config.to_dict(), "architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model: dict[str, Any] = {"preset": None, "path": str(tmp_path)}
    with pytest.raises(RequestError, match=r"classifier_dropout=0\.3, and the rest .* 0\.1\. "):
        shape_or_none(_recipe(model=model), tmp_path, 300)
    assert shape_or_none(_recipe(model={**model, "dropout": 0.3}), tmp_path, 300) is not None
    hidden_tokens = _recipe(model=model, task={"name": "masked_lm"})
    assert shape_or_none(hidden_tokens, tmp_path, 300) is not None
