"""Datasets of the Hugging Face hub: the files of a repository at one commit, read by ranges.

    hf://owner/name                      all of it, at the newest commit
    hf://owner/name@v1.0                 at a branch, tag or commit
    hf://owner/name/data/part.parquet    a file, folder or glob
    hf://owner/name/train                a split, where no folder has that name

The address of each file contains a commit, so the content is pinned when it is listed. Requests
go through the hub client (tokens, endpoint, offline), but not its cache: a corpus may be larger
than a disk.
"""

import glob
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import unquote

from shardyard.config.model.hub_errors import translate_hub_errors
from shardyard.config.sources import count_literal
from shardyard.config.split_names import ABOUT, KEYWORDS
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import ListedFile, is_hidden
from shardyard.data.stores.range_reader import READ_AGAIN, RangedFile, changed, matcher
from shardyard.errors import CapacityError, LostError, RequestError

_ADDRESS = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/convert/\w+|refs/pr/\d+|[^/]+))?(?:/(?P<path>.*))?",
    re.DOTALL,
)
_OTHER_KINDS = ("models/", "spaces/", "buckets/", "kernels/")
_SPLIT = r"(?:^|[-._ 0-9/]){}(?:[-._ 0-9/]|$)"
"""Pattern of a split's name in the path of its files, as the datasets library has it."""
_TIMEOUT_S = 10.0
_SHOWN = 6


@dataclass(frozen=True)
class _DatasetAddress:
    """Parts of a dataset address on the hub."""

    entry: str
    name: str
    revision: str | None
    path: str

    @property
    def words(self) -> str:
        return f"data.source={escape_text(self.entry)}"


@dataclass(frozen=True)
class _Listing:
    """A repository at a commit."""

    commit: str
    files: Mapping[str, tuple[int, str]]
    """Path -> bytes, and a digest of its content."""


class HubStore:
    """Files of datasets on the Hugging Face hub."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:  # noqa: ARG002
        """Files of a dataset, of one of its folders or splits, or of a glob, by their names.

        Raises:
            RequestError: There is no such dataset, revision or file; or a script makes it.
            AccessError: A token is missing, or of somebody who may not read it.
            CapacityError: The hub cannot be reached.
        """
        place = _parse_address(entry)
        with translate_hub_errors(place.words, setting="data.source"):
            listing = _listed(place.name, place.revision)
        pattern = _pattern_of(place, listing)
        literal = place.path.removesuffix(pattern).rstrip("/")
        for path in _paths(place, listing):
            size_bytes, version = listing.files[path]
            url = f"hf://{place.name}@{listing.commit}/{path}"
            name = path.removeprefix(f"{place.path}/")
            is_inside = not literal or path.startswith(f"{literal}/")  # else a file, or of a split
            below = path.removeprefix(f"{literal}/") if is_inside else ""
            yield ListedFile(url, name, size_bytes, version, below=below, pattern=pattern)

    def open(self, file: SourceFile) -> BinaryIO:
        """A file to read and seek in; bytes are asked for when they are read."""
        return cast(BinaryIO, io.BufferedReader(RangedFile(file, _read)))


def _parse_address(entry: str) -> _DatasetAddress:
    found = _ADDRESS.fullmatch(entry)
    if found is None or entry.removeprefix("hf://").startswith(_OTHER_KINDS):
        raise RequestError(
            f"data.source={escape_text(entry)!r} names no dataset of the Hugging Face hub. Write "
            "hf://owner/name, with @revision behind it if you want one, and a path, glob or split "
            "behind a slash: hf://owner/name@main/data/*.parquet."
        )
    revision = None if found["revision"] is None else unquote(found["revision"])
    return _DatasetAddress(entry, found["name"], revision, (found["path"] or "").strip("/"))


@lru_cache(maxsize=64)
def _listed(name: str, revision: str | None) -> _Listing:
    """Return one listing per process: a branch that moves meanwhile has no effect."""
    from huggingface_hub import HfApi

    about = HfApi().dataset_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
    assert about.sha is not None
    files = {
        file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else str(file.blob_id))
        for file in about.siblings or ()
    }
    return _Listing(about.sha, files)


def _pattern_of(address: _DatasetAddress, listing: _Listing) -> str:
    """The part of an address's path that is a pattern; empty: there is none."""

    def exists(name: str) -> bool:
        return name in listing.files or any(path.startswith(f"{name}/") for path in listing.files)

    parts = address.path.split("/")
    return "/".join(parts[count_literal(parts, exists) :])


def _paths(address: _DatasetAddress, listing: _Listing) -> list[str]:
    """Files of a repository that an address names, in the order of their names."""
    everything = sorted(listing.files)
    if address.path in listing.files:
        return [address.path]
    pattern = _pattern_of(address, listing)
    if pattern:
        literal = glob.escape(address.path.removesuffix(pattern))
        fits: Callable[[str], object] = matcher(f"{literal}{pattern}")
    elif any(path.startswith(f"{address.path}/") for path in everything):
        fits = partial(_is_below, address.path)
    else:
        script = f"{address.name.partition('/')[2]}.py"
        if script in listing.files:
            raise RequestError(
                f"{address.words}: the dataset is made by a script, {script}, and code of others "
                "is not run. The hub keeps many of them as Parquet too: try "
                f"hf://{address.name}@refs/convert/parquet; or name files of it, if it has any."
            )
        fits = _of_split(address.path, everything)
    found = [path for path in everything if fits(path)]
    if not found:
        few = ", ".join(escape_text(path) for path in everything if _is_text(path)) or "none"
        raise RequestError(
            f"{address.words}: the dataset at commit {listing.commit[:12]} has no file, folder or "
            f"split of that name; its files: {_shorten(few)}. Correct the part behind its name."
        )
    return found


def _of_split(split: str, paths: Sequence[str]) -> Callable[[str], object]:
    """Whether a file is of a split; where none has its name, of one of the same meaning: ``valid``
    for ``validation``. Everything, if no split is named."""
    if not split:
        return _is_text
    pattern = re.compile(_SPLIT.format(re.escape(split)))
    same = [word for word in KEYWORDS if KEYWORDS[word] == KEYWORDS.get(split)]
    if same and not any(_is_text(path) and pattern.search(path) for path in paths):
        pattern = re.compile(_SPLIT.format(f"(?:{'|'.join(same)})"))
    return lambda path: _is_text(path) and pattern.search(path)


def _is_text(path: str) -> bool:
    return not is_hidden(path) and ABOUT.fullmatch(path) is None


def _is_below(folder: str, path: str) -> bool:
    return path.startswith(f"{folder}/") and not is_hidden(path.removeprefix(f"{folder}/"))


def _shorten(words: str) -> str:
    names = words.split(", ")
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _read(file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
    """Like ``ReadRange``; content at a commit does not change."""
    from huggingface_hub import hf_hub_url

    client: Any = import_module("huggingface_hub.utils")  # public names, without types

    place = _parse_address(file.path)
    url = hf_hub_url(place.name, place.path, repo_type="dataset", revision=place.revision)
    headers = {
        **client.build_hf_headers(),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    try:
        with translate_hub_errors(place.words, setting="data.source"):
            answer = client.get_session().get(url, headers=headers, timeout=_TIMEOUT_S)
            client.hf_raise_for_status(answer)
    except CapacityError as error:
        raise LostError(
            f"{escape_text(file.path)} cannot be read: {error.__cause__}. {READ_AGAIN}"
        ) from error
    if answer.status_code != 206 or len(answer.content) > stop - start:
        raise changed(file, "the hub sends other bytes than were asked for")
    yield answer.content
