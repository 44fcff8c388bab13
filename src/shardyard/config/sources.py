"""Sources of data: one row for each scheme of an address, and patterns in paths and addresses.

The file in ``data/stores/`` that a row names does the work. All code that has to know what
can be read asks the table.

A name that exists is literal, with any characters: ``runs[1]/*.txt`` lists the folder
``runs[1]``, where there is one. Only a name that does not exist is read as a pattern.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.secrets import without_secrets
from shardyard.errors import RequestError
from shardyard.plugins import load_entry_point, load_object, plug_in_named

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One kind of place."""

    code: str
    """module:class of its ``data.stores.base.Store``."""
    package: str | None = None
    """To install, where none of our extras brings it."""


LOCAL = Scheme(code="shardyard.data.stores.local:LocalStore")
"""A path, which has no scheme."""

_HTTP = Scheme(code="shardyard.data.stores.http:HttpStore")
_FSSPEC = "shardyard.data.stores.fsspec_files:FsspecStore"

SCHEMES: dict[str, Scheme] = {
    "s3": Scheme(code="shardyard.data.stores.s3:S3Store"),
    "http": _HTTP,
    "https": _HTTP,
    "gs": Scheme(code=_FSSPEC, package="gcsfs"),
    "az": Scheme(code=_FSSPEC, package="adlfs"),
    "abfs": Scheme(code=_FSSPEC, package="adlfs"),
    "hf": Scheme(code="shardyard.data.stores.hub:HubStore"),
    "hdfs": Scheme(code=_FSSPEC, package="pyarrow"),
    "oci": Scheme(code=_FSSPEC, package="ocifs"),
    "sftp": Scheme(code=_FSSPEC, package="paramiko"),
}
"""Scheme, the part of an address before :// -> code that reads it."""


TEXT_OF_PYTHON = "python-stdlib"
DIGITS = "digits"
"""Names in data.source of what is always there: text, and pictures."""


def is_name(entry: str) -> bool:
    """Whether an entry of data.source is no place, but names what is always there."""
    return entry == TEXT_OF_PYTHON or (entry == DIGITS and not Path(entry).exists())


def scheme_of(entry: str) -> str | None:
    """The scheme of an entry of data.source; None: it is a path."""
    found = _URL.match(entry)
    return None if found is None else found[1]


def scheme_row(scheme: str) -> Scheme:
    """The row of a scheme, ours or a package's.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    ours = SCHEMES.get(scheme)
    if ours is not None:
        return ours
    row: Scheme = load_entry_point("sources", scheme, builtin=SCHEMES, validate=_validate_row)
    return row


def store_class(entry: str) -> Any:
    """Return the class that reads an entry of data.source, imported now.

    Raises:
        RequestError: As ``scheme_row``, or a package's code cannot be imported.
    """
    scheme = scheme_of(entry)
    if scheme is None:
        return load_object(None, LOCAL.code)
    return load_object(
        None if scheme in SCHEMES else plug_in_named("sources", scheme), scheme_row(scheme).code
    )


def _validate_row(content: Any) -> str:
    is_one = isinstance(content, Scheme)
    return "" if is_one else f"is {type(content).__name__}, not a shardyard.config.sources.Scheme"


def is_remote(entry: str) -> bool:
    """Whether an entry of data.source is no path, but the address of a place elsewhere."""
    return scheme_of(entry) is not None


def address_error(entry: str) -> str | None:
    """Why the address of a place cannot be read; None: it can be tried.

    Raises:
        AssertionError: It is a path.
    """
    found = _URL.match(entry)
    assert found is not None, entry
    scheme, rest = found.groups()
    try:
        scheme_row(scheme)
    except RequestError as error:
        return (
            f"is a URL that is not read: {error} Or copy the text to one of these, or here (`aws "
            "s3 cp --recursive`, `curl`, `hf download`); a path is written as it is."
        )
    may_hold_one = scheme in ("http", "https") or scheme not in SCHEMES
    if may_hold_one and without_secrets(entry) != entry:
        return (
            "holds what may be a password or a signature, and a recipe is kept and shown. Leave "
            "out the parts before @ and behind ?; credentials are taken from the environment."
        )
    if not rest.strip("/"):
        return f"names no place. Write {scheme}://, then a bucket or host, then a folder or file."
    return None


MAGIC = "*?["
"""Characters that make a pattern of a name."""


def has_magic(text: str) -> bool:
    """Whether a text can be a pattern."""
    return any(sign in text for sign in MAGIC)


def count_literal(parts: Sequence[str], exists: Callable[[str], bool]) -> int:
    """Leading parts that are literal: up to the first that can be a pattern and does not exist.

    Args:
        exists: Whether something has the name of some leading parts, joined by slashes.
    """
    for number, part in enumerate(parts):
        if has_magic(part) and not exists("/".join(parts[: number + 1])):
            return number
    return len(parts)


def split_pattern(path: str) -> tuple[str, str]:
    """The literal part of a path of this machine, and the pattern below it; empty: there is none.

    Raises:
        RuntimeError: It begins with the home folder of an unknown user.
    """
    expanded = str(Path(path).expanduser())
    parts = expanded.split("/")
    count = count_literal(parts, os.path.lexists)
    literal = "/".join(parts[:count]) or ("/" if expanded.startswith("/") else ".")
    return literal, "/".join(parts[count:])


def is_pattern(path: str) -> bool:
    """Whether a path of this machine is a pattern, and not the name of something."""
    return has_magic(path) and bool(split_pattern(path)[1])


def matches_of(path: str) -> Iterator[str]:
    """Paths of this machine that a pattern names; ``**`` goes through any number of folders."""
    literal, pattern = split_pattern(path)
    escaped = glob.escape(literal)
    yield from glob.iglob(os.path.join(escaped, pattern), recursive=True)  # noqa: PTH118, PTH207


def escape_hint(path: str) -> str:
    """Return advice for a pattern with brackets that matches no file; empty without brackets."""
    if "[" not in path:
        return ""
    return " A bracket that belongs to a name is written [[]."
