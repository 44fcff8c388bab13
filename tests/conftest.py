"""What all tests need."""

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.distributed.runs import Corpus

pytest_plugins = ("tests.selection", "tests.accounts")

# A shell without job control starts its background commands with SIGINT ignored, and children
# inherit that: then Ctrl-C, which many tests send, would reach nobody.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> "Corpus":
    """Text, prepared once for all runs that train on it; nobody changes it."""
    from tests.distributed.runs import prepare_corpus  # torch, which most tests do without

    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def talk_on_stderr() -> Iterator[None]:
    """What operations say comes on stderr, as it does where a verb calls them."""
    from shardyard.terminal import talk_shown

    with talk_shown():
        yield
