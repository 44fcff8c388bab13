"""Everything else that fsspec knows, by the package that speaks to it.

What a package says of a file, its etag above all, is its version; asked again after each range.
"""

from collections.abc import Iterator
from typing import Any

from shardyard.config.sources import scheme_row
from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import ListedFile
from shardyard.data.stores.range_reader import READ_AGAIN, RangedStore, changed
from shardyard.errors import AccessError, LostError, RequestError, ShardyardError

_PAGE = "verbs/prepare#remote-data"

_VERSIONS = ("etag", "ETag", "generation", "content_md5", "blob_id", "mtime", "modify", "created")
"""Keys by which packages report a content version of a file, the most reliable first."""


class FsspecStore(RangedStore):
    """Files of any file system of fsspec."""

    def stat(self, url: str) -> ListedFile | None:
        files, path = _files_of(url)
        try:
            about = files.info(path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _translate_error(url, error) from error
        return None if about["type"] != "file" else _listed_file(url, about)

    def below(self, prefix: str) -> Iterator[ListedFile]:
        folder = prefix.rpartition("/")[0]
        files, path = _files_of(folder)
        try:
            listed = files.find(path, detail=True)
        except Exception as error:
            raise _translate_error(prefix, error) from error
        # packages write paths in ways of their own; below the folder all are alike
        root = files._strip_protocol(path).rstrip("/")
        for name, about in listed.items():
            below = files._strip_protocol(name).removeprefix(root).lstrip("/")
            url = f"{folder}/{below}"
            if below and url.startswith(prefix):
                yield _listed_file(url, about)

    def read(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        files, path = _files_of(file.path)
        try:
            content = files.cat_file(path, start=start, end=stop)
            self._check_unchanged(files, path, file)  # afterwards: what came before shows too
        except FileNotFoundError as error:
            raise changed(file, "it is gone") from error
        except ShardyardError:
            raise
        except Exception as error:
            raise _translate_error(file.path, error) from error
        yield content

    def _check_unchanged(self, files: Any, path: str, file: SourceFile) -> None:
        files.invalidate_cache()
        now = _listed_file(file.path, files.info(path))
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
            f"{escape_text(url)} is read with {with_which}, which is not installed "
            f"({error}).{install}"
        ) from error
    except Exception as error:
        raise _translate_error(url, error) from error
    return files, path


def _listed_file(url: str, about: dict[str, Any]) -> ListedFile:
    version = next((about[name] for name in _VERSIONS if about.get(name)), None)
    if about.get("size") is None or version is None:
        raise RequestError(
            f"{escape_text(url)}: neither its size nor its version is known there, so a change "
            "while it is read would go unnoticed. Copy it here and give the path."
        )
    return ListedFile(url, url, int(about["size"]), str(version))


def _translate_error(url: str, error: Exception) -> ShardyardError:
    """Convert an error of a package into one of ours."""
    why = f"{type(error).__name__}: {escape_text(' '.join(str(error).split())[:300])}"
    where = f"{escape_text(url)} cannot be read ({why})"
    if isinstance(error, PermissionError):
        return AccessError(
            f"{where}. Log in as its package wants it, or have the right to read added.", page=_PAGE
        )
    if isinstance(error, ConnectionError | TimeoutError):
        return LostError(f"{where}. {READ_AGAIN}")
    return RequestError(
        f"{where}. Correct the address and its package's configuration, or copy the text here."
    )
