"""Rules for ``checkpoint.to``: a place in a bucket that every node can write."""

from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import show
from shardyard.config.sources import scheme_of
from shardyard.errors import Problem, RequestError
from shardyard.io.object_store import parse_location

_OTHER_CLOUDS = {
    "gs": "Google Cloud Storage speaks S3's protocol as well: use s3:// with an HMAC key and "
    "AWS_ENDPOINT_URL=https://storage.googleapis.com.",
    "az": "Azure has no S3 protocol: put run.dir on a mounted container, such as blobfuse2.",
}


def check_bucket(recipe: Recipe) -> Iterable[Problem]:
    """Find a place that checkpoints cannot be uploaded to."""
    to = recipe.checkpoint.to
    if to is None:
        return
    scheme = scheme_of(to)
    if scheme in _OTHER_CLOUDS:
        text = f"={show(to)} is not supported: checkpoints are uploaded by S3's protocol only. "
        yield Problem("checkpoint.to", text + _OTHER_CLOUDS[scheme])
        return
    if scheme in ("http", "https"):
        text = (
            f"={show(to)} is an address of a server. Give the bucket, checkpoint.to="
            "s3://bucket/prefix, and the server in the environment: export AWS_ENDPOINT_URL=URL"
        )
        yield Problem("checkpoint.to", text)
        return
    if scheme is None:
        text = f"={show(to)} is a path. Checkpoints on a disk go into run.dir; set that instead."
        yield Problem("checkpoint.to", text)
        return
    try:
        parse_location(to)
    except RequestError as error:
        yield Problem("checkpoint.to", str(error))
