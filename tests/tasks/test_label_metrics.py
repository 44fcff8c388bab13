"""Scores of labels, next to those of scikit-learn 1.9.1, scipy 1.17.1 and seqeval 1.2.2."""

import pytest
import torch

from shardyard.tasks.label_metrics import (
    class_scores,
    entities,
    entity_scores,
    number_scores,
)


def _fp64(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_scores_of_two_classes_are_those_of_scikit_learn() -> None:
    labels, guesses = _fp64(1, 1, 1, 0, 0, 1, 0, 0), _fp64(1, 0, 1, 0, 1, 1, 0, 0)
    scores = class_scores(guesses, labels, num_labels=2)
    expected = {"accuracy": 0.75, "f1": 0.75, "f1_macro": 0.75, "matthews": 0.5}
    assert {name: float(each) for name, each in scores.items()} == pytest.approx(expected)


def test_scores_of_three_classes_are_those_of_scikit_learn() -> None:
    """f1_score(average="macro") and matthews_corrcoef."""
    labels, guesses = _fp64(0, 1, 2, 2, 1, 0, 0), _fp64(0, 2, 2, 2, 1, 1, 0)
    scores = class_scores(guesses, labels, num_labels=3)
    assert float(scores["f1"]) == float(scores["f1_macro"]) == pytest.approx(0.7)
    assert float(scores["matthews"]) == pytest.approx(0.59375)


def test_a_constant_guess_has_no_correlation() -> None:
    scores = class_scores(_fp64(0, 0, 0), _fp64(0, 1, 0), num_labels=2)
    assert float(scores["matthews"]) == float(scores["f1"]) == 0


def test_scores_of_numbers_are_those_of_scipy() -> None:
    """With ties, which share the mean of their ranks."""
    scores = number_scores(_fp64(1.0, 2.0, 2.0, 4.0, 3.5), _fp64(1.5, 1.5, 3.0, 3.5, 5.0))
    found = {name: float(each) for name, each in scores.items()}
    assert found == pytest.approx({"mse": 0.8, "pearson": 0.7958525153, "spearman": 0.8157894737})


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-PER I-PER O", {("PER", 1, 2)}),
        ("I-PER I-PER O I-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("B-PER B-PER I-LOC", {("PER", 0, 0), ("PER", 1, 1), ("LOC", 2, 2)}),
        ("B-PER E-PER S-LOC I-LOC", {("PER", 0, 1), ("LOC", 2, 2), ("LOC", 3, 3)}),
        ("B-PER L-PER U-LOC", {("PER", 0, 1), ("LOC", 2, 2)}),
    ],
)
def test_entities_are_those_of_seqeval(tags: str, found: set[tuple[str, int, int]]) -> None:
    assert set(entities(tags.split())) == found


def test_scores_of_entities() -> None:
    scores = entity_scores(*(_fp64(number)[0] for number in (2, 4, 5)))
    found = {name: float(each) for name, each in scores.items()}
    assert found == pytest.approx({"precision": 0.5, "recall": 0.4, "f1": 4 / 9})
    nothing = entity_scores(*(_fp64(0)[0] for _ in range(3)))
    assert not any(float(each) for each in nothing.values())
