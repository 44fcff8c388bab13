"""Merging, paging and following of CloudWatch streams."""

from collections.abc import Iterator
from typing import Any

import pytest

from shardyard.launchers.aws_batch.logs import PAGE_EVENTS, read_logs, stream_names

pytest.importorskip("botocore", reason="needs shardyard[aws]")

GROUP = "/shardyard/trainers"


class Meta:
    region_name = "us-east-1"


class FakeLogs:
    """GetLogEvents as CloudWatch does it: at the end a token comes back unchanged."""

    meta = Meta()

    def __init__(self, streams: dict[str, list[tuple[int, str]]]) -> None:
        self.streams = streams
        self.largest_page = 0

    def get_log_events(
        self,
        *,
        logGroupName: str,
        logStreamName: str,
        limit: int,
        nextToken: str = "f/0",
        **_: Any,
    ) -> dict[str, Any]:
        assert logGroupName == GROUP
        if logStreamName not in self.streams:
            from botocore.exceptions import ClientError

            raise ClientError(
                {"Error": {"Code": "ResourceNotFoundException", "Message": "no such stream"}},
                "GetLogEvents",
            )
        start = int(nextToken.removeprefix("f/"))
        page = self.streams[logStreamName][start : start + limit]
        self.largest_page = max(self.largest_page, len(page))
        return {
            "events": [{"timestamp": at, "message": text} for at, text in page],
            "nextForwardToken": f"f/{start + len(page)}",
        }


def read(client: FakeLogs, streams: dict[int, list[str]]) -> list[tuple[str, str]]:
    lines = read_logs(client, lambda: (True, streams), group=GROUP, follow=False)
    return [(line.source, line.text) for line in lines]


def test_lines_of_nodes_are_merged_by_time() -> None:
    client = FakeLogs({"a": [(1, "a1"), (4, "a4")], "b": [(2, "b2"), (3, "b3")]})
    assert read(client, {0: ["a"], 1: ["b"]}) == [
        ("node 0", "a1"), ("node 1", "b2"), ("node 1", "b3"), ("node 0", "a4"),
    ]  # fmt: skip


def test_lines_of_one_moment_keep_their_order() -> None:
    client = FakeLogs({"a": [(1, "z"), (1, "y"), (1, "x")]})
    assert [text for _, text in read(client, {0: ["a"]})] == ["z", "y", "x"]


def test_attempts_follow_each_other() -> None:
    client = FakeLogs({"first": [(1, "one")], "second": [(5, "two")]})
    assert [text for _, text in read(client, {0: ["first", "second"]})] == ["one", "two"]


def test_a_stream_that_is_not_there_yet_is_empty() -> None:
    assert read(FakeLogs({}), {0: ["a"]}) == []


def test_an_attempt_without_a_stream_does_not_hide_the_next() -> None:
    client = FakeLogs({"second": [(5, "two")]})
    assert read(client, {0: ["first", "second"]}) == [("node 0", "two")]


def test_a_long_log_is_read_in_pages() -> None:
    lines = [(number, str(number)) for number in range(5 * PAGE_EVENTS + 7)]
    client = FakeLogs({"a": lines})
    assert [text for _, text in read(client, {0: ["a"]})] == [text for _, text in lines]
    assert client.largest_page == PAGE_EVENTS


def test_following_512_nodes_holds_one_page_of_each() -> None:
    streams = {f"s{node}": [(node, "x")] * 3 for node in range(512)}
    client = FakeLogs(streams)
    names = {node: [f"s{node}"] for node in range(512)}
    assert len(read(client, names)) == 3 * 512


def test_following_waits_for_more_and_reads_what_came_last() -> None:
    client = FakeLogs({"a": [(1, "one")]})
    waits: list[float] = []

    def look() -> tuple[bool, dict[int, list[str]]]:
        if len(waits) == 2:
            client.streams["b"] = [(9, "of the second attempt")]
            return True, {0: ["a", "b"]}
        return False, {0: ["a"]}

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        client.streams["a"].append((1 + len(waits), f"after wait {len(waits)}"))

    found = read_logs(client, look, group=GROUP, follow=True, sleep=sleep)
    lines: Iterator[str] = (line.text for line in found)
    assert list(lines) == ["one", "after wait 1", "after wait 2", "of the second attempt"]


def test_streams_of_all_attempts_are_named_once() -> None:
    entry = {
        "container": {"logStreamName": "second"},
        "attempts": [
            {"container": {"logStreamName": "first"}},
            {"container": {"logStreamName": "second"}},
            {"container": {}},
        ],
    }
    assert stream_names(entry) == ["first", "second"]
