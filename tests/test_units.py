"""Lengths of time: what is written is understood, what is not a length is refused."""

import pytest

from shardyard.config.load import load_recipe
from shardyard.errors import RequestError
from shardyard.units import format_age, format_seconds, parse_count, parse_seconds

UNDERSTOOD = [
    ("90min", 5400),
    ("90 min", 5400),
    ("24h", 86400),
    ("24H", 86400),
    ("1.5 d", 129600),
    ("1d12h", 129600),
    ("2w", 1209600),
    ("45 s", 45),
]


@pytest.mark.parametrize(("text", "seconds"), UNDERSTOOD)
def test_a_length_of_time_is_understood(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("seconds", [1, 59, 60, 3600, 3660, 86400, 93600, 8 * 86400 + 3600])
def test_what_is_printed_can_be_given_back(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize(("seconds", "text"), [(0.9996, "1 s"), (59.98, "1 min"), (0.41, "410 ms")])
def test_what_rounds_to_the_next_unit_is_written_in_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


NO_LENGTHS = [
    "", "24", "soon", "h", "0h", "-3h", "1h-2h", "x h", "24hours", "1 month", "nanh", "infd", "5ms",
    "9" * 400 + "d",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_LENGTHS)
def test_anything_else_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a length of time such as 90min, 24h or 1\.5d"):
        parse_seconds(text)


def test_an_age_is_never_negative() -> None:
    assert (format_age(90), format_age(0.0), format_age(-90)) == (
        "1 min 30 s ago", "0 ms ago", "just now",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("10B", 10**10),
        ("300k", 300_000),
        ("1.5K", 1500),
        ("1.25M", 1_250_000),
        ("0.5T", 5 * 10**11),
    ],
)
def test_a_count_may_have_a_suffix(written: str, number: int) -> None:
    assert parse_count(written) == number
    assert load_recipe([], [f"run.tokens={written}"]).run.tokens == number


@pytest.mark.parametrize("written", ["1.2345k", "10 B", "10X", "-3k", "k", "many"])
def test_a_count_that_is_not_whole_is_rejected(written: str) -> None:
    assert parse_count(written) == written
    with pytest.raises(RequestError, match=r"run\.steps=.* is not a whole number"):
        load_recipe([], [f"run.steps={written}"])
