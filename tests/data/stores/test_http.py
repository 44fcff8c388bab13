"""Files of web servers: by ranges, over connections that break, and what servers cannot do."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.data.stores import http, range_reader
from shardyard.errors import AccessError, LostError, RequestError, ShardyardError, SourceError
from tests.data.cutting_proxy import cutting_proxy

LINES = "".join(json.dumps({"text": f"text {n} é " * (n % 50)}) + "\n" for n in range(500)).encode()


@dataclass
class Web:
    """A server of one file, which does what it is told."""

    url: str = ""
    content: bytes = LINES
    version: dict[str, str] = field(default_factory=lambda: {"ETag": '"1"'})
    has_ranges: bool = True
    status: int | None = None
    """Of every answer."""
    redirect: str | None = None
    stalls_behind: int | None = None
    """Bytes of an answer after which nothing comes any more, and nothing ends."""
    is_over: Event = field(default_factory=Event)


@contextmanager
def served() -> Iterator[Web]:
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop, size = int(first), int(last) + 1, len(web.content)
            body = web.content[start:stop] if web.has_ranges else web.content
            status = web.status or (206 if web.has_ranges else 200)
            part = f"bytes {start}-{min(stop, size) - 1}/{size}"
            if web.has_ranges and start >= size:
                status, part, body = 416, f"bytes */{size}", b""
            if web.redirect and self.path != "/there.jsonl":
                status = 302
            self.send_response(status)
            for name, value in web.version.items():
                self.send_header(name, value)
            if web.has_ranges:
                self.send_header("Content-Range", part)
            if web.redirect:
                self.send_header("Location", web.redirect)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: web.stalls_behind])
            if web.stalls_behind is not None:
                web.is_over.wait()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    web.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield web
    finally:
        web.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(range_reader, "_LONGEST_PAUSE_S", 0.001)
    with served() as started:
        yield started


def texts_of(url: str) -> list[str]:
    (piece,) = split_into_pieces(list_files(url), 2**20)
    return [section.text for section in read_sections(piece, TextOf())]


@pytest.mark.heavy
def test_a_file_is_prepared_into_the_bytes_of_one_here_whatever_breaks(
    web: Web, tmp_path: Path
) -> None:
    (tmp_path / "x.jsonl").write_bytes(LINES)
    found = []
    with cutting_proxy(web.url) as proxy:
        for source in (f"{proxy.url}/a%20b/x.jsonl", str(tmp_path / "x.jsonl")):
            proxy.cuts = [30, 180, 20_000, 100_000, 300, 1000, 190]
            data = {"source": source, "dir": str(tmp_path / "out"), "vocab_size": 400}
            recipe = Recipe.model_validate({"data": {**data, "workers": 1}})
            found.append(prepare(recipe, model_dir=None, progress=lambda *_: None))
        assert proxy.num_cut >= 5
    assert found[0].fingerprint == found[1].fingerprint
    assert found[0].dir != found[1].dir


@pytest.mark.parametrize("behind", [0, 100])
def test_a_server_that_stalls_is_not_waited_for_again_and_again(
    web: Web, monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    monkeypatch.setattr(http, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(range_reader, "_LONGEST_SILENCE_S", 0.05)
    files = list_files(f"{web.url}/x.jsonl")
    (piece,) = split_into_pieces(files, 2**20)
    web.stalls_behind = behind
    began_s = time.monotonic()
    with pytest.raises(LostError, match=r"x\.jsonl cannot be read: timed out.*prepare again"):
        list(read_sections(piece, TextOf()))
    assert time.monotonic() - began_s < 3 * 6 * 0.1, "one try that brings nothing, not six"


def test_what_a_stalled_server_takes_is_below_a_minute() -> None:
    """The last try begins no later than a pause after the silence was found too short."""
    tries = range(1, range_reader._TRIES)
    pauses = [min(range_reader._LONGEST_PAUSE_S, 0.25 * 2**in_vain) for in_vain in tries]
    assert range_reader._LONGEST_SILENCE_S + max(pauses) + http._TIMEOUT_S < 60


def test_a_redirect_is_followed_and_not_to_other_kinds_of_places(web: Web) -> None:
    web.redirect = f"{web.url}/there.jsonl"
    assert len(texts_of(f"{web.url}/x.jsonl")) == 490
    web.redirect = "file:///etc/passwd"
    with pytest.raises(RequestError, match="answers 302"):
        list_files(f"{web.url}/x.jsonl")


def test_a_file_that_changes_in_the_middle_is_refused(web: Web) -> None:
    (file,) = list_files(f"{web.url}/x.jsonl")
    (piece,) = split_into_pieces([file], 2**20)
    for version, content in (({"ETag": '"2"'}, LINES), ({"ETag": '"1"'}, LINES + b"\n")):
        web.version, web.content = version, content
        with pytest.raises(
            SourceError, match=r"x\.jsonl changed since it was listed: its (ET|siz)"
        ):
            list(read_sections(piece, TextOf()))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"has_ranges": False}, RequestError, r"sends the whole file where a part.*curl -LO"),
        ({"version": {}}, RequestError, r"neither ETag nor Last-Modified.*Download it"),
        ({"status": 404}, RequestError, r"answers 404 Not Found\. Correct the address"),
        ({"status": 403}, AccessError, r"answers 403 Forbidden\. Only what anybody may read"),
        ({"status": 401}, AccessError, r"answers 401 Unauthorized.*give the path"),
        ({"status": 503}, LostError, r"answers 503 .*then prepare again"),
        ({"content": b""}, SourceError, r"empty corpus"),
    ],
)
def test_what_a_server_refuses_or_cannot_do_is_told(
    web: Web, change: dict[str, object], kind: type[ShardyardError], message: str
) -> None:
    for name, value in change.items():
        setattr(web, name, value)
    with pytest.raises(kind, match=message):
        list_files(f"{web.url}/x.jsonl")


def test_without_an_etag_the_time_of_change_is_the_version(web: Web) -> None:
    web.version = {"Last-Modified": "Sun, 22 Nov 2026 10:00:00 GMT"}
    (file,) = list_files(f"{web.url}/x.jsonl")
    assert file.version == "Sun, 22 Nov 2026 10:00:00 GMT"


def test_a_server_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "_LONGEST_PAUSE_S", 0.001)
    with pytest.raises(LostError, match=r"127\.0\.0\.1:9/x\.jsonl cannot be read: .*refused"):
        list_files("http://127.0.0.1:9/x.jsonl")
