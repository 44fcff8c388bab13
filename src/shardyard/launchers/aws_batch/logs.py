"""Output of a Batch job's nodes from CloudWatch: one page of each node in memory at a time.

A node has one stream for each attempt; they are read one after the other. Lines of several nodes
are merged by their time, within what one round of reading brought.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardyard.io.aws import error_code, translate_aws_errors
from shardyard.io.polling import poll_until
from shardyard.launchers.base import LogLine

# CloudWatch would send 10,000, but one page of each of 512 nodes is held in memory.
PAGE_EVENTS = 500
"""Lines of one node read at once."""

POLL_S = 5.0
"""GetLogEvents may be asked 25 times a second by an account. Source: CloudWatch Logs quotas."""


@dataclass
class NodeStreams:
    """The streams of one node, oldest attempt first, and how far they have been read."""

    node: int
    group: str
    names: list[str] = field(default_factory=list)
    position: int = 0
    token: str | None = None

    def add_streams(self, names: list[str]) -> None:
        """Add streams of attempts that have begun since."""
        self.names += [name for name in names if name not in self.names]


def stream_names(node: Mapping[str, Any]) -> list[str]:
    """Log streams of a node's attempts, oldest first, from its entry in DescribeJobs."""
    # An attempt that still runs is not in the list: its stream is in the node's own entry.
    holders = [*(node.get("attempts") or []), node]
    names = [(holder.get("container") or {}).get("logStreamName") for holder in holders]
    return list(dict.fromkeys(name for name in names if name))


def read_logs(
    client: Any,
    job_streams: Callable[[], tuple[bool, dict[int, list[str]]]],
    *,
    group: str,
    follow: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[LogLine]:
    """Lines of all nodes that ``job_streams`` names.

    Args:
        client: Of CloudWatch Logs.
        job_streams: Says whether the job is over, and the streams of each node.
        group: The log group that has them.
        follow: Wait for more until the job is over.
    """
    nodes: dict[int, NodeStreams] = {}

    def is_last() -> bool:
        is_over, found = job_streams()
        for node, names in found.items():
            nodes.setdefault(node, NodeStreams(node, group)).add_streams(names)
        return is_over or not follow

    for _ in poll_until(is_last, every_s=POLL_S, sleep=sleep):
        yield from _drain(client, nodes)


def _drain(client: Any, nodes: Mapping[int, NodeStreams]) -> Iterator[LogLine]:
    """Everything that is there now."""
    while True:
        lines: list[tuple[int, int, int, str]] = []
        for number in sorted(nodes):
            page = _next_page(client, nodes[number])
            # The place keeps the order of lines with the same millisecond.
            lines += [(at, number, place, text) for place, (at, text) in enumerate(page)]
        if not lines:
            return
        for _, number, _, text in sorted(lines):
            yield LogLine(source=f"node {number}", text=text)


def _next_page(client: Any, streams: NodeStreams) -> list[tuple[int, str]]:
    """The next lines of a node; empty if there are none now."""
    while streams.position < len(streams.names):
        answer = _get(client, streams)
        events = answer.get("events", [])
        # CloudWatch marks the end of a stream by the token that it was given, and by nothing else.
        is_end = answer.get("nextForwardToken") == streams.token
        streams.token = answer.get("nextForwardToken", streams.token)
        if events:
            return [(event["timestamp"], event["message"]) for event in events]
        if not is_end:
            continue  # CloudWatch may give an empty page before the end
        if streams.position + 1 == len(streams.names):
            return []
        streams.position, streams.token = streams.position + 1, None
    return []


def _get(client: Any, streams: NodeStreams) -> dict[str, Any]:
    import botocore.exceptions

    token = streams.token
    more = {} if token is None else {"nextToken": token}
    with translate_aws_errors("read the logs", client.meta.region_name):
        try:
            answer: dict[str, Any] = client.get_log_events(
                logGroupName=streams.group, logStreamName=streams.names[streams.position],
                startFromHead=True, limit=PAGE_EVENTS, **more,
            )  # fmt: skip
        except botocore.exceptions.ClientError as error:
            if error_code(error) != "ResourceNotFoundException":
                raise
            # Named before its first line is written.
            return {"events": [], "nextForwardToken": token}
    return answer
