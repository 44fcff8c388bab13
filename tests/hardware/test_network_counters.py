"""What interfaces have sent, from a tree like the kernel's."""

from pathlib import Path

from shardyard.hardware.network_counters import busiest, link_bits_per_s, sent_bytes, sent_since

_NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:  700      10    0    0    0     0          0         0     700      10    0    0    0
  eth0: 9000      20    0    0    0     0          0         0     500      20    0    0    0
"""


def tree(root: Path, *, efa: dict[str, dict[str, int]]) -> Path:
    """As on an instance with EFA; a card of another kind is there, too."""
    for device, counters in efa.items():
        folder = root / "sys/class/infiniband" / device / "ports/1/hw_counters"
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in counters.items():
            (folder / name).write_text(f"{value}\n")
    other = root / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    other.mkdir(parents=True, exist_ok=True)
    (other / "rx_write_requests").write_text("5\n")
    net = root / "proc/self/net"
    net.mkdir(parents=True, exist_ok=True)
    (net / "dev").write_text(_NET)
    return root


def test_bytes_that_each_interface_sent_are_read_from_the_kernels_own_counters(
    tmp_path: Path,
) -> None:
    sends = {"tx_bytes": 4000, "rx_bytes": 9, "send_bytes": 3000, "rdma_write_bytes": 0}
    writes = {"tx_bytes": 100, "send_bytes": 100, "rdma_write_bytes": 900}
    root = tree(tmp_path, efa={"rdmap16s27": sends, "rdmap32s27": writes})
    assert sent_bytes(root) == {
        "efa/rdmap16s27": 4000, "efa/rdmap32s27": 1000, "lo": 700, "eth0": 500
    }  # fmt: skip


def test_a_machine_without_such_files_has_sent_nothing(tmp_path: Path) -> None:
    assert sent_bytes(tmp_path) == {}


def test_what_was_sent_in_between_is_the_difference_by_interface() -> None:
    before, now = {"efa/a": 100, "eth0": 50}, {"efa/a": 400, "eth0": 50, "efa/b": 7}
    assert sent_since(before, now) == {"efa/a": 300, "efa/b": 7}


def test_loopback_is_between_nodes_only_where_they_are_one_machine() -> None:
    sent = {"lo": 900, "eth0": 30, "eth1": 40}
    assert busiest(sent, is_one_machine=False) == "eth1"
    assert busiest(sent, is_one_machine=True) == "lo"
    assert busiest({}, is_one_machine=False) is None


def test_what_links_are_set_to_is_summed_of_those_that_are_up_and_say_so(tmp_path: Path) -> None:
    cards = {"eth0": ("25000", "up"), "eth1": ("25000", "down"), "eth2": ("-1", "up"), "eth3": None}
    for name, said in cards.items():
        folder = tmp_path / "sys/class/net" / name
        (folder / "device").mkdir(parents=True)
        if said is not None:
            (folder / "speed").write_text(said[0] + "\n")
            (folder / "operstate").write_text(said[1] + "\n")
    bridge = tmp_path / "sys/class/net/docker0"
    bridge.mkdir()
    (bridge / "speed").write_text("10000\n")
    (bridge / "operstate").write_text("up\n")
    assert link_bits_per_s(tmp_path) == 25 * 10**9
    for name, rate, state in (("mlx5_0", "200 Gb/sec (4X HDR)", "4: ACTIVE"),
                              ("mlx5_1", "200 Gb/sec (4X HDR)", "1: DOWN"),
                              ("rdmap16s27", "what", "4: ACTIVE")):  # fmt: skip
        port = tmp_path / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "rate").write_text(rate + "\n")
        (port / "state").write_text(state + "\n")
    assert link_bits_per_s(tmp_path) == 225 * 10**9


def test_a_machine_whose_links_say_nothing_has_no_speed_rather_than_none_at_all(
    tmp_path: Path,
) -> None:
    assert link_bits_per_s(tmp_path) is None
