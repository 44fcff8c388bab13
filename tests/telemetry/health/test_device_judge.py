"""What a node's telemetry says of its devices: what is wrong, since when, and whose fault it is."""

from typing import Any

import pytest

from shardyard.rundir.telemetry import TelemetryHeader, TelemetrySample
from shardyard.telemetry.health.devices import (
    DeviceFinding,
    DeviceHealthMonitor,
    NetworkHealthMonitor,
)

HEAD = TelemetryHeader(
    t=0.0, node="a", attempt=1, cores=8, names=("H100",) * 4, memory_bytes=(None,) * 4
)


def sample(t: float, **said: Any) -> TelemetrySample:
    """One of four healthy devices at work, but for what is said."""
    usual: dict[str, Any] = {
        "devices": {
            "utilisation": (0.97,) * 4,
            "sm_clock_mhz": (1980, 1965, 1980, 1965),
            "ecc_uncorrected": (0,) * 4,
            **said.pop("devices", {}),
        },
        "slowed_by": ("",) * 4,
        "xid": (),
        "unanswered": (),
        "stuck": {},
        "numbers": {},
        "ranks": {},
    }
    return TelemetrySample(head=HEAD, t=t, **{**usual, **said})


def look(*samples: TelemetrySample) -> list[DeviceFinding]:
    judge = DeviceHealthMonitor()
    return [found for each in samples for found in judge.evaluate(each)]


def test_healthy_devices_are_not_spoken_of() -> None:
    assert look(*(sample(float(t)) for t in range(1000))) == []


@pytest.mark.parametrize(
    ("code", "whose"),
    [(13, "program"), (31, "program"), (43, "program"), (45, "program"), (79, "device"),
     (48, "device"), (74, "device"), (999, "either")],
)  # fmt: skip
def test_an_error_of_the_driver_is_the_programs_or_the_devices(code: int, whose: str) -> None:
    (found,) = look(sample(1.0), sample(2.0, xid=((2, code),)))
    assert (found.kind, found.device, found.whose, found.t) == ("xid", 2, whose, 2.0)
    assert found.cause.startswith(f"XID {code}: ")


def test_the_same_error_is_said_once_in_ten_minutes() -> None:
    found = look(
        *(sample(float(t), xid=((2, 79),)) for t in range(0, 600, 5)),
        sample(2000.0, xid=((2, 79),)),
    )
    assert [each.t for each in found] == [0.0, 2000.0]


def test_a_clock_that_is_held_down_is_said_after_four_lines_and_when_it_is_over() -> None:
    slow = [sample(float(t), slowed_by=("", "heat", "", "")) for t in range(4)]
    well = [sample(float(t)) for t in range(4, 9)]
    begun, over = look(*slow, *well)
    assert (begun.t, begun.device, begun.is_over) == (3.0, 1, False) and "heat" in begun.cause
    assert (over.t, over.device, over.is_over) == (7.0, 1, True)


def test_what_passes_within_a_few_lines_is_not_said() -> None:
    reasons = [("", "heat", "", "") if t % 4 else ("",) * 4 for t in range(100)]
    assert look(*(sample(float(t), slowed_by=why) for t, why in enumerate(reasons))) == []


def test_a_clock_behind_that_of_its_peers_names_the_device() -> None:
    slow = {"sm_clock_mhz": (1980, 1965, 1410, 1965)}
    (found,) = look(*(sample(float(t), devices=slow) for t in range(10)))
    assert (found.kind, found.device) == ("slow_clock", 2)
    assert "1410 MHz, its peers' 1965" in found.cause


def test_a_device_without_work_may_be_slow() -> None:
    idle = {"sm_clock_mhz": (1980, 345, 1980, 1965), "utilisation": (0.97, 0.0, 0.97, 0.97)}
    assert look(*(sample(float(t), devices=idle) for t in range(10))) == []


def test_missing_numbers_speak_against_nobody() -> None:
    none = {"sm_clock_mhz": (1980, None, 1980, 1965), "ecc_uncorrected": (None, 3, None, None)}
    assert look(*(sample(float(t), devices=none) for t in range(10))) == []


def test_memory_errors_count_from_the_first_line_on() -> None:
    old, new = {"ecc_uncorrected": (5, 0, 0, 0)}, {"ecc_uncorrected": (5, 2, 0, 0)}
    (found,) = look(sample(0.0, devices=old), sample(1.0, devices=new))
    assert (found.kind, found.device) == ("ecc", 1) and found.cause.startswith("2 memory errors")


def test_the_verdict_says_whose_fault_it_is() -> None:
    found = look(sample(1.0, xid=((0, 31),)), sample(2.0, xid=((3, 79),)))
    assert [(each.device, each.cause, each.whose, each.is_over) for each in found] == [
        (0, "XID 31: a page fault: memory was addressed that is not mapped", "program", False),
        (3, "XID 79: the device has fallen off the bus", "device", False),
    ]


