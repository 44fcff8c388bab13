"""What telemetry finds on any node is written once, whoever writes events when."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.elastic import device_watch
from shardyard.elastic.agent_messages import AgentMessages, Node
from shardyard.elastic.device_watch import DeviceWatch
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from shardyard.telemetry.health.devices import DeviceFinding


class Store:
    """The part of the rendezvous store that notices use."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def found(**fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"t": 5.0, "kind": "xid", "device": 3, "cause": "XID 79: gone"}
    return DeviceFinding(**{**usual, **fields}).fields()


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "_LOOK_EVERY_S", -1.0)


class Watch:
    """One node's, with its notices."""

    def __init__(self, notices: AgentMessages, watch: DeviceWatch) -> None:
        self._notices = notices
        self._watch = watch

    def look(self, *, writes: bool) -> list[tuple[str, dict[str, Any]]]:
        return self._watch.poll(self._notices, writes=writes)


def watches(
    run: RunDir, store: Store, *found_by_node: list[dict[str, Any]], bits_per_s: Any = None
) -> list[Watch]:
    """Args:
    bits_per_s: Node rank -> what its links are set to; None: no node says so.
    """
    count = len(found_by_node)
    made = []
    for k, found in enumerate(found_by_node):
        notices = AgentMessages(store, group_rank=k, num_nodes=count)
        speed = (bits_per_s or {}).get
        watch = DeviceWatch(run, 0, Node(f"n{k}", k), partial(list, found), partial(speed, k))
        made.append(Watch(notices, watch))
    return made


def test_the_first_node_writes_what_each_has_found_once(tmp_path: Path) -> None:
    mine, theirs = [found()], [found(device=1, kind="slowed", cause="heat")]
    first, second = watches(RunDir(tmp_path), Store(), mine, theirs)
    assert second.look(writes=False) == []
    told = first.look(writes=True)
    assert [(kind, event["node_rank"], event["device"]) for kind, event in told] == [
        ("device_problem", 0, 3), ("device_problem", 1, 1),
    ]  # fmt: skip
    assert first.look(writes=True) == []
    theirs.append(found(t=9.0, device=1, kind="slowed", cause="heat", is_over=True))
    second.look(writes=False)
    assert [kind for kind, _ in first.look(writes=True)] == ["device_well"]


def test_another_writer_does_not_write_again_what_the_file_holds(tmp_path: Path) -> None:
    run, mine = RunDir(tmp_path), [found()]
    (first,) = watches(run, Store(), mine)
    writer = EventWriter(run.events, attempt=0, generation=0)
    for kind, event in first.look(writes=True):
        writer.write(kind, **event)
    (later,) = watches(run, Store(), [*mine, found(t=8.0)])
    assert [event["found_t"] for _, event in later.look(writes=True)] == [8.0]


def test_an_error_of_the_program_is_not_held_against_the_device(tmp_path: Path) -> None:
    (first,) = watches(RunDir(tmp_path), Store(), [found(whose="program", cause="XID 31: a fault")])
    ((kind, event),) = first.look(writes=True)
    assert (kind, event["whose"]) == ("program_error", "program")


def test_a_node_whose_network_is_slower_than_its_peers_is_told_until_it_is_not(
    tmp_path: Path,
) -> None:
    speeds: dict[int, int | None] = {0: 100 * 10**9, 1: 10**9, 2: None}
    first, *others = watches(RunDir(tmp_path), Store(), [], [], [], bits_per_s=speeds)

    def look() -> list[tuple[str, dict[str, Any]]]:
        for other in others:
            other.look(writes=False)
        return first.look(writes=True)

    assert [look() for _ in range(3)] == [[], [], []]
    ((kind, event),) = look()
    assert (kind, event["problem"], event["node"], event["device"]) == (
        "device_problem", "slow_network", "n1", None
    )  # fmt: skip
    assert event["cause"] == "its network links are set to 1 Gbit/s, its peers' to 100"
    speeds[1] = 100 * 10**9
    told = [each for _ in range(8) for each in look()]
    assert [(kind, event["node_rank"]) for kind, event in told] == [("device_well", 1)]
