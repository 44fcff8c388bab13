"""An endpoint of AWS Batch that fails as it is told: throttles, hangs up, refuses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ARN = "arn:aws:batch:us-east-1:123456789012"
JOB_ID = "5f1ee4a5-7a3c-4d2b-9a52-6f0c9c3f0b11"
DEFINITION = f"{ARN}:job-definition/shardyard-n:1"
ANSWERS: dict[str, dict[str, Any]] = {
    "describejobqueues": {
        "jobQueues": [
            {
                "jobQueueName": "trainers", "jobQueueArn": f"{ARN}:job-queue/trainers",
                "state": "ENABLED", "status": "VALID", "priority": 1,
                "computeEnvironmentOrder": [],
            }
        ]
    },
    "listjobs": {"jobSummaryList": []},
    "registerjobdefinition": {
        "jobDefinitionName": "shardyard-n", "jobDefinitionArn": DEFINITION, "revision": 1
    },
    "submitjob": {"jobName": "n", "jobId": JOB_ID, "jobArn": f"{ARN}:job/{JOB_ID}"},
    "describejobdefinitions": {
        "jobDefinitions": [
            {
                "jobDefinitionName": "shardyard-n", "jobDefinitionArn": DEFINITION,
                "revision": 1, "type": "multinode",
            }
        ]
    },
    "deregisterjobdefinition": {},
}  # fmt: skip
"""By the last part of the path, as botocore's model has it."""

HANG_UP = (0, "")


@dataclass
class Endpoint:
    """What it was asked, and the failures it has left for each call."""

    url: str = ""
    calls: list[str] = field(default_factory=list)
    failures: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Call -> status and error code of its next answers; HANG_UP closes the connection."""
    done: list[str] = field(default_factory=list)
    """Calls that were answered, or whose answer was lost: they may have been done."""

    def made(self) -> dict[str, int]:
        """Kind -> how many there may be."""
        definitions = self.done.count("registerjobdefinition")
        return {
            "batch job definition": definitions - self.done.count("deregisterjobdefinition"),
            "batch job": self.done.count("submitjob"),
        }


@contextmanager
def batch_endpoint() -> Iterator[Endpoint]:
    """Serve on a free port of this machine."""
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            call = self.path.rpartition("/")[2]
            endpoint.calls.append(call)
            left = endpoint.failures.get(call, [])
            status, code = left.pop(0) if left else (200, "")
            if status in (0, 200) or status >= 500:
                endpoint.done.append(call)
            if (status, code) == HANG_UP:
                self.close_connection = True
                return
            body = ANSWERS[call] if status == 200 else {"message": f"{code} it is"}
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            if status != 200:
                self.send_header("x-amzn-ErrorType", code)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
