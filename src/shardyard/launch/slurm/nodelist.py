"""The first host of Slurm's short form of a list of hosts, ``node[1-3,07],gpu5``.

Slurm's own ``scontrol show hostnames`` writes such a list out, but is not in every container.
Source: https://slurm.schedmd.com/scontrol.html (show hostnames) and the list's grammar in
src/common/hostlist.c: comma-separated names, each with any number of bracketed ranges; the width
of a range's first number, leading zeros included, is that of all its names.
"""

import re

from shardyard.errors import RequestError

_ENTRY = re.compile(r"(?:\[[^\[\]]+\]|[^\[\],]+)+")
_BRACKET = re.compile(r"\[([^\[\]]+)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def first_host(nodelist: str) -> str:
    """The first host of a list: node 0 of a job.

    Raises:
        RequestError: It does not begin as such a list does.
    """
    entry = re.split(r",(?![^\[]*\])", nodelist.strip())[0]  # commas outside of brackets
    if not _ENTRY.fullmatch(entry):
        raise _wrong(nodelist)
    return _BRACKET.sub(lambda bracket: _first_number(bracket[1], nodelist), entry)


def _first_number(ranges: str, nodelist: str) -> str:
    found = [_RANGE.fullmatch(text) for text in ranges.split(",")]
    for match in found:
        if match is None or int(match[1]) > int(match[2] or match[1]):
            raise _wrong(nodelist)
    assert found[0] is not None
    return found[0][1]


def _wrong(nodelist: str) -> RequestError:
    return RequestError(
        f"the list of nodes {nodelist!r} is not of the form node[1-3,7],other5. The first host of "
        "SLURM_JOB_NODELIST serves the rendezvous. Compare with `scontrol show hostnames`, and "
        "check what sets that variable."
    )
