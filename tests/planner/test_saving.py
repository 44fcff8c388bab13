"""How long saving takes, against a published save."""

import pytest

from shardyard.planner.effective_time import SaveCost


def test_bloom_wrote_its_checkpoint_in_forty_seconds() -> None:
    # 2.3 TB from 48 nodes in 40 s
    assert SaveCost.of(2.3e12, devices=384, nodes=48).write_s == pytest.approx(40, rel=0.01)


def test_every_node_writes_and_every_device_copies_its_own_part() -> None:
    one, eight = (SaveCost.of(1e12, devices=8 * n, nodes=n) for n in (1, 8))
    assert eight.write_s == pytest.approx(one.write_s / 8)
    assert eight.blocking_s == pytest.approx(one.blocking_s / 8)


def test_training_waits_less_than_the_write_takes() -> None:
    found = SaveCost.of(1e12, devices=8, nodes=1)
    assert 0 < found.blocking_s < found.write_s
