"""Outputs of a network and classes of the data, by the names in config.json."""

from typing import Any

import pytest

from shardyard.families.images.class_names import class_names_in, head_order


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"id2label": {"0": "b", "1": "a"}}, ["b", "a"]),
        ({"id2label": {str(n): f"c{n}" for n in range(12)}}, [f"c{n}" for n in range(12)]),
        ({"label2id": {"a": 1, "b": 0}}, ["b", "a"]),
        ({"id2label": {"0": "LABEL_0", "1": "LABEL_1"}}, None),
        ({"id2label": {"0": "a", "2": "b"}}, None),
        ({"id2label": ["a", "b"]}, None),
        ({}, None),
    ],
)
def test_the_names_of_outputs_are_read(config: dict[str, Any], names: list[str] | None) -> None:
    assert class_names_in(config) == names


def test_rows_follow_names() -> None:
    order = head_order(["a", "b", "c"], ["c", "a", "b"], outputs=3)
    assert order.rows == (1, 2, 0) and "id2label" in order.note
    assert head_order(["a", "b"], ["a", "b"], outputs=2).note == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "outputs", "said"),
    [
        (["a", "b"], ["x", "y"], 2, "its classes have other names in id2label (x, y) than"),
        (["a", "b"], ["a", "b", "c"], 3, "it has 3 outputs, the data 2 classes"),
        (["a", "b"], ["a", "a"], 2, "other names"),
        (["a", "b", "c"], None, 2, "it has 2 outputs"),
    ],
)
def test_other_classes_get_a_new_head_and_it_is_said(
    ours: list[str], theirs: list[str] | None, outputs: int, said: str
) -> None:
    order = head_order(ours, theirs, outputs=outputs)
    assert order.rows is None
    assert said in order.note and "a new one begins at random" in order.note


def test_classes_without_names_keep_their_order_and_it_is_said() -> None:
    unnamed = head_order(["cat", "dog"], None, outputs=2)
    assert unnamed.rows == (0, 1) and "output n means the n-th class" in unnamed.note
    numbered = head_order(["0", "1"], ["cat", "dog"], outputs=2)
    assert numbered.rows == (0, 1) and "the data's classes are numbers" in numbered.note


def test_imagenets_own_ids_are_in_the_order_of_its_words() -> None:
    ids = [f"n{number:08d}" for number in range(1000)]
    words = ["tench, Tinca tinca", "goldfish", *["crane"] * 997, "toilet tissue, toilet paper"]
    order = head_order(ids, words, outputs=1000)
    assert order.rows == tuple(range(1000)) and order.note == ""
