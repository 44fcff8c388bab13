"""What counts as printed, of the output that a page shows."""

import pytest

from tests.docs.shown import not_printed

PRINTED = "step 10/20  loss 5.889  7.2 K tokens/s  71.1 ms/step  711 ms left"


@pytest.mark.parametrize(
    "shown",
    [
        "step 10/20  loss 4.1  345 tokens/s  1.48 s/step  1 min 48 s left",
        "step 10/20 loss ... 2 h 3 min left",
    ],
)
def test_any_speed_is_the_same_without_numbers(shown: str) -> None:
    assert not_printed([shown], PRINTED) == [shown]
    assert not_printed([shown], PRINTED, numbers=False) == []


def test_other_words_are_missing() -> None:
    shown = ["step 10/20  loss 5.889  7.2 K tokens/s  71.1 ms/step  done"]
    assert not_printed(shown, PRINTED, numbers=False) == shown
