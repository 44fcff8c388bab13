"""What all tests need."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.distributed.runs import Corpus
    from tests.launchers.batch_server import BatchServer

# No test, nor any process of one, reads the site file of this machine or of who runs the tests.
os.environ["SHARDYARD_SITE"] = "none"

pytest_plugins = ("tests.selection", "tests.accounts")

# A shell without job control starts its background commands with SIGINT ignored, and children
# inherit that: then Ctrl-C, which many tests send, would reach nobody.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does the same with SIGHUP, which says that a terminal was closed.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """What was imported and collected never becomes garbage: nobody looks through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> "Corpus":
    """Text, prepared once for all runs that train on it; nobody changes it."""
    from tests.distributed.runs import prepare_corpus  # torch, which most tests do without

    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def models_of_aws() -> Iterator[None]:
    """Every new session of botocore reads them again, which takes longer than most tests."""
    try:
        from botocore.loaders import JSONFileLoader
    except ImportError:
        yield
        return
    read = JSONFileLoader().load_file
    known: dict[str, Any] = {}

    def load_file(_loader: JSONFileLoader, path: str) -> Any:
        if path not in known:
            known[path] = read(path)
        return known[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", load_file)
        yield


@pytest.fixture(scope="session")
def moto(
    models_of_aws: None,  # noqa: ARG001
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator["BatchServer"]:
    """AWS as moto plays it, started once for all tests; each begins with its ``reset()``."""
    pytest.importorskip("moto.server", reason="needs moto[batch,server]")
    from tests.launchers.batch_server import batch_server

    with batch_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def talk_on_stderr() -> Iterator[None]:
    """What operations say comes on stderr, as it does where a verb calls them."""
    from shardyard.io.terminal import logs_to_stderr

    with logs_to_stderr():
        yield
