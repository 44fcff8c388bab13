"""Objects below a prefix of a bucket: listed, written on conditions, and transferred in parts.

What uploads of exports and checkpoints share. ``s3://`` is S3, or a store that speaks its protocol
at ``AWS_ENDPOINT_URL``.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import LostError, RequestError, ShardyardError
from shardyard.io.aws import code_of, error_code, s3_client, translate_s3_errors
from shardyard.io.digests import validate_name

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)
_MIB = 2**20
_PART_BYTES = 32 * _MIB
"""Parts of 8 MiB, the client's own choice, meet S3's limit of requests on large checkpoints.
Source: github.com/awslabs/s3-connector-for-pytorch/issues/219."""
_PARTS_AT_ONCE = 4
_ATTEMPTS = 8
"""Requests in all, each after a longer random pause: for throttling, 5xx and lost answers."""
_POLL_S = 0.02

_RIGHTS = (
    "s3:ListBucket and s3:ListBucketMultipartUploads on the bucket; s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload on its objects"
)


@dataclass(frozen=True, kw_only=True)
class S3Location:
    """A bucket and what begins the keys in it."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{validate_name(name)}"

    def below(self, name: str) -> "S3Location":
        """Return the location of a folder in this one."""
        return S3Location(bucket=self.bucket, prefix=self.key(name))


def parse_location(text: str) -> S3Location:
    """Read ``s3://bucket/prefix``.

    Raises:
        RequestError: It is none, or has no prefix.
    """
    bucket, _, prefix = text.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    try:
        if not text.startswith("s3://") or not _BUCKET.fullmatch(bucket):
            raise ValueError(f"{bucket!r} is not a name of a bucket")
        if not prefix:
            raise ValueError("a prefix is missing, and objects of a whole bucket would be mixed")
        validate_name(prefix)
    except ValueError as error:
        raise RequestError(
            f"{text!r} is not a place in S3: {error}. Give s3://bucket/prefix, such as "
            "s3://my-models/llama2-7b-tuned."
        ) from error
    return S3Location(bucket=bucket, prefix=prefix)


class Stopped(Exception):  # noqa: N818 (no error: the caller asked for it)
    """A transfer ended early, because its caller asked for that."""


@dataclass(frozen=True)
class StoredObject:
    """An object, as a listing shows it."""

    name: str
    """Below the location."""
    bytes: int
    modified_t: float
    """When it was written, by the clock of the store."""


