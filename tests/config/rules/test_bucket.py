"""Places that checkpoints cannot be uploaded to."""

import re

import pytest

from shardyard.config.rules.bucket import check_bucket
from shardyard.config.rules.check import check
from shardyard.config.schema.recipe import Recipe


@pytest.mark.parametrize(
    ("to", "message"),
    [
        (
            "gs://b/p",
            r"checkpoint\.to='gs://b/p' is not supported: .*HMAC key and AWS_ENDPOINT_URL=",
        ),
        ("az://b/p", r"checkpoint\.to='az://b/p' is not supported: .*blobfuse2"),
        ("https://minio:9000/b", r"is an address of a server.*export AWS_ENDPOINT_URL=URL"),
        ("/mnt/checkpoints", r"/mnt/checkpoints' is a path\. .*go into run\.dir; set that"),
        ("s3://b", r"checkpoint\.to: 's3://b' is not a place in S3: 'b' is not a name of a bucket"),
        ("s3://bucket/", r"checkpoint\.to: .*a prefix is missing.*Give s3://bucket/prefix"),
    ],
)
def test_a_place_that_is_no_bucket_is_named(to: str, message: str) -> None:
    (problem,) = check_bucket(Recipe.model_validate({"checkpoint": {"to": to}}))
    assert re.search(message, str(problem))


def test_a_bucket_with_a_prefix_passes() -> None:
    to = {"to": "s3://my-bucket/runs/a"}
    recipe = Recipe.model_validate({"model": {"preset": "llama-tiny"}, "checkpoint": to})
    check(recipe, to_train=False)
