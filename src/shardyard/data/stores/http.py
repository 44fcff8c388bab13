"""Single files of web servers, read by ranges: each answer must be of the version that was found.

No package is needed for it: what a client brings beyond Python's own (sessions, pools, several
requests in flight) is of no use to one process that reads one file.
"""

import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import ListedFile
from shardyard.data.stores.range_reader import READ_AGAIN, RangedStore, changed, retry_on_disconnect
from shardyard.errors import AccessError, LostError, RequestError, ShardyardError

_PAGE = "verbs/prepare#remote-data"

_TIMEOUT_S = 15.0
"""Without a byte; with what ``range_reader.py`` waits in all, a minute is not passed."""
_BLOCK_BYTES = 2**18
_DOWNLOAD = "Download it (`curl -LO`) and give the path."
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


class HttpStore(RangedStore):
    """Files, each by its whole address: a web server has no folders that can be listed."""

    def find(self, entry: str, *, own: Collection[Path]) -> Iterator[ListedFile]:  # noqa: ARG002
        yield retry_on_disconnect(lambda: self.stat(entry))

    def stat(self, url: str) -> ListedFile:
        """Ask for the first byte, as not every server answers HEAD.

        Raises:
            RequestError: There is no such file, or it cannot be read by ranges.
        """
        with _opened(url, 0, 1) as answer:
            size_bytes = _sent(answer, url)[2]
            version = _version(answer.headers)
        if version is None:
            raise RequestError(
                f"{escape_text(url)}: the server says neither ETag nor Last-Modified, so a change "
                f"while it is read would go unnoticed. {_DOWNLOAD}"
            )
        name = urlsplit(url).path.rpartition("/")[2]
        return ListedFile(url, name, size_bytes, version, below="")

    def below(self, prefix: str) -> Iterator[ListedFile]:
        """Raise, because HTTP has no listing of folders."""
        raise NotImplementedError(prefix)

    def read(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        with _opened(file.path, start, stop) as answer:
            version = _version(answer.headers) or ""
            if not str(file.version).startswith(version):
                raise changed(file, "its ETag or Last-Modified is another one")
            if version != file.version:
                raise LostError(f"{escape_text(file.path)}: an answer was cut off. {READ_AGAIN}")
            if _sent(answer, file.path) != (start, stop, file.size_bytes):
                raise changed(file, "its size is another one")
            while block := answer.read(_BLOCK_BYTES):
                yield block


def _version(headers: Mapping[str, str]) -> str | None:
    return headers.get("ETag") or headers.get("Last-Modified")


def _sent(answer: Any, url: str) -> tuple[int, int, int]:
    """First byte, byte behind the last, and size of the file; the first two are 0 of an empty one.

    Raises:
        RequestError: The server sends no ranges.
        LostError: The connection broke before the answer had said what it is.
    """
    found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status not in (206, 416):
        raise RequestError(
            f"{escape_text(url)}: the server sends the whole file where a part was asked for, and "
            f"files are read in parts. {_DOWNLOAD}"
        )
    if found is None:
        raise LostError(f"{escape_text(url)}: an answer was cut off. {READ_AGAIN}")
    first, last, size_bytes = found.groups()
    return (int(first), int(last) + 1, int(size_bytes)) if first else (0, 0, int(size_bytes))


# No ftp: and file:, which a redirect could lead to, and which urllib's usual opener knows.
_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.UnknownHandler,
):
    _OPENER.add_handler(_handler())


@contextmanager
def _opened(url: str, start: int, stop: int) -> Iterator[Any]:
    """The answer for bytes [start, stop) of a file; 416 is an answer too.

    Raises:
        LostError: The connection broke, or the server failed.
        AccessError: It may not be read.
        RequestError: It is not there.
    """
    # An address is taken as a browser's bar takes it: with spaces, or with their escapes.
    request = urllib.request.Request(
        quote(url, safe="%/:=&?~#+!$,;'@()*[]"),
        headers={
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
            "User-Agent": "shardyard",
        },
    )
    try:
        with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 416 or start:
                raise _http_error(url, error) from error
            yield error
    except (OSError, http.client.HTTPException) as error:
        reason: object = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise RequestError(
                f"{escape_text(url)}: the server's certificate is not trusted "
                f"({reason.verify_message}). "
                f"Correct the address, or name your own authorities with SSL_CERT_FILE. {_DOWNLOAD}"
            ) from error
        raise LostError(f"{escape_text(url)} cannot be read: {reason}. {READ_AGAIN}") from error


def _http_error(url: str, error: urllib.error.HTTPError) -> ShardyardError:
    where = f"{escape_text(url)}: the server answers {error.code} {escape_text(str(error.reason))}"
    if error.code >= 500 or error.code in (408, 429):
        return LostError(f"{where}. {READ_AGAIN}")
    if error.code in (401, 403, 407):
        return AccessError(
            f"{where}. Only what anybody may read is read from web servers. Fetch it with your "
            "credentials and give the path, or give its place as s3:// or hf://.",
            page=_PAGE,
        )
    return RequestError(f"{where}. Correct the address, or take it out of data.source.")
