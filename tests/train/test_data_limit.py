"""A job that waits for samples is called so where people look: in its log, and among its events."""

from types import SimpleNamespace
from typing import Any

import pytest

from shardyard.train.loop import Loop


def test_what_limits_the_samples_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    source = SimpleNamespace(limit=None)
    loop = object.__new__(Loop)
    loop.limit_reported = False
    loop.training = SimpleNamespace(  # type: ignore[assignment]
        train_source=source, report=lambda kind, **fields: told.append((kind, fields))
    )
    loop._report_data_limit(1)
    source.limit = "decoding limits this job."
    loop._report_data_limit(2)
    loop._report_data_limit(3)
    assert told == [("data_limit", {"step": 2, "reason": source.limit})]
    assert caplog.messages == [source.limit]
