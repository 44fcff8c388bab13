"""How long saving takes, against a published save."""

import pytest

from shardyard.planner.saving import blocking_s, writing_s


def test_bloom_wrote_its_checkpoint_in_forty_seconds() -> None:
    # 2.3 TB from 48 nodes in 40 s
    assert writing_s(2.3e12, nodes=48) == pytest.approx(40, rel=0.01)


def test_every_node_writes_and_every_device_copies_its_own_part() -> None:
    assert writing_s(1e12, nodes=8) == pytest.approx(writing_s(1e12, nodes=1) / 8)
    assert blocking_s(1e12, devices=64) == pytest.approx(blocking_s(1e12, devices=1) / 64)


def test_training_waits_less_than_the_write_takes() -> None:
    assert 0 < blocking_s(1e12, devices=8) < writing_s(1e12, nodes=1)
