"""What a worker leaves behind when it fails."""

import json

import pytest

from shardyard.elastic.worker import last_words


@pytest.mark.parametrize("character", ["a", "\u4e2d", "\x00", "\ud800", "\U0001f600"])
def test_last_words_fit_into_the_room_reserved_for_them(character: str) -> None:
    data = last_words({"rank": 0, "message": character * 5000, "exit_code": 1})
    assert 2048 < len(data) <= 4096
    assert json.loads(data)["message"].startswith(character * 200)


def test_a_long_message_is_kept_whole_if_it_fits() -> None:
    assert json.loads(last_words({"message": "a" * 3000}))["message"] == "a" * 3000
