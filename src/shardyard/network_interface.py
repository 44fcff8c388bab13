"""The network interface that gloo and NCCL use in the workers of a node, and faults of a given one.

Left to itself, gloo listens where the machine's host name leads: 127.0.1.1 on Debian, an address of
yesterday, or nowhere. NCCL takes the first interface that is neither loopback nor docker: a VPN, or
a bridge that leads to no other node. So each worker gets the interface by which its node reaches
the rendezvous.
"""

import ctypes
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from shardyard.errors import SetUpError

VARIABLE = "GLOO_SOCKET_IFNAME"
"""torch gives gloo the interfaces of this name; several are separated by commas."""
NCCL_VARIABLE = "NCCL_SOCKET_IFNAME"
"""Interfaces of NCCL's start (bootstrap) and of its socket transport; InfiniBand and EFA devices
are found without it. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""
_NCCL_FILES = ("~/.nccl.conf", "/etc/nccl.conf")
"""Files where NCCL reads variables that the environment lacks; NCCL_CONF_FILE comes first."""
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Keeps torch from a store of its own next to that of the rendezvous."""
_LOOPBACK = "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """An address of this node that the other nodes reach, as it reaches one of them."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing; the kernel picks the interface
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether this is an address of the loopback interface; a name is none."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def reachable_address(host: str, hosts: Collection[str]) -> str:
    """An address of this node that the others reach.

    The one that serves the store sees itself where its own name leads, often the loopback
    interface; what counts then is the way to another node.

    Args:
        host: Its address, as it sees itself.
        hosts: The same of all nodes.
    """
    elsewhere = [each for each in hosts if not is_loopback(each)]
    return address_towards(elsewhere[0], 1) if is_loopback(host) and elsewhere else host


def check_loopback() -> None:
    """Check that processes of this machine reach each other.

    Raises:
        SetUpError: The loopback interface is down, as in an empty network namespace.
    """
    try:
        address_towards(_LOOPBACK, 1)
    except OSError as error:
        raise SetUpError(
            f"{_LOOPBACK} cannot be reached on {socket.gethostname()} ({error.strerror}): the "
            "loopback interface lo is down. The processes of a machine find each other there. "
            "Bring it up (`ip link set lo up`), or leave the sandbox that has no network."
        ) from error


def address_of_node(host: str, port: int) -> str | None:
    """Return this node's address towards a rendezvous store. None if it knows no route."""
    with suppress(OSError):
        return address_towards(host, port)
    return None


def worker_variables(
    address: str | None, addresses: Collection[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Variables of each worker of this node, in addition to torch's own.

    Args:
        address: Of this node, as it sees itself; None: it is not known.
        addresses: The same of all nodes.
        environ: Of the agent; what it names stays.
    """
    name = None if address is None else interface_of(reachable_address(address, addresses))
    if name is None:
        return dict(OWN_STORE)
    chosen = {} if environ.get(VARIABLE) else {VARIABLE: name}
    if not environ.get(NCCL_VARIABLE) and not _is_in_nccl_files(environ):
        chosen[NCCL_VARIABLE] = f"={name}"  # =: this name, not all that begin with it
    return {**OWN_STORE, **chosen}


def _is_in_nccl_files(environ: Mapping[str, str]) -> bool:
    """Whether an administrator or the user names interfaces in a file of NCCL."""
    own, of_all = _NCCL_FILES
    for file in (environ.get("NCCL_CONF_FILE") or own, of_all):
        with suppress(OSError, RuntimeError):  # the latter: there is no home folder
            path = Path(file).expanduser()
            text = path.read_text(errors="replace") if path.is_file() else ""
            if re.search(rf"^\s*{NCCL_VARIABLE}\s*=", text, re.MULTILINE):
                return True
    return False


def check(environ: Mapping[str, str]) -> None:
    """Check the interfaces that a variable names, and the name of this machine.

    Raises:
        SetUpError: One of them is not there, or has no address; or the name cannot be looked up.
    """
    if problem := host_name_problem(socket.gethostname()) or problem_of(environ):
        raise SetUpError(problem)


def host_name_problem(name: str) -> str:
    """Why torch could not look a host name up; empty: it can."""
    try:
        name.encode("idna")
    except UnicodeError:
        part = max(name.split("."), key=len)
        return (
            f"the host name {name} cannot be looked up, as torch does: a part of it has "
            f"{len(part)} letters, and names have parts of 1 to 63. Give the machine a shorter "
            f"name: `hostname {part[:15]}` (--hostname of a container)."
        )
    return ""


def problem_of(environ: Mapping[str, str]) -> str:
    """Describe what is wrong with the interfaces that a variable names; empty if all are right."""
    value = environ.get(VARIABLE)
    if not value:
        return ""
    found = interfaces()
    usable = sorted(name for name, addresses in found.items() if addresses)
    wrong = [name for name in value.split(",") if name not in usable]
    if not wrong:
        return ""
    if wrong[0] in found:
        why = f"{wrong[0]} has no address"
    elif value[0] in "^=":
        why = f"gloo takes plain names, without {value[0]}"
    else:
        why = f"interface {wrong[0]!r} does not exist"
    return (
        f"{VARIABLE}={value}: {why} on {socket.gethostname()}. Interfaces with an address: "
        f"{', '.join(usable) or 'none'}. Unset the variable (`unset {VARIABLE}`): workers then use "
        "the interface by which their node reaches the rendezvous."
    )


def interface_of(address: str) -> str | None:
    """Name of the interface that has an address, or None."""
    if address == "localhost":
        return loopback_interface()
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in interfaces().items():
        if any(ipaddress.ip_address(each) == wanted for each in addresses):
            return name
    return loopback_interface() if wanted.is_loopback else None


def loopback_interface() -> str:
    """Name of the loopback network interface: lo on Linux, lo0 on macOS."""
    is_loopback_flag = 0x8  # IFF_LOOPBACK of net/if.h
    for _index, name in socket.if_nameindex():
        flags = Path("/sys/class/net", name, "flags")
        if flags.is_file() and int(flags.read_text(), 16) & is_loopback_flag:
            return name
    return "lo0"


class _Entry(ctypes.Structure):
    """struct ifaddrs of getifaddrs(3), as far as it is read here."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interfaces() -> dict[str, list[str]]:
    """Addresses of each interface that is up; none where it is down or has no address.

    Raises:
        OSError: The system does not say.
    """
    addresses: dict[str, list[str]] = {name: [] for _index, name in socket.if_nameindex()}
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    try:
        entry = first
        while entry:
            place = entry.contents.address if entry.contents.flags & 0x1 else None  # IFF_UP
            if place and (address := _address_at(place)):
                addresses.setdefault(os.fsdecode(entry.contents.name), []).append(address)
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return addresses


def _address_at(pointer: int) -> str | None:
    """Return the address in a struct sockaddr. BSD has its length before the family."""
    head = ctypes.string_at(pointer, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer + 8, 16))
    return None
