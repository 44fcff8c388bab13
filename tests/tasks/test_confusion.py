"""Counts of confusions, compared with counting by hand, and what is kept of many classes."""

from collections import Counter

import torch

from shardyard.tasks.confusion import (
    CONFUSION,
    SHOWN_CLASSES,
    SHOWN_PAIRS,
    count_confusion,
    matrix_of,
    no_confusion,
    summarize_confusion,
)

CPU = torch.device("cpu")


def test_counts_are_those_by_hand_and_labels_of_no_class_count_nowhere() -> None:
    draw = torch.Generator().manual_seed(0)
    labels, guesses = (torch.randint(0, 3, (200,), generator=draw) for _ in range(2))
    labels[::7] = -100
    counts = no_confusion(3, CPU)[CONFUSION]
    for start in range(0, 200, 50):
        count_confusion(counts, guesses[start : start + 50], labels[start : start + 50])
    by_hand = Counter(zip(labels.tolist(), guesses.tolist(), strict=True))
    assert matrix_of(counts).tolist() == [
        [by_hand[row, col] for col in range(3)] for row in range(3)
    ]
    found = summarize_confusion(counts, ["a", "b", "c"], step=4)
    assert found.names == ["a", "b", "c"] and found.matrix == matrix_of(counts).tolist()
    assert found.predictions == 200 - len(labels[::7])
    assert found.right == sum(by_hand[each, each] for each in range(3))
    wrong = {pair: n for pair, n in by_hand.items() if pair[0] >= 0 and pair[0] != pair[1]}
    assert [count for _, _, count in found.pairs] == sorted(wrong.values(), reverse=True)
    assert {("abc".index(a), "abc".index(b)): n for a, b, n in found.pairs} == wrong


def test_of_a_thousand_classes_the_most_confused_are_kept() -> None:
    counts = no_confusion(1000, CPU)[CONFUSION]
    labels = torch.arange(1000).repeat(3)
    guesses = labels.clone()
    guesses[:100] = 999 - guesses[:100]  # one confusion each
    for true, guess, number in ((700, 3, 9), (3, 700, 5)):
        labels = torch.cat([labels, torch.full((number,), true)])
        guesses = torch.cat([guesses, torch.full((number,), guess)])
    count_confusion(counts, guesses, labels)
    found = summarize_confusion(counts, [f"class {n}" for n in range(1000)], step=1)
    assert found.pairs[:2] == [("class 700", "class 3", 9), ("class 3", "class 700", 5)]
    assert len(found.pairs) == SHOWN_PAIRS and len(found.names) == SHOWN_CLASSES
    assert {"class 3", "class 700"} < set(found.names) and found.classes == 1000
    place = found.names.index
    assert found.matrix[place("class 700")][place("class 3")] == 9
    assert (found.predictions, found.right) == (3014, 2900)


def test_one_class_and_very_many_are_not_counted() -> None:
    assert no_confusion(1, CPU) == no_confusion(1025, CPU) == {}
