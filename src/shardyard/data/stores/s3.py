"""Buckets of S3 and what speaks as it does: each range is asked for by the etag that was listed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from functools import cache
from typing import Any

from shardyard.aws import code_of, errors_of_s3, s3_client
from shardyard.data.spans import SourceFile, shown
from shardyard.data.stores.base import Found
from shardyard.data.stores.ranged import READ_AGAIN, RangedStore, changed
from shardyard.errors import RequestError, ShardyardError

_RIGHTS = "s3:ListBucket on the bucket and s3:GetObject on its objects"
_BLOCK_BYTES = 2**18


class S3Store(RangedStore):
    """Objects of buckets; what begins with the same folder's name is a folder."""

    def look(self, url: str) -> Found | None:
        bucket, key = _split(url)
        if not key:
            return None
        try:
            with _errors("look at", url):
                about = _client().head_object(Bucket=bucket, Key=key)
        except ShardyardError as error:
            if code_of(error) in _GONE:
                return None
            raise
        return Found(url, url, about["ContentLength"], about["ETag"])

    def below(self, prefix: str) -> Iterator[Found]:
        bucket, begins = _split(prefix)
        with _errors("list", prefix):
            pages = _client().get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=bucket, Prefix=begins):
                for each in page.get("Contents", []):
                    url = f"s3://{bucket}/{each['Key']}"
                    if not url.endswith("/"):  # what some tools write for a folder
                        yield Found(url, url, each["Size"], each["ETag"])

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
        if answer["ETag"] != file.version:  # of a store that does not know IfMatch
            raise changed(file, _CHANGED["412"])
        with closing(answer["Body"]) as body, _errors("read", file.path):
            yield from body.iter_chunks(_BLOCK_BYTES)


_GONE = frozenset({"404", "NoSuchKey", "NotFound"})
_CHANGED = {
    "PreconditionFailed": "its etag is another one",
    "412": "its etag is another one",
    "InvalidRange": "it is shorter",
    "416": "it is shorter",
    **dict.fromkeys(_GONE, "it is gone"),
}


def _errors(doing: str, url: str) -> AbstractContextManager[None]:
    bucket = _split(url)[0]
    again = READ_AGAIN.partition("then ")[2].rstrip(".")
    return errors_of_s3(f"{doing} {shown(url)}", bucket, rights=_RIGHTS, again=again)


@cache
def _client() -> Any:
    """One a process: it takes half a second to make. What gets lost is asked for again by us."""
    return s3_client(attempts=2)


def _split(url: str) -> tuple[str, str]:
    """Bucket and key of an address.

    Raises:
        RequestError: It names no bucket.
    """
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise RequestError(
            f"data.source={shown(url)!r} names no bucket. Give s3://bucket/folder, "
            "s3://bucket/file.jsonl or s3://bucket/folder/*.parquet."
        )
    return bucket, key
