"""Uploads to S3 and downloads: S3 gets the SHA-256 of all files, ``complete.json`` goes last.

A prefix that holds ``complete.json`` is whole. Before it is written each object is checked:
its size, and the checksum that S3 itself computed. A store without checksums is read back
instead. So a killed call can be repeated, and sends only missing files.
"""

import base64
import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.errors import AccessError, DataError, RequestError, ShardyardError
from shardyard.io.aws import error_code, translate_s3_errors
from shardyard.io.digests import (
    COMPLETE,
    FileDigest,
    FolderDigests,
    parse_digests,
)
from shardyard.io.object_store import S3Location
from shardyard.transfer.download import ProgressCallback
from shardyard.units import format_bytes

_MIB = 2**20
PART_BYTES = 64 * _MIB
"""Held in memory once."""
_MOST_PARTS = 10_000
"""Source: docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
_BLOCK_BYTES = _MIB

_RIGHTS = (
    "s3:ListBucket on the bucket; s3:PutObject, s3:GetObject, s3:DeleteObject and "
    "s3:AbortMultipartUpload on its objects"
)


def is_s3(text: str) -> bool:
    """Whether a text names a place in S3."""
    return text.startswith("s3:")


def check_access(client: Any, location: S3Location) -> None:
    """Ask for a place before hours go into what is to be sent there.

    Raises:
        RequestError: There is no such bucket, or it is elsewhere.
        AccessError: Credentials or rights are missing.
    """
    _read_complete(client, location)


def upload(
    client: Any,
    folder: Path,
    complete: FolderDigests,
    place: S3Location,
    *,
    told: ProgressCallback,
    replaces: bool = False,
    part_bytes: int = PART_BYTES,
) -> bool:
    """Send the files of a folder, then ``complete.json``; files that exist there are skipped.

    Args:
        told: Called with the bytes that are there now.
        replaces: Whether a ``complete.json`` of the same run, with other files, may be replaced.

    Returns:
        Whether any file was missing.

    Raises:
        RequestError: There is no such bucket, or other files are under the prefix.
        AccessError: Credentials or rights are missing.
        LostError: The connection broke.
        DataError: A file changed while it was read.
    """
    old = _read_complete(client, place)
    is_same = old is not None and old.text() == complete.text()
    if not is_same:
        _check_prefix(client, place, complete, old, replaces=replaces)
        if old is not None:
            with s3_errors("remove the old complete.json from", place):
                client.delete_object(Bucket=place.bucket, Key=place.key(COMPLETE))
    sent = False
    for name, digest in sorted(complete.files.items()):
        sending = _ObjectUpload(client, place, name, folder / name, digest, part_bytes)
        if not sending.exists():
            sending.send()
            sent = True
            if not sending.exists():
                raise DataError(
                    f"{place}/{name} is not what was sent: S3 keeps another size or checksum. "
                    "Something on the way is broken. Repeat the command; it sends that file again."
                )
        told(name, digest.bytes)
    if sent or not is_same:
        with s3_errors("write to", place):
            client.put_object(
                Bucket=place.bucket, Key=place.key(COMPLETE), Body=complete.text().encode(),
                ContentType="application/json",
            )  # fmt: skip
    return sent or not is_same


@dataclass(frozen=True, kw_only=True)
class S3Source:
    """Files below a prefix."""

    client: Any
    location: S3Location

    def complete(self) -> FolderDigests:
        """Return the list of files that a finished upload has.

        Raises:
            RequestError: The place holds no finished upload.
        """
        found = _read_complete(self.client, self.location)
        if found is None:
            raise RequestError(
                f"{self.location} holds no {COMPLETE}: no checkpoint was uploaded there, or the "
                "upload was interrupted. Correct the place, or repeat the command that uploads."
            )
        return found

    def read(self, name: str, offset: int) -> Iterator[bytes]:
        from botocore.exceptions import ClientError

        with s3_errors(f"read {name} of", self.location):
            try:
                answer = self.client.get_object(
                    Bucket=self.location.bucket,
                    Key=self.location.key(name),
                    Range=f"bytes={offset}-",
                )
            except ClientError as error:
                if error_code(error) in ("InvalidRange", "416"):
                    return  # it is shorter than it must be, which its digest tells
                raise
            try:
                yield from answer["Body"].iter_chunks(_BLOCK_BYTES)
            finally:
                answer["Body"].close()


def s3_errors(action: str, location: S3Location) -> AbstractContextManager[None]:
    """Turn botocore's errors into ours.

    Args:
        action: Attempted action, printed before the place: ``write to``.
    """
    again = "repeat the command: only what is missing is sent"
    return translate_s3_errors(
        f"{action} {location}", location.bucket, rights=_RIGHTS, retry_hint=again
    )


@dataclass(frozen=True)
class _ObjectUpload:
    """One file on its way to one object."""

    client: Any
    location: S3Location
    name: str
    path: Path
    digest: FileDigest
    requested_part_bytes: int

    @property
    def part_bytes(self) -> int:
        """The same for the same file, as the checksum of an object depends on it."""
        least = math.ceil(self.digest.bytes / _MOST_PARTS / _MIB) * _MIB
        return max(self.requested_part_bytes, least)

    @property
    def where(self) -> dict[str, str]:
        return {"Bucket": self.location.bucket, "Key": self.location.key(self.name)}

    def exists(self) -> bool:
        """Whether S3 holds these very bytes."""
        from botocore.exceptions import ClientError

        with s3_errors(f"look at {self.name} in", self.location):
            try:
                found = self.client.head_object(**self.where, ChecksumMode="ENABLED")
            except ClientError as error:
                if error_code(error) in ("404", "NoSuchKey", "NotFound"):
                    return False
                raise
        if found["ContentLength"] != self.digest.bytes:
            return False
        kept = str(found.get("ChecksumSHA256") or "").partition("-")[0]  # -N: of N parts
        if kept and kept in (_base64(bytes.fromhex(self.digest.sha256)), self._of_parts()):
            return True
        return self._read_back() == self.digest

    def send(self) -> None:
        """Write the object.

        Raises:
            DataError: The file is not any more what it was when it was listed.
        """
        if self.digest.bytes <= self.part_bytes:
            content = self.path.read_bytes()
            self._check_unchanged(hashlib.sha256(content).hexdigest())
            checksum = _base64(hashlib.sha256(content).digest())
            with s3_errors("write to", self.location):
                self.client.put_object(
                    **self.where, Body=content, ChecksumAlgorithm="SHA256", ChecksumSHA256=checksum
                )
            return
        self._abort_old()
        with s3_errors("write to", self.location):
            begun = self.client.create_multipart_upload(**self.where, ChecksumAlgorithm="SHA256")
        upload_id = begun["UploadId"]
        try:
            self._send_parts(upload_id)
        except BaseException:
            self._abort(upload_id)
            raise

    def _send_parts(self, upload_id: str) -> None:
        whole, parts = hashlib.sha256(), []
        for number, content in enumerate(self._parts(), start=1):
            whole.update(content)
            checksum = _base64(hashlib.sha256(content).digest())
            with s3_errors("write to", self.location):
                answer = self.client.upload_part(
                    **self.where, UploadId=upload_id, PartNumber=number, Body=content,
                    ChecksumSHA256=checksum,
                )  # fmt: skip
            parts.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum})
        self._check_unchanged(whole.hexdigest())
        with s3_errors("write to", self.location):
            self.client.complete_multipart_upload(
                **self.where, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )

    def _parts(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            while content := file.read(self.part_bytes):
                yield content

    def _check_unchanged(self, sha256: str) -> None:
        if sha256 != self.digest.sha256:
            raise DataError(
                f"{self.path} changed while it was read: it was not kept in {self.location}. "
                "Repeat the command."
            )

    def _of_parts(self) -> str:
        """Return S3's checksum of an object in these parts: the checksum of their checksums."""
        joined = b"".join(hashlib.sha256(content).digest() for content in self._parts())
        return _base64(hashlib.sha256(joined).digest())

    def _read_back(self) -> FileDigest:
        checksum, size = hashlib.sha256(), 0
        for block in S3Source(client=self.client, location=self.location).read(self.name, 0):
            checksum.update(block)
            size += len(block)
        return FileDigest(size, checksum.hexdigest())

    def _abort_old(self) -> None:
        """End uploads of this object that were killed: their parts would be billed for ever."""
        try:
            with s3_errors("list unfinished uploads to", self.location):
                found = self.client.list_multipart_uploads(
                    Bucket=self.location.bucket, Prefix=self.where["Key"]
                )
        except AccessError:
            return  # a right of its own, that nothing else needs
        for old in found.get("Uploads", []):
            if old["Key"] == self.where["Key"]:
                self._abort(old["UploadId"])

    def _abort(self, upload_id: str) -> None:
        try:
            with s3_errors("end an upload to", self.location):
                self.client.abort_multipart_upload(**self.where, UploadId=upload_id)
        except ShardyardError:
            return  # why it failed is told by what failed before; the next call tries again


