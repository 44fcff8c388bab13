"""Where text can come from, and what is made of it: one row each, without the code that does it.

The file in ``data/stores/`` that a row names does the work.
"""

import re
from dataclasses import dataclass

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """One kind of place, by what its addresses begin with."""

    code: str
    """module:class of its ``data.stores.base.Store``."""
    example: str
    """Of an entry of data.source."""
    package: str | None = None
    """Package to install for it, where neither we nor an extra of ours bring it."""


HERE = Scheme(code="shardyard.data.stores.local:LocalStore", example="./my-text")
"""Paths, which have no scheme."""

_S3 = Scheme(code="shardyard.data.stores.s3:S3Store", example="s3://bucket/folder")

SCHEMES: dict[str, Scheme] = {
    "s3": _S3,
}
"""Scheme of a URL -> where it is read."""


def scheme_of(entry: str) -> str | None:
    """The scheme of an entry of data.source in lower case; None: it is a path."""
    found = _URL.match(entry)
    return None if found is None else found[1].lower()


def is_remote(entry: str) -> bool:
    """Whether an entry of data.source is no path, but the address of a place elsewhere."""
    return scheme_of(entry) is not None
