"""The API server's exec: a WebSocket over which a command's output comes, by v4 or v5.channel.

Source: https://kubernetes.io/docs/reference/using-api/ (streaming) and kubernetes'
staging/src/k8s.io/apimachinery/pkg/util/remotecommand/constants.go; RFC 6455 for the frames.
"""

import base64
import hashlib
import json
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE = 2, 8
_FRAME_BYTES = 2**15


@dataclass
class Execs:
    """What runs where, and what goes wrong on the way."""

    start: Callable[[str, str, list[str]], list[str]] | None = None
    """Pod, container, command -> what to start here; None: the command itself."""
    commands: list[list[str]] = field(default_factory=list)
    cut_after_bytes: list[int] = field(default_factory=list)
    """Of stdout, for one command after the other: then the connection is gone without a word."""
    garble: list[bool] = field(default_factory=list)
    """Whether the first byte of stdout comes changed, for one command after the other."""


def answer_exec(handler: BaseHTTPRequestHandler, pod: str, query: str, execs: Execs) -> None:
    """Upgrade the connection, run the command, send what it prints and how it ended."""
    asked = parse_qs(query)
    command = asked["command"]
    execs.commands.append(command)
    offered = [p.strip() for p in handler.headers["sec-websocket-protocol"].split(",")]
    protocol = next(p for p in PROTOCOLS if p in offered)
    key = handler.headers["Sec-WebSocket-Key"].encode()
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    accept = base64.b64encode(hashlib.sha1(key + _GUID).digest()).decode()
    handler.send_header("Sec-WebSocket-Accept", accept)
    handler.send_header("Sec-WebSocket-Protocol", protocol)
    handler.end_headers()
    handler.close_connection = True
    start = execs.start or (lambda _pod, _container, words: words)
    _run(handler, start(pod, asked["container"][0], command), execs)


def _run(handler: BaseHTTPRequestHandler, command: list[str], execs: Execs) -> None:
    left = execs.cut_after_bytes.pop(0) if execs.cut_after_bytes else None
    garbles = execs.garble.pop(0) if execs.garble else False
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        _send(handler, 3, _status(None, f"exec failed: {error}"))
        _frame(handler, _CLOSE, struct.pack(">H", 1000))
        return
    with process:
        assert process.stdout is not None and process.stderr is not None
        while data := process.stdout.read(_FRAME_BYTES):
            if garbles:
                data, garbles = bytes([data[0] ^ 1]) + data[1:], False
            if left is not None and len(data) >= left:
                _send(handler, 1, data[:left])
                process.kill()
                return
            left = None if left is None else left - len(data)
            _send(handler, 1, data)
        _send(handler, 2, process.stderr.read())
    _send(handler, 3, _status(process.returncode, f"exit code {process.returncode}"))
    _frame(handler, _CLOSE, struct.pack(">H", 1000))


def _status(code: int | None, message: str) -> bytes:
    content: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code != 0:
        causes = [] if code is None else [{"reason": "ExitCode", "message": str(code)}]
        content |= {
            "status": "Failure", "message": message,
            "reason": "InternalError" if code is None else "NonZeroExitCode",
            "details": {"causes": causes},
        }  # fmt: skip
    return json.dumps(content).encode()


def _send(handler: BaseHTTPRequestHandler, channel: int, data: bytes) -> None:
    _frame(handler, _BINARY, bytes([channel]) + data)


def _frame(handler: BaseHTTPRequestHandler, kind: int, data: bytes) -> None:
    """One frame of RFC 6455, section 5.2; a server's is not masked."""
    size = len(data)
    if size < 126:
        head = struct.pack(">BB", 0x80 | kind, size)
    elif size < 2**16:
        head = struct.pack(">BBH", 0x80 | kind, 126, size)
    else:
        head = struct.pack(">BBQ", 0x80 | kind, 127, size)
    handler.wfile.write(head + data)
    handler.wfile.flush()
