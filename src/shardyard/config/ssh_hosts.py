"""Hosts of `launch --on ssh`: ``[user@]host[:port]``, from a list or from a hostfile.

A hostfile has one host a line, as DeepSpeed's: ``gpu1 slots=8``. Blank lines and comments (#) are
passed over. Names may be aliases of the user's ssh configuration.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardyard.config.schema.launch import Ssh
from shardyard.errors import Problem

HOST_PATTERN = (
    r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@)?"
    r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(?::[1-9][0-9]{0,4})?"
)
"""No part can begin with a hyphen, which ssh would read as an option."""

_HOST = re.compile(r"(?:([^@]+)@)?(\[[^\]]+\]|[^:]+)(?::(\d+))?", re.ASCII)
_SETTING, _FILE_SETTING = "launch.ssh.hosts", "launch.ssh.hostfile"
_FORM = "[user@]host[:port], such as gpu1, me@gpu2:2222 or [fd00::2]:22"
_LINE = "a host and, if you like, slots=N, such as `gpu1 slots=8`"
_MOST_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class SshHost:
    """One machine, as ssh is asked for it."""

    text: str
    """Text of the recipe: ``[user@]host[:port]``."""
    name: str
    """Name, alias or address, without brackets."""
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    """Devices that a hostfile gives it; None: it says nothing."""


def parse_host(text: str, *, slots: int | None = None) -> SshHost | None:
    """Read ``[user@]host[:port]``; None: it is none."""
    if not re.fullmatch(HOST_PATTERN, text, re.ASCII):
        return None
    match = _HOST.fullmatch(text)
    assert match is not None
    user, name, port = match.groups()
    if port is not None and int(port) > 65535:
        return None
    return SshHost(
        text=text,
        name=name.strip("[]"),
        user=user,
        port=None if port is None else int(port),
        slots=slots,
    )


def host_problems(ssh: Ssh) -> Iterator[Problem]:
    """Everything wrong with the list of hosts itself; reads no file."""
    for place, text in enumerate(ssh.hosts):
        if parse_host(text) is None:
            yield Problem(f"{_SETTING}[{place}]", f"={text} is not {_FORM}.")
    if ssh.hosts and ssh.hostfile is not None:
        text = (
            f"={ssh.hostfile}, and launch.ssh.hosts names {len(ssh.hosts)} hosts too. Keep one of "
            "the two."
        )
        yield Problem(_FILE_SETTING, text)
    yield from _repeated(filter(None, map(parse_host, ssh.hosts)), _SETTING)


def hosts_of(ssh: Ssh) -> tuple[tuple[SshHost, ...], list[Problem]]:
    """Return the hosts in the order of node ranks, and all that is wrong with them.

    Reads the hostfile, if there is one.
    """
    if ssh.hostfile is not None:
        return _read_hostfile(Path(ssh.hostfile).expanduser())
    hosts = tuple(host for text in ssh.hosts if (host := parse_host(text)) is not None)
    problems = list(host_problems(ssh))
    if not ssh.hosts:
        text = (
            "names no host. List them, rank 0 first: launch.ssh.hosts=[gpu1,gpu2]; or name a file "
            "with one a line: launch.ssh.hostfile=hosts.txt."
        )
        problems.append(Problem(_SETTING, text))
    return hosts, problems


def _read_hostfile(path: Path) -> tuple[tuple[SshHost, ...], list[Problem]]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not a text file"
        text = f"={path} cannot be read: {why}. Give a file with one host a line."
        return (), [Problem(_FILE_SETTING, text)]
    hosts, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host_of_line(words)
        if host is None:
            problems.append(
                Problem(
                    _FILE_SETTING, f"={path}, line {number}: {line.strip()[:100]!r} is not {_LINE}."
                )
            )
        else:
            hosts.append(host)
    if not hosts and not problems:
        problems.append(Problem(_FILE_SETTING, f"={path} names no host. Write one a line: gpu1."))
    problems += _repeated(hosts, _FILE_SETTING)
    return tuple(hosts), problems


def _host_of_line(words: Sequence[str]) -> SshHost | None:
    name, *rest = words
    if not rest:
        return parse_host(name)
    match = re.fullmatch(r"slots=([1-9]\d{0,4})", rest[0], re.ASCII)
    return parse_host(name, slots=int(match[1])) if match and len(rest) == 1 else None


def _repeated(hosts: Iterable[SshHost], setting: str) -> Iterator[Problem]:
    seen = set()
    for host in hosts:
        key = (host.name, host.port)
        if key in seen:
            text = (
                f" names {host.text} twice: two nodes would take the same devices. Name each host "
                "once, and set cluster.devices to the devices of a host."
            )
            yield Problem(setting, text.strip())
        seen.add(key)
