"""The page over real HTTP: what it answers, what it refuses, and what an unchanged folder costs."""

import gzip
import http.client
import json
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardyard.control.runs import list_runs
from shardyard.errors import RequestError
from shardyard.report.serve.index import Index
from shardyard.report.serve.server import Server
from tests.report.serve.runs import make_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    make_run(tmp_path, "a", steps=300, every=100)
    make_run(tmp_path, "b", steps=5, end="failed")
    made = Server(tmp_path, host="127.0.0.1", port=0)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.request(method, path, headers=named)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def content(server: Server, path: str) -> Any:
    code, _, body = ask(server, path)
    assert code == 200, body
    return json.loads(body)


def test_list_curves_and_events(server: Server) -> None:
    assert {row["id"]: row["state"] for row in content(server, "/api/runs")} == {
        "a": "finished", "b": "failed",
    }  # fmt: skip
    curves = content(server, "/api/curves?run=a&run=b&y=eval_loss&x=step")
    assert curves["a"]["x"] == [100, 200, 300] and curves["b"] == {"x": [], "y": []}
    assert len(content(server, "/api/curves?run=a")["a"]["x"]) == 300
    assert content(server, "/api/events?run=b") == []


def test_the_page_and_its_parts_are_there(server: Server) -> None:
    for path in ("/", "/page.js", "/page.css"):
        code, headers, body = ask(server, path)
        assert code == 200 and body
        assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/etc/passwd", 404), ("/../a/recipe.yaml", 404), ("/api/curves?run=../a", 404),
        ("/api/curves?run=c", 404), ("/api/curves", 400), ("/api/curves?run=a&x=__class__", 400),
        ("/api/curves?run=a&y=attempt", 400), ("/api/events?run=/etc", 404), ("/api/", 404),
    ],
)  # fmt: skip
def test_what_is_not_there_is_not_answered(server: Server, path: str, code: int) -> None:
    assert ask(server, path)[0] == code


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1:1"])
def test_another_name_is_refused(server: Server, host: str) -> None:
    assert ask(server, "/api/runs", Host=host)[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(server: Server, method: str) -> None:
    assert ask(server, "/api/runs", method)[0] == 501


def test_an_unchanged_folder_costs_a_few_hundred_bytes(server: Server) -> None:
    _, headers, _ = ask(server, "/api/runs")
    code, again, body = ask(server, "/api/runs", If_None_Match=headers["ETag"])
    assert (code, body) == (304, b"")
    assert sum(len(name) + len(value) + 4 for name, value in again.items()) < 400


def test_long_answers_are_packed(server: Server) -> None:
    _, plain, body = ask(server, "/api/curves?run=a")
    _, packed, short = ask(server, "/api/curves?run=a", Accept_Encoding="gzip")
    assert packed["Content-Encoding"] == "gzip" and len(short) < len(body) / 2
    assert gzip.decompress(short) == body and plain["ETag"] == packed["ETag"]


def test_a_port_that_is_taken_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be listened at.*--port 0"):
        Server(tmp_path, host="127.0.0.1", port=server.server_port)


@pytest.mark.heavy
@pytest.mark.parametrize("odd", ["fifo", "folder", "device", "loop", "not a number", "private"])
def test_one_odd_run_hides_no_other(server: Server, odd: str) -> None:
    metrics = server.pages.index.folder / "b" / "metrics.jsonl"
    metrics.unlink()
    match odd:
        case "fifo":
            os.mkfifo(metrics)
        case "folder":
            metrics.mkdir()
        case "device":
            metrics.symlink_to("/dev/zero")
        case "loop":
            metrics.symlink_to(metrics)
        case "not a number":
            metrics.write_text('{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1e999}\n')
        case "private":  # root may read it all the same
            metrics.write_text("")
            metrics.chmod(0)
    (server.pages.index.folder / "link").symlink_to("link")
    server.pages.index = Index(server.pages.index.folder)
    rows = {row["id"]: row for row in content(server, "/api/runs")}
    assert rows["a"]["state"] == "finished"
    is_odd = odd in ("fifo", "folder", "device", "loop")
    assert rows["b"]["state"] == ("unreadable" if is_odd else "failed")
    assert len(content(server, "/api/curves?run=a&run=b")["a"]["x"]) == 300
    listed = {run.state.id: run.to_json() for run in list_runs(server.pages.index.folder)}
    assert listed["a"]["state"] == "finished" and listed["b"]["loss"] is None
    assert (listed["b"]["problem"] is not None) == is_odd


def test_an_ipv6_address_is_listened_at_and_written_in_brackets(tmp_path: Path) -> None:
    if not socket.has_ipv6 or "1".rjust(32, "0") not in Path("/proc/net/if_inet6").read_text():
        pytest.skip("this machine has no ::1")
    for host in ("::1", "[::1]"):
        server = Server(tmp_path, host=host, port=0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            assert server.url == f"http://[::1]:{server.server_port}/" and server.is_on_loopback
            with urllib.request.urlopen(f"{server.url}api/runs", timeout=10) as answer:
                assert json.load(answer) == []
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@pytest.mark.heavy
def test_a_thread_that_waits_for_a_file_system_does_not_keep_the_end_waiting(
    server: Server,
) -> None:
    with server.pages.index._lock:
        begun = time.monotonic()
        server.pages.index.write()
    assert time.monotonic() - begun < 5
