"""What W&B's client needs of W&B's server, in memory on loopback: the server is not to be had.

Answers have the fields that the client's queries ask for; the history is kept as it comes.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ENTITY = {"id": "e1", "name": "a-team"}


@dataclass
class RunThere:
    """One run as the server has it."""

    project: str
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of its history, in order."""
    summary: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    exit_code: int | None = None
    is_preempting: bool = False
    starts: int = 0

    def bucket(self, name: str) -> dict[str, Any]:
        tail = [json.dumps(self.rows[-1])] if self.rows else []
        config = {key: value for key, value in self.config.items() if key != "_wandb"}
        return {
            "id": f"id-{name}", "name": name, "displayName": name, "description": None,
            "sweepName": None, "config": json.dumps(config), "notes": None, "tags": self.tags,
            "summaryMetrics": json.dumps(self.summary), "logLineCount": 0, "eventsLineCount": 0,
            "historyLineCount": len(self.rows), "historyTail": json.dumps(tail),
            "eventsTail": "[]", "wandbConfig": json.dumps({"t": 1}),
            "project": {"id": "p1", "name": self.project, "entity": _ENTITY},
        }  # fmt: skip


class WandbServer:
    """Runs by id."""

    def __init__(self) -> None:
        self.address = ""
        self.runs: dict[str, RunThere] = {}
        self.lock = threading.Lock()

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        with self.lock:
            if path.endswith("/graphql"):
                asked = json.loads(body)
                return {"data": self._query(asked["query"], asked.get("variables") or {})}
            if path.endswith("/file_stream"):
                self._stream(path.split("/")[-2], json.loads(body))
            return {"limits": {}}

    def _query(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        name = query.partition("(")[0].partition("{")[0].split()[-1]
        match name:
            case "Viewer":
                viewer = {"id": "u1", "entity": "a-team", "username": "me", "flags": "{}"}
                return {"viewer": {**viewer, "email": "", "teams": {"edges": []}}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "RunResumeStatus":
                run = self.runs.get(given["name"])
                bucket = None if run is None else run.bucket(given["name"])
                model = {"id": "p1", "name": given["project"], "entity": _ENTITY, "bucket": bucket}
                return {"model": model}
            case "UpsertBucket":
                is_new = given["name"] not in self.runs
                run = self.runs.setdefault(given["name"], RunThere(given["project"]))
                run.starts += 1
                run.exit_code = None
                run.tags = given.get("tags") or run.tags
                run.config |= json.loads(given.get("config") or "{}")
                return {"upsertBucket": {"bucket": run.bucket(given["name"]), "inserted": is_new}}
            case "CreateRunFiles":
                files = [
                    {"name": each, "uploadUrl": f"{self.address}/upload"} for each in given["files"]
                ]
                return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}

    def _stream(self, run_id: str, content: dict[str, Any]) -> None:
        run = self.runs[run_id]
        for name, part in (content.get("files") or {}).items():
            lines = [json.loads(line) for line in part["content"]]
            if name == "wandb-history.jsonl":
                assert part["offset"] <= len(run.rows), "a gap"
                run.rows[part["offset"] :] = lines
            elif name == "wandb-summary.json":
                run.summary |= lines[-1]
        run.is_preempting |= bool(content.get("preempting"))
        if content.get("complete"):
            run.exit_code = content.get("exitcode")


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    """It listens while the block runs."""
    found = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = json.dumps(found.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *_: object) -> None:
            """Tests need no access log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
