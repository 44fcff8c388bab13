"""Buckets of S3 and compatible stores: each range is read by the etag that was listed."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import cache
from typing import Any

from shardyard.data.byte_ranges import SourceFile, escape_text
from shardyard.data.stores.base import ListedFile
from shardyard.data.stores.range_reader import READ_AGAIN, RangedStore, changed
from shardyard.errors import LostError, RequestError, ShardyardError
from shardyard.io.aws import code_of, s3_client, translate_s3_errors

_RIGHTS = "s3:ListBucket on the bucket and s3:GetObject on its objects"
_BUCKET = re.compile(r"[a-zA-Z0-9._-]{1,255}", re.ASCII)
_BLOCK_BYTES = 2**18


class S3Store(RangedStore):
    """Objects of buckets; what begins with the same folder's name is a folder."""

    def stat(self, url: str) -> ListedFile | None:
        key = _split(url)[1]
        first = next(self._listed(url, most=1), None)  # the key itself comes before longer ones
        return first if key and first is not None and first.path == url else None

    def below(self, prefix: str) -> Iterator[ListedFile]:
        yield from self._listed(prefix)

    def _listed(self, prefix: str, *, most: int | None = None) -> Iterator[ListedFile]:
        bucket, begins = _split(prefix)
        pages = _client().get_paginator("list_objects_v2")
        some = {} if most is None else {"MaxItems": most, "PageSize": most}
        with _errors("list", prefix):
            for page in pages.paginate(Bucket=bucket, Prefix=begins, PaginationConfig=some):
                if "IsTruncated" not in page:  # an answer without its body reads as an empty one
                    raise LostError(f"{escape_text(prefix)} was listed in part. {READ_AGAIN}")
                for each in page.get("Contents", []):
                    url = f"s3://{bucket}/{each['Key']}"
                    if not url.endswith("/"):  # what some tools write for a folder
                        yield ListedFile(url, url, each["Size"], each["ETag"])

    def read(self, file: SourceFile, start: int, stop: int) -> Iterator[bytes]:
        bucket, key = _split(file.path)
        part = f"bytes={start}-{stop - 1}"
        try:
            with _errors("read", file.path):
                answer = _client().get_object(
                    Bucket=bucket, Key=key, IfMatch=file.version, Range=part
                )
        except ShardyardError as error:
            why = _CHANGED.get(code_of(error))
            if why is None:
                raise
            raise changed(file, why) from error
        with closing(answer["Body"]) as body, _errors("read", file.path):
            _check_response(answer, file, start, stop)
            yield from body.iter_chunks(_BLOCK_BYTES)


def _check_response(answer: dict[str, Any], file: SourceFile, start: int, stop: int) -> None:
    """Raise unless an answer is the part of the version that was asked for.

    Raises:
        SourceError: It is of another version: the store does not know conditions.
        LostError: The connection broke before the answer had said what it is.
    """
    etag, part = answer.get("ETag", ""), answer.get("ContentRange", "")
    if not str(file.version).startswith(etag):
        raise changed(file, _CHANGED["412"])
    if (etag, part) != (file.version, f"bytes {start}-{stop - 1}/{file.size_bytes}"):
        raise LostError(
            f"{escape_text(file.path)}: an answer was cut off, or is not the part that was "
            f"asked for ({escape_text(part)}). {READ_AGAIN}"
        )


_GONE = frozenset({"404", "NoSuchKey", "NotFound"})
_CHANGED = {
    "PreconditionFailed": "its etag is another one",
    "412": "its etag is another one",
    "InvalidRange": "it is shorter",
    "416": "it is shorter",
    **dict.fromkeys(_GONE, "it is gone"),
}


def _errors(activity: str, url: str) -> AbstractContextManager[None]:
    bucket = _split(url)[0]
    again = READ_AGAIN.partition("then ")[2].rstrip(".")
    return translate_s3_errors(
        f"{activity} {escape_text(url)}", bucket, rights=_RIGHTS, retry_hint=again
    )


@cache
def _client() -> Any:
    """Return the process's one client, which takes half a second to create.

    Our own code retries lost requests.
    """
    return s3_client(attempts=2)


def _split(url: str) -> tuple[str, str]:
    """Bucket and key of an address.

    Raises:
        RequestError: It names no bucket.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise RequestError(
            f"data.source={escape_text(url)!r} names no bucket that can be. Give "
            "s3://bucket/folder, s3://bucket/file.jsonl or s3://bucket/folder/*.parquet."
        )
    return bucket, key
