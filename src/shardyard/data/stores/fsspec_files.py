"""Everything else that fsspec knows, by the package that speaks to it.

What a package says of a file, its etag above all, is its version; asked again after each range.
"""

from collections.abc import Iterator
from typing import Any

from shardyard.config.sources import scheme_row
from shardyard.data.byte_ranges import SourceFile, shown
from shardyard.data.stores.base import Found
from shardyard.data.stores.range_reader import READ_AGAIN, RangedStore, changed
from shardyard.errors import AccessError, LostError, RequestError, ShardyardError

_VERSIONS = ("etag", "ETag", "generation", "content_md5", "blob_id", "mtime", "created")
"""What packages call what changes with a file's content, the surest first."""


class FsspecStore(RangedStore):
    """Files of any file system of fsspec."""

    def look(self, url: str) -> Found | None:
        files, path = _files_of(url)
        try:
            about = files.info(path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _told(url, error) from error
        return None if about["type"] != "file" else _found(url, about)

    def below(self, prefix: str) -> Iterator[Found]:
        folder = prefix.rpartition("/")[0]
        files, path = _files_of(folder)
        try:
            listed = files.find(path, detail=True)
        except Exception as error:
            raise _told(prefix, error) from error
        # packages write paths in ways of their own; below the folder all are alike
        root = files._strip_protocol(path).rstrip("/")
        for name, about in listed.items():
            below = files._strip_protocol(name).removeprefix(root).lstrip("/")
            url = f"{folder}/{below}"
            if below and url.startswith(prefix):
                yield _found(url, about)

    def read(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        files, path = _files_of(file.path)
        try:
            content = files.cat_file(path, start=start, end=stop)
            self._refuse_changed(files, path, file)  # afterwards: what came before shows too
        except FileNotFoundError as error:
            raise changed(file, "it is gone") from error
        except ShardyardError:
            raise
        except Exception as error:
            raise _told(file.path, error) from error
        yield content

    def _refuse_changed(self, files: Any, path: str, file: SourceFile) -> None:
        files.invalidate_cache()
        now = _found(file.path, files.info(path))
        if (now.size_bytes, now.version) != (file.size_bytes, file.version):
            raise changed(file, "its size or version is another one")


def _files_of(url: str) -> tuple[Any, str]:
    """A file system, and the path in it.

    Raises:
        RequestError: The package for it is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0]
    try:
        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = scheme_row(scheme).package or error.name
        with_which = "a package of fsspec's" if package is None else package
        install = "" if package is None else f" Install it: pip install {package}"
        raise RequestError(
            f"{shown(url)} is read with {with_which}, which is not installed ({error}).{install}"
        ) from error
    except Exception as error:
        raise _told(url, error) from error
    return files, path


def _found(url: str, about: dict[str, Any]) -> Found:
    version = next((about[name] for name in _VERSIONS if about.get(name)), None)
    if about.get("size") is None or version is None:
        raise RequestError(
            f"{shown(url)}: neither its size nor its version is known there, so a change while it "
            "is read would go unnoticed. Copy it here and give the path."
        )
    return Found(url, url, int(about["size"]), str(version))


def _told(url: str, error: Exception) -> ShardyardError:
    """What a package raised, as one of ours."""
    why = f"{type(error).__name__}: {shown(' '.join(str(error).split())[:300])}"
    where = f"{shown(url)} cannot be read ({why})"
    if isinstance(error, PermissionError):
        return AccessError(
            f"{where}. Log in as its package wants it, or have the right to read added."
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return LostError(f"{where}. {READ_AGAIN}")
    return RequestError(
        f"{where}. Correct the address and its package's configuration, or copy the text here."
    )
