"""Nodes whose clocks differ by an hour, or are set by one while they run."""

import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # built in C++
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    RendezvousTimeout,
)

from shardyard.elastic.agent_messages import LocalClockBackend
from shardyard.elastic.rendezvous.c10d import Rendezvous, RendezvousConfig, RendezvousWait
from shardyard.elastic.seal import Seal
from shardyard.torch_private import LONG_AGO

HOUR = timedelta(hours=1)
LAST_CALL = timedelta(seconds=1)


class Skewed(RendezvousBackend):
    """What a node reads and writes whose clock is ahead of true time."""

    def __init__(self, backend: RendezvousBackend, ahead: timedelta) -> None:
        self._backend = backend
        self.ahead = ahead

    @property
    def name(self) -> str:
        return "skewed"

    def get_state(self) -> Any:
        found = self._backend.get_state()
        return found and (_moved(found[0], -self.ahead), *found[1:])

    def set_state(self, state: bytes, token: Any = None) -> Any:
        found = self._backend.set_state(_moved(state, self.ahead), token)
        return found and (_moved(found[0], -self.ahead), *found[1:])


def _moved(data: bytes, by: timedelta) -> bytes:
    state = pickle.loads(data)
    state.last_heartbeats = {
        node: then if then == LONG_AGO else then + by
        for node, then in state.last_heartbeats.items()
    }
    state.deadline = state.deadline and state.deadline + by
    return pickle.dumps(state)


def _meeting() -> RendezvousConfig:
    return RendezvousConfig(
        id="m", seal=Seal(b"s" * 32), min_nodes=2, max_nodes=3, endpoint=None, node_rank=0,
        keep_alive_s=6, restart_timeout_s=60.0, wait=RendezvousWait(0),
    )  # fmt: skip


@pytest.fixture
def skewed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Rendezvous, Skewed]]]:
    """Three nodes of which two are enough; clocks of two are an hour ahead and behind."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as build_rendezvous does
    store = HashStore()
    nodes = []
    for ahead in (0 * HOUR, HOUR, -HOUR):
        clock = Skewed(C10dRendezvousBackend(store, "m"), ahead)
        handler = Rendezvous.from_backend(
            "m", store, LocalClockBackend(clock, last_call=LAST_CALL), 2, 3, local_addr="127.0.0.1",
            timeout=RendezvousTimeout(join=timedelta(seconds=60), last_call=LAST_CALL),
            keep_alive_interval=1, keep_alive_max_attempt=6,
        )  # fmt: skip
        handler.config = _meeting()
        nodes.append((handler, clock))
    yield nodes
    for handler, _clock in nodes:
        handler._stop_heartbeats()


def meet(*nodes: Rendezvous) -> list[int]:
    with ThreadPoolExecutor() as pool:
        return [each.world_size for each in pool.map(Rendezvous.next_rendezvous, nodes)]


@pytest.mark.heavy
def test_clocks_an_hour_apart_end_no_last_call_and_declare_nobody_dead(
    skewed: list[tuple[Rendezvous, Skewed]],
) -> None:
    (first, _), (second, its_clock), _ = skewed
    assert meet(first, second) == [2, 2]
    for ahead in (0 * HOUR, HOUR):  # set while the run goes on
        its_clock.ahead = ahead
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            for node in (first, second):
                assert node.num_nodes_waiting() == 0  # looks
                assert len(node._state_holder.state.participants) == 2
            time.sleep(0.1)
    assert meet(first, second) == [2, 2]


@pytest.mark.heavy
def test_a_node_whose_sign_of_life_stands_still_is_gone_whatever_its_clock_said(
    skewed: list[tuple[Rendezvous, Skewed]],
) -> None:
    (first, _), (ahead, _), (behind, _) = skewed
    assert meet(first, ahead, behind) == [3, 3, 3]
    ahead._stop_heartbeats()  # as if it were killed; by its clock it lives for an hour
    assert meet(first, behind) == [2, 2]


@pytest.mark.heavy
def test_nobody_waits_for_others_once_all_are_there_that_are_known_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = HashStore()
    nodes = []
    for _ in range(3):
        clock = LocalClockBackend(C10dRendezvousBackend(store, "m"), last_call=HOUR)
        node = Rendezvous.from_backend(
            "m", store, clock, 2, 3, local_addr="127.0.0.1",
            timeout=RendezvousTimeout(join=timedelta(seconds=60), last_call=HOUR),
            keep_alive_interval=1, keep_alive_max_attempt=6,
        )  # fmt: skip
        node.local_clock, node.config = clock, _meeting()
        nodes.append(node)
    assert meet(*nodes) == [3, 3, 3]
    *left, gone = nodes
    gone._stop_heartbeats()
    for node in left:
        node.expect(2)
    assert meet(*left) == [2, 2]  # else they would wait an hour for the third
    for node in left:
        node._stop_heartbeats()
