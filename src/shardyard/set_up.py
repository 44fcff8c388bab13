"""Causes on the worker's own machine that keep it from joining the others, and their settings.

A lost peer breaks the same call: such errors stay as they are, and cost a restart.
"""

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shardyard.errors import SetUpError, ShardyardError
from shardyard.network_interface import VARIABLE, problem_of

_NO_INTERFACE = "Unset it, or name an interface of `ip -brief address`."
# Words of gloo, NCCL and torch (a regular expression) -> variable that chooses, what to do. The
# first that is found counts.
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"ifa != nullptr|Unable to find address for|bindToInterface", VARIABLE, _NO_INTERFACE),
    (
        r"(?i)no (socket )?interface found|no usable listening interface|NCCL_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        _NO_INTERFACE,
    ),
    (
        r"(?i)gethostname|getaddrinfo|Unable to resolve hostname|File name too long",
        "the host name",
        "Give the machine a name of at most 63 letters that /etc/hosts or DNS knows.",
    ),
    (
        r"(?i)address family not supported|cannot assign requested address|rv != -1.*bind",
        VARIABLE,
        "Name an interface that has an address: `ip -brief address`.",
    ),
    (
        r"(?i)too many open files",
        "the limit of open files",
        "Raise it before the start: `ulimit -n 65536`.",
    ),
    (r"(?i)invalid device ordinal", "CUDA_VISIBLE_DEVICES", "Lower cluster.devices, or unset it."),
)
_OF_PEERS = re.compile(
    r"(?i)connection (closed|reset|refused)|broken pipe|timed? ?out|connect(ing|ion)? .*failed"
)


@contextmanager
def translate_set_up_errors(environ: Mapping[str, str]) -> Iterator[None]:
    """Turn what the machine itself prevents into an error that names the setting.

    Raises:
        SetUpError: A restart would end the same way, and no node is to blame.
    """
    try:
        yield
    except ShardyardError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        told = describe_set_up_error(str(error), environ)
        if told is None:
            raise
        raise SetUpError(told) from error


def describe_set_up_error(error_text: str, environ: Mapping[str, str]) -> str | None:
    """Return the local cause of a failed start, with its setting; None: it may be a lost peer.

    Args:
        error_text: Text of the error.
    """
    if _OF_PEERS.search(error_text):
        return None
    if "ifa != nullptr" in error_text and (problem := problem_of(environ)):
        return problem
    for pattern, name, remedy in _CAUSES:
        if re.search(pattern, error_text):
            value = environ.get(name)
            setting = name if value is None else f"{name}={value}"
            line = (
                error_text.strip().splitlines()[-1]
                if "enforce fail" in error_text
                else _first_line(error_text)
            )
            return (
                f"no process of {socket.gethostname()} can join the others "
                f"({line.strip().removesuffix('.')}). Check {setting}. {remedy}"
            )
    return None


def _first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), text)
