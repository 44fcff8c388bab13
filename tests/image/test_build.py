"""What would be built and pushed, known before anything is."""

import pytest

from shardyard.errors import RequestError
from shardyard.image.build import build_of, push_of


def test_a_push_is_known_before_it_is_done_and_pins_what_came_of_it() -> None:
    push = push_of("registry.example/ours/shardyard:1", "cpu", "mine:2")
    assert (push.local, push.registry) == ("mine:2", None)
    assert push.pinned(None) == push.remote
    assert push.pinned("sha256:ab") == "registry.example/ours/shardyard@sha256:ab"
    amazon = push_of("123456789012.dkr.ecr.us-east-1.amazonaws.com/shardyard:1", "cpu").registry
    assert amazon is not None and amazon.repository == "shardyard"


def test_names_that_are_none_are_refused_before_a_tool_is_looked_for() -> None:
    assert build_of("cpu").name.endswith("-cpu")
    with pytest.raises(RequestError, match="--tag 'Mine' is not a name of an image"):
        build_of("cpu", "Mine")
    with pytest.raises(RequestError, match="TO 'A B' is not a name of an image"):
        push_of("A B", "cpu")
