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
from shardyard.report.against_plan import median_tokens_per_s
from shardyard.report.run_data import read_run
from shardyard.report.serve.index import Index
from shardyard.report.serve.server import Server
from shardyard.rundir.layout import RunDir
from tests.report.serve.runs import add_log, add_settings, line, make_run


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
    found = content(server, "/api/curves?run=a&run=b&y=eval_loss&y=loss&y=mfu&x=step")
    assert found["metrics"] == ["loss", "tokens", "samples", "step_time_s", "tokens_per_s"]
    assert set(found["curves"]) == {"eval_loss", "loss", "mfu"}
    curves = found["curves"]["eval_loss"]
    nothing: dict[str, list[Any]] = {"x": [], "y": []}
    assert curves["a"]["x"] == [100, 200, 300] and curves["b"] == nothing
    assert found["curves"]["mfu"] == {"a": nothing, "b": nothing}
    assert len(content(server, "/api/curves?run=a")["curves"]["loss"]["a"]["x"]) == 300
    told = content(server, "/api/events?run=b")
    assert told["total"] == 4 and [each["kind"] for each in told["events"]] == [
        "attempt_ended", "first_step", "attempt_started", "run_started",
    ]  # fmt: skip
    assert told["events"][0]["words"] == "exit code 1: rank 1 <b>was</b> lost"


def test_a_runs_page_is_served_from_its_folder_and_runs_no_script(server: Server) -> None:
    folder = server.pages.index.folder
    assert content(server, "/api/pages?run=a") == []
    (folder / "a" / "report.html").write_text("<p>report</p>")
    (folder / "secret.html").write_text("secret")
    (folder / "b" / "report.html").symlink_to(folder / "secret.html")
    (folder / "b" / "plan.html").symlink_to(folder / "b" / "recipe.yaml")
    assert content(server, "/api/pages?run=a") == [
        {"title": "Report", "address": "/runs/a/report.html"}
    ]
    code, headers, body = ask(server, "/runs/a/report.html")
    assert (code, body) == (200, b"<p>report</p>")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("sandbox; default-src 'none';") and "script" not in policy
    assert [each["title"] for each in content(server, "/api/pages?run=b")] == ["Plan"]
    assert ask(server, "/runs/b/plan.html")[0] == 200
    for path in (
        "/runs/b/report.html", "/runs/a/recipe.yaml", "/runs/a/../b/plan.html", "/runs/a/",
        "/runs/a/%2e%2e/b/plan.html", "/runs/..%2fa/report.html", "/runs//etc/passwd", "/runs/a",
    ):  # fmt: skip
        assert ask(server, path)[0] == 404, path


def test_the_end_of_a_log_of_any_rank(server: Server) -> None:
    folder = server.pages.index.folder
    assert content(server, "/api/log?run=a")["text"] == ""
    run = RunDir(folder / "a")
    add_log(run, rank=0, text="first attempt")
    add_log(run, attempt=1, rank=0, text="x" * 70_000 + "\nlast\n10 %\r20 %\r\n\x1b[2J")
    add_log(run, attempt=1, rank=3, text="three")
    found = content(server, "/api/log?run=a")
    assert found["attempts"] == [0, 1] and found["ranks"] == [0, 3]
    assert found["text"] == "last\n20 %\n\\x1b[2J"
    assert content(server, "/api/log?run=a&rank=3")["text"] == "three"
    assert content(server, "/api/log?run=a&attempt=0&rank=0")["text"] == "first attempt"
    run.log(1, 5).symlink_to("/etc/passwd")
    assert content(server, "/api/log?run=a&rank=5")["text"] == ""
    assert content(server, "/api/log?run=a&attempt=7")["text"] == ""


def test_settings_that_differ(server: Server) -> None:
    assert content(server, "/api/settings") == {"names": [], "runs": {}}
    folder = server.pages.index.folder
    add_settings(RunDir(folder / "a"), {"run.id": "a", "optim.lr": 1, "run.seed": 3, "x.y": [1]})
    add_settings(RunDir(folder / "b"), {"run.id": "b", "optim.lr": 2, "run.seed": 3, "x.y": [2]})
    add_settings(RunDir(folder / "b"), {"optim.lr": True, "run.seed": 3, "x.y": [2]}, attempt=1)
    assert content(server, "/api/settings") == {
        "names": ["optim.lr", "x.y"], "runs": {"a": [1, "[1]"], "b": [True, "[2]"]},
    }  # fmt: skip
    RunDir(folder / "b").resolved(1).write_text("{")
    assert content(server, "/api/settings") == {"names": [], "runs": {"a": []}}


def test_speeds_arrive_between_requests_and_are_those_of_the_report(server: Server) -> None:
    folder = server.pages.index.folder
    run = RunDir(folder / "a")
    with run.metrics.open("a") as file:
        for step, speed in ((301, 1.0), (302, 9000.0), (303, 8000.0)):
            file.write(json.dumps(line(step, tokens_per_s=speed)) + "\n")
    expected = {name: median_tokens_per_s(read_run(RunDir(folder / name))) for name in ("a", "b")}
    ends_s = time.monotonic() + 20
    while True:
        found = {row["id"]: row["tokens_per_s"] for row in content(server, "/api/runs")}
        if found == expected or time.monotonic() > ends_s:
            break
        time.sleep(0.7)
    assert found == expected and None not in expected.values()


def test_the_page_and_its_parts_are_there(server: Server) -> None:
    for path in ("/", "/page.css", *(f"/{name}.js" for name in (
        "page", "api", "charts", "parallel", "table", "run"))):  # fmt: skip
        code, headers, body = ask(server, path)
        assert code == 200 and body
        assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/etc/passwd", 404), ("/../a/recipe.yaml", 404), ("/api/curves?run=../a", 404),
        ("/api/curves?run=c", 404), ("/api/curves", 400), ("/api/curves?run=a&x=__class__", 400),
        ("/api/curves?run=a&y=attempt", 400), ("/api/curves?run=a&y=loss&y=step", 400),
        ("/api/curves?run=a" + "&y=loss" * 31, 400), ("/api/events?run=/etc", 404), ("/api/", 404),
        ("/api/log?run=a&rank=../0", 400), ("/api/log?run=../a", 404), ("/api/pages?run=c", 404),
        ("/api/curves?run=a&of=-1", 400), ("/report.html", 404),
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
    curves = content(server, "/api/curves?run=a&run=b")["curves"]["loss"]
    assert len(curves["a"]["x"]) == 300
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
