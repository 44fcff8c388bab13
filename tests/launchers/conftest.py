"""What the tests of launchers share."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _models_of_aws_are_read_once() -> Iterator[None]:
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
