"""Clients of moto's AWS, made once for all tests, and what is told in moto's place.

A client takes longer to make than most tests to use it. What a test has told is answered below
botocore's paginators and above its connection: all of ours and of botocore's that reads an answer
is the real thing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import boto3.session
import moto.core  # noqa: F401 - before any session: it stands between clients and the network
from botocore import xform_name
from moto import mock_aws

from shardyard.io.aws import aws_client

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Of a call's parameters; an error is ``{"Error": {"Code": ...}}``, and None is moto's own."""

TOLD: dict[tuple[str, str], Answer] = {}
"""(service, operation) -> what is answered."""

REGION = "us-east-1"


def real(service: str, operation: str, params: dict[str, Any]) -> dict[str, Any]:
    """What moto itself answers to a call about which a test tells something."""
    told = TOLD.pop((service, operation))
    try:
        client = client_of(service)
        answer: dict[str, Any] = getattr(client, xform_name(operation))(**params)
    finally:
        TOLD[service, operation] = told
    del answer["ResponseMetadata"]
    return answer


@dataclass(frozen=True)
class _Http:
    status_code: int


@contextmanager
def playing_aws() -> Iterator[None]:
    """An empty account of moto's, which knows no placement groups."""
    TOLD.clear()
    TOLD["ec2", "DescribePlacementGroups"] = lambda _: {"PlacementGroups": []}
    # moto's account has 1,300 snapshots of others' images, which take a second to list.
    without_images = patch.dict(os.environ, {"MOTO_EC2_LOAD_DEFAULT_AMIS": "false"})
    try:
        with without_images, mock_aws():
            yield
    finally:
        TOLD.clear()


def image() -> str:
    """Of instances."""
    return str(client_of("ec2").register_image(Name="node")["ImageId"])


@cache
def _session(region: str) -> Any:
    return boto3.session.Session("testing", "testing", region_name=region)


@cache
def client_of(service: str, region: str = REGION) -> Any:
    """A client, as the program itself makes it."""
    client = aws_client(_session(region), service)

    def note(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
        context["asked"] = dict(params)

    def answer(model: Any, context: dict[str, Any], **_: Any) -> tuple[_Http, Any] | None:
        tell = TOLD.get((service, model.name))
        told = None if tell is None else tell(context["asked"])
        if told is None:
            return None
        status = 400 if "Error" in told else 200
        return _Http(status), {**told, "ResponseMetadata": {"HTTPStatusCode": status}}

    client.meta.events.register("provide-client-params", note)
    client.meta.events.register("before-call", answer)
    return client