class ObjectStore:
    """Objects below one location.

    Args:
        retry_hint: What to do once a lost connection is fixed, for messages.
    """

    def __init__(self, location: S3Location, *, retry_hint: str) -> None:
        self.location = location
        self._retry_hint = retry_hint
        self._client = s3_client(attempts=_ATTEMPTS)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Yield objects whose names begin so, in the order of their names.

        Raises:
            ShardyardError: They cannot be listed; says why.
        """
        root = f"{self.location.prefix}/"
        pages = self._client.get_paginator("list_objects_v2")
        with self._errors("list"):
            for page in pages.paginate(Bucket=self.location.bucket, Prefix=root + prefix):
                for each in page.get("Contents", []):
                    name = each["Key"].removeprefix(root)
                    yield StoredObject(name, each["Size"], each["LastModified"].timestamp())

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return the content of a small object, and its version; None: there is none."""
        try:
            with self._errors(f"read {name} in"):
                answer = self._client.get_object(**self._where(name))
                with answer["Body"] as body:
                    return body.read(), answer["ETag"]
        except ShardyardError as error:
            if code_of(error) in ("NoSuchKey", "404"):
                return None
            raise

    def write(
        self, name: str, content: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str | None:
        """Write a small object in one request.

        Args:
            if_absent: Write only if there is no object of that name.
            if_version: Write only over this version.

        Returns:
            Its version; None: the condition does not hold.
        """
        conditions = {"IfNoneMatch": "*"} if if_absent else {}
        conditions |= {} if if_version is None else {"IfMatch": if_version}
        try:
            return self._put(name, content, conditions)
        except ShardyardError as error:
            code = code_of(error)
            if code in ("PreconditionFailed", "ConditionalRequestConflict", "412", "409"):
                return None
            if if_version is not None and code in ("NoSuchKey", "404"):
                return None
            if conditions and code == "NotImplemented":  # some stores know no conditions
                return self._put(name, content, {})
            raise

    def _put(self, name: str, content: bytes, conditions: dict[str, str]) -> str:
        with self._errors(f"write {name} to"):
            answer = self._client.put_object(**self._where(name), Body=content, **conditions)
        return str(answer["ETag"])

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there are none to remove.

        One request each: stores differ in what they accept of requests for several.
        """
        for name in names:
            with self._errors(f"remove {name} from"):
                self._client.delete_object(**self._where(name))

    def upload(self, name: str, path: Path, *, is_stopped: Callable[[], bool]) -> None:
        """Send a file, in parts if it is large. Parts of a failed upload are removed.

        Raises:
            Stopped: ``is_stopped`` turned true.
            OSError: The file cannot be read.
        """
        with self._errors(f"write {name} to"):
            self._transfer("upload", str(path), name, is_stopped)

    def download(self, name: str, path: Path, *, is_stopped: Callable[[], bool]) -> None:
        """Read an object into a file, by ranges if it is large.

        Raises:
            Stopped: ``is_stopped`` turned true.
            OSError: The file cannot be written.
        """
        with self._errors(f"read {name} in"):
            self._transfer("download", str(path), name, is_stopped)

    def _transfer(
        self, direction: str, path: str, name: str, is_stopped: Callable[[], bool]
    ) -> None:
        from boto3.s3.transfer import TransferConfig, create_transfer_manager
        from s3transfer.exceptions import RetriesExceededError

        config = TransferConfig(
            multipart_threshold=_PART_BYTES,
            multipart_chunksize=_PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE,
        )
        bucket, key = self.location.bucket, self.location.key(name)
        with create_transfer_manager(self._client, config) as manager:
            if direction == "upload":
                future = manager.upload(path, bucket, key)
            else:
                future = manager.download(bucket, key, path)
            while not future.done():
                if is_stopped():
                    future.cancel()
                    raise Stopped(name)
                time.sleep(_POLL_S)
            try:
                future.result()
            except RetriesExceededError as error:
                raise LostError(
                    f"cannot read {name} in {self.location}: connections end before all of it "
                    f"comes ({error.last_exception}). Check the network, then {self._retry_hint}."
                ) from error

    def abort_unfinished(self) -> int:
        """Remove the parts of uploads that were killed; returns how many uploads these were.

        Parts are billed until then, and no listing of objects shows them.
        """
        pages = self._client.get_paginator("list_multipart_uploads")
        where = {"Bucket": self.location.bucket}
        count = 0
        with self._errors("remove unfinished uploads in"):
            for page in pages.paginate(**where, Prefix=f"{self.location.prefix}/"):
                for each in page.get("Uploads", []):
                    self._abort(each["Key"], each["UploadId"])
                    count += 1
        return count

    def _abort(self, key: str, upload_id: str) -> None:
        from botocore.exceptions import ClientError

        try:
            self._client.abort_multipart_upload(
                Bucket=self.location.bucket, Key=key, UploadId=upload_id
            )
        except ClientError as error:
            if error_code(error) != "NoSuchUpload":  # its process ended it meanwhile
                raise

    def _where(self, name: str) -> dict[str, Any]:
        return {"Bucket": self.location.bucket, "Key": self.location.key(name)}

    def _errors(self, action: str) -> AbstractContextManager[None]:
        return translate_s3_errors(
            f"{action} {self.location}",
            self.location.bucket,
            rights=_RIGHTS,
            retry_hint=self._retry_hint,
        )