def _read_complete(client: Any, location: S3Location) -> FolderDigests | None:
    from botocore.exceptions import ClientError

    with s3_errors("read", location):
        try:
            answer = client.get_object(Bucket=location.bucket, Key=location.key(COMPLETE))
            data = answer["Body"].read()
        except ClientError as error:
            if error_code(error) in ("NoSuchKey", "404"):
                return None
            raise
    try:
        return parse_digests(data)
    except DataError as error:
        raise RequestError(
            f"{location} holds something else: {error}. Give another prefix, or remove what is "
            "there."
        ) from error


def _check_prefix(
    client: Any,
    location: S3Location,
    complete: FolderDigests,
    old: FolderDigests | None,
    *,
    replaces: bool,
) -> None:
    """Raise where the prefix holds what these files would be mixed with.

    Raises:
        RequestError: It does.
    """
    if old is not None:
        if replaces and old.provenance.get("run") == complete.provenance.get("run"):
            return
        raise RequestError(
            f"{location} holds something else already: {len(old.files)} files, "
            f"{format_bytes(old.bytes)}, made of {_words(old.provenance)}. Give another prefix, or "
            f"remove it: aws s3 rm --recursive {location}/"
        )
    ours = {location.key(name) for name in complete.files}
    with s3_errors("list", location):
        pages = client.get_paginator("list_objects_v2").paginate(
            Bucket=location.bucket, Prefix=f"{location.prefix}/"
        )
        for page in pages:
            for found in page.get("Contents", []):
                if found["Key"] not in ours:
                    raise RequestError(
                        f"{location} is not empty: it holds {found['Key']!r}, which is not one of "
                        "these files. Give another prefix."
                    )


def _words(provenance: Any) -> str:
    return (
        ", ".join(f"{key} {value}" for key, value in sorted(provenance.items())) or "nothing known"
    )


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