FULL, HALF = 63_015_384_608, 31_507_692_304


def pcie(now: tuple[float | None, ...], could: tuple[float | None, ...] = (FULL,) * 4) -> Any:
    return {"pcie_link_bytes_per_s": now, "pcie_link_most_bytes_per_s": could}


def test_a_pcie_link_below_what_it_could_be_is_said_until_it_is_not() -> None:
    slow = [sample(float(t), devices=pcie((FULL, FULL, HALF, FULL))) for t in range(4)]
    well = [sample(float(t), devices=pcie((FULL,) * 4)) for t in range(4, 9)]
    begun, over = look(*slow, *well)
    assert (begun.kind, begun.device, begun.whose) == ("slow_pcie", 2, "device")
    assert begun.cause == "its PCIe link is set to 31.5 GB/s, and could be to 63.0"
    assert (over.device, over.is_over) == (2, True)


def test_a_pcie_link_below_its_peers_is_said_where_nobody_knows_what_it_could_be() -> None:
    devices = pcie((FULL, HALF, FULL, None), (None,) * 4)
    (found,) = look(*(sample(float(t), devices=devices) for t in range(9)))
    assert (found.device, found.cause) == (
        1, "its PCIe link is set to 31.5 GB/s, its peers' to 63.0"
    )  # fmt: skip


def test_a_device_at_rest_may_lower_its_link_and_says_nothing_of_it() -> None:
    resting = {"utilisation": (0.97, 0.0, 0.97, 0.97), **pcie((FULL, HALF / 8, FULL, FULL))}
    assert look(*(sample(float(t), devices=resting) for t in range(9))) == []
    slow = [sample(float(t), devices=pcie((FULL, HALF, FULL, FULL))) for t in range(4)]
    rests = [sample(float(t), devices=resting) for t in range(4, 20)]
    assert [each.is_over for each in look(*slow, *rests)] == [False]


def test_a_link_of_which_nothing_is_known_speaks_against_nobody() -> None:
    unknown = pcie((None, 0.0, None, None), (None,) * 4)
    assert look(*(sample(float(t), devices=unknown) for t in range(9))) == []


def test_the_network_of_nodes_is_compared_with_that_of_their_peers() -> None:
    judge = NetworkHealthMonitor()
    told = [judge.evaluate(float(t), {0: 4e11, 1: 2e11, 2: 4e11, 3: None}) for t in range(6)]
    assert [list(each) for each in told] == [[], [], [], [1], [], []]
    assert told[3][1].device is None
    alone = NetworkHealthMonitor()
    assert not any(alone.evaluate(float(t), {0: 1e9, 1: None}) for t in range(9))
    assert told[3][1].cause == "its network links are set to 200 Gbit/s, its peers' to 400"
    assert not told[3][1].is_over


def limited(t: float, periods: float | None, throttled: float | None) -> TelemetrySample:
    """Of a node whose container may use two cores."""
    names = ("cpu_limit_cores", "cpu_limit_periods", "cpu_throttled_periods")
    return sample(t, numbers=dict(zip(names, (2.0, periods, throttled), strict=True)))


def test_a_limit_of_processor_time_is_said_with_its_share_and_when_it_is_over() -> None:
    held = [limited(5.0 * k, 50.0 * k, 30.0 * k) for k in range(6)]
    free = [limited(5.0 * k, 50.0 * k, 150.0) for k in range(6, 12)]
    begun, over = look(*held, *free)
    assert (begun.t, begun.kind, begun.device, begun.whose) == (20.0, "throttled", None, "either")
    assert begun.cause == (
        "in 60% of the periods its processes use up their limit of 2 cores, and pause for the "
        "rest of each (cgroup cpu.max; resources.limits.cpu in Kubernetes)"
    )
    assert (over.t, over.is_over, over.cause) == (45.0, True, begun.cause)


@pytest.mark.parametrize(
    "samples",
    [
        [limited(5.0 * k, 50.0 * k, 10.0 * k) for k in range(20)],  # a fifth
        [limited(5.0 * k, 50.0, 50.0) for k in range(20)],  # nothing ran
        [limited(5.0 * k, None, None) for k in range(20)],
        [limited(5.0 * k, None if k % 2 else 50.0 * k, 50.0 * k) for k in range(20)],  # gaps
        [limited(5.0 * k, 50.0 * (k % 5), 50.0 * (k % 5 > 3)) for k in range(30)],  # starts anew
    ],
)
def test_a_limit_that_is_seldom_reached_or_not_known_is_no_news(
    samples: list[TelemetrySample],
) -> None:
    assert look(*samples) == []
