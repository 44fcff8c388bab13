"""Which network interface gloo uses in the workers of a node."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard import network_interface
from shardyard.errors import SetUpError
from shardyard.network_interface import (
    NCCL_VARIABLE,
    VARIABLE,
    check,
    check_loopback,
    interfaces,
    reachable_address,
    worker_variables,
)

LO = network_interface.loopback_interface()


def test_every_interface_of_the_kernel_is_listed_and_loopback_has_its_address() -> None:
    found = interfaces()
    assert set(found) == {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found[LO]


def test_ipv6_addresses_are_those_that_the_kernel_lists() -> None:
    lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    wanted = {(name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(word)))
              for word, _, _, _, _, name in lines}  # fmt: skip
    assert wanted == {(name, each) for name, of in interfaces().items() for each in of
                      if ":" in each}  # fmt: skip


def test_a_node_whose_name_leads_to_itself_takes_the_address_towards_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_interface, "address_towards", lambda host, _port: f"towards {host}")
    assert reachable_address("127.0.1.1", ["127.0.1.1", "10.7.0.4"]) == "towards 10.7.0.4"
    assert reachable_address("127.0.0.1", ["127.0.0.1", "127.0.0.1"]) == "127.0.0.1"
    assert reachable_address("10.7.0.3", ["10.7.0.3", "10.7.0.4"]) == "10.7.0.3"


@pytest.mark.heavy
def test_a_machine_whose_loopback_interface_is_down_is_named() -> None:
    """In an empty network namespace; torch's store would wait for it in silence."""
    look = "from shardyard.network_interface import check_loopback; check_loopback()"
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", look], capture_output=True, text=True, check=False
    )
    if "unshare failed" in done.stderr:
        pytest.skip("no network namespaces here")
    assert "SetUpError: 127.0.0.1 cannot be reached" in done.stderr
    assert "`ip link set lo up`" in done.stderr
    check_loopback()


@pytest.mark.parametrize("name", ["a" * 64, "node." + "b" * 64])
def test_a_host_name_that_torch_cannot_look_up_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnicodeError):
        socket.getaddrinfo(name, None)  # as torch does
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    with pytest.raises(SetUpError, match=r"the host name .* has 64 letters.*`hostname "):
        check({})
    assert network_interface.host_name_problem("a" * 63) == ""


def test_an_interface_that_is_given_stays() -> None:
    assert worker_variables("127.0.0.1", [], {})[VARIABLE] == LO
    assert VARIABLE not in worker_variables("127.0.0.1", [], {VARIABLE: "eth1"})
    assert VARIABLE not in worker_variables(None, [], {})
    assert worker_variables("127.0.0.1", [], {})[NCCL_VARIABLE] == f"={LO}"
    assert NCCL_VARIABLE not in worker_variables("127.0.0.1", [], {NCCL_VARIABLE: "^docker"})


def test_interfaces_of_nccls_own_file_stay(tmp_path: Path) -> None:
    """The environment would outrank the file."""
    file = tmp_path / "nccl.conf"
    for text, is_chosen in (("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ens\n", False),
                            ("# NCCL_SOCKET_IFNAME=ens\n", True)):  # fmt: skip
        file.write_text(text)
        found = worker_variables("127.0.0.1", [], {"NCCL_CONF_FILE": str(file)})
        assert (NCCL_VARIABLE in found) == is_chosen


@pytest.fixture
def two_interfaces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own: dict[str, list[str]] = {"lo": ["127.0.0.1"], "eth0": ["10.7.0.3"], "ib0": []}
    monkeypatch.setattr(network_interface, "interfaces", lambda: own)
    yield


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("eth9", "interface 'eth9' does not exist"),
        ("lo,eth9", "interface 'eth9' does not exist"),
        ("^lo,docker", "gloo takes plain names, without ^"),
        ("=eth0", "gloo takes plain names, without ="),
        ("ib0", "ib0 has no address"),
        ("eth0,", "interface '' does not exist"),
    ],
)
@pytest.mark.usefixtures("two_interfaces")
def test_an_interface_that_cannot_be_used_is_named_with_those_that_can(
    value: str, why: str
) -> None:
    with pytest.raises(SetUpError) as caught:
        check({VARIABLE: value})
    assert f"{VARIABLE}={value}: {why}" in str(caught.value)
    assert "eth0, lo" in str(caught.value) and f"`unset {VARIABLE}`" in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "eth0", "eth0,lo"])
@pytest.mark.usefixtures("two_interfaces")
def test_what_can_be_used_is_taken(value: str | None) -> None:
    check({} if value is None else {VARIABLE: value})
