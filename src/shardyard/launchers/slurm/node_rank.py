"""Place of a node of a batch job, as Slurm gives it: `--place slurm`."""

import itertools
import re
from collections.abc import Iterator

from shardyard.errors import RequestError
from shardyard.launchers.node_rank import NodeAssignment, Variables

# Slurm shortens a list of hosts: ``node[1-3,07],gpu5``.
#
# ``scontrol show hostnames`` writes it out too, but is not in every container.
# Source: https://slurm.schedmd.com/scontrol.html (show hostnames) and the list's grammar in
# src/common/hostlist.c: comma-separated names, each with any number of bracketed ranges. All names
# of a range have the width of its first number, leading zeros included.

_PART = re.compile(r"\[([^\[\]]+)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_HOSTS = 100_000
"""More than any cluster has: a typing error must not fill the memory."""


def hosts_in(nodelist: str) -> list[str]:
    """All hosts of a list, in its order.

    Raises:
        RequestError: It is no such list.
    """
    hosts = list(itertools.islice(_hosts_in(nodelist), _MOST_HOSTS + 1))
    if len(hosts) > _MOST_HOSTS:
        raise _format_error(nodelist)
    return hosts


def host_of(nodelist: str, node_rank: int) -> str:
    """The host of one node of a job, as they are counted from 0.

    Raises:
        RequestError: It is no such list, or has fewer.
    """
    # Read only as far as this node: the list of a large job is long.
    for host in itertools.islice(_hosts_in(nodelist), node_rank, None):
        return host
    raise _format_error(nodelist)


def _hosts_in(nodelist: str) -> Iterator[str]:
    for entry in _entries(nodelist):
        parts, end = [], 0
        for match in _PART.finditer(entry):
            if match.start() != end:
                break
            end = match.end()
            parts.append((match[2],) if match[1] is None else tuple(_numbers(match[1], nodelist)))
        if not entry or end != len(entry):
            raise _format_error(nodelist)
        yield from ("".join(names) for names in itertools.product(*parts))


def _entries(nodelist: str) -> Iterator[str]:
    """Split at commas outside of brackets."""
    return iter(re.split(r",(?![^\[]*\])", nodelist.strip()))


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise _format_error(nodelist)
        first, last = match[1], match[2] or match[1]
        if not int(first) <= int(last) < int(first) + _MOST_HOSTS:
            raise _format_error(nodelist)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _format_error(nodelist: str) -> RequestError:
    return RequestError(
        f"the list of nodes {nodelist!r} is not of the form node[1-3,7],other5. Node K of a "
        "job is host K of SLURM_JOB_NODELIST. Compare with `scontrol show hostnames`, and "
        "check what sets that variable."
    )


_PORTS = range(20000, 30000)
"""Below the ports that Linux gives to clients; jobs that share a node differ by their ids."""


def in_job(variables: Variables) -> NodeAssignment:
    """Read from the variables of sbatch(1)."""
    job, node_rank = variables.number("SLURM_JOB_ID"), variables.number("SLURM_NODEID")
    hosts = variables.text("SLURM_JOB_NODELIST")
    return NodeAssignment(
        node_rank=node_rank,
        nodes=variables.number("SLURM_JOB_NUM_NODES"),
        host=host_of(hosts, 0),
        own_host=host_of(hosts, node_rank),
        port=_PORTS[job % len(_PORTS)],
        session=f"{job}.{variables.number('SLURM_RESTART_COUNT', 0)}",  # unset at the first start
    )
