"""What the tests of launchers share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _models_of_aws_are_read_once(models_of_aws: None) -> None:
    """Also by tests that speak to no server."""
