"""A command inside a running container, over a WebSocket: its stdout as bytes, as they come.

The official client opens the connection (TLS, proxy, credentials). Its own reader of the stream is
not used: it keeps all that it was sent, and waits on the socket while TLS holds data already.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from shardyard.errors import CapacityError, ShardyardError
from shardyard.io.files import parse_json

_PROTOCOL = "v4.channel.k8s.io"
"""Protocol version; v5 adds only what stdin needs.

Source: constants.go of apimachinery's remotecommand.
"""
_STDOUT, _STDERR, _STATUS = 1, 2, 3

SILENCE_S = 20.0
"""Then a ping asks whether anybody is there, before a balancer ends an idle connection."""
_PINGS = 6
"""Without an answer, the connection is lost."""
_KEPT_BYTES = 4096
"""Length of the kept end of stderr, which says why the command failed."""


class LostConnectionError(CapacityError):
    """The stream ended before the command did; what it would have said next is not known."""


class CommandError(ShardyardError):
    """The command ran, and failed.

    Args:
        code: Its exit code; None: it was not started.
    """

    def __init__(self, words: str, code: int | None) -> None:
        super().__init__(words)
        self.words = words
        self.code = code


class HandshakeError(ShardyardError):
    """Rejection of the connection by the API server, in its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


def open_exec(client: Any, path: str, *, container: str, command: Sequence[str]) -> Any:
    """Return a WebSocket on which the command's output comes.

    Args:
        client: The official ApiClient.
        path: Path of the pod's ``exec``.

    Raises:
        HandshakeError: The API server rejected it.
        LostConnectionError: The API server does not answer.
    """
    import websocket
    from kubernetes.stream.ws_client import create_websocket, get_websocket_url

    query = [
        ("container", container), ("stdin", "false"), ("stdout", "true"), ("stderr", "true"),
        ("tty", "false"), ("command", list(command)),
    ]  # fmt: skip
    headers: dict[str, str] = {}
    client.update_params_for_auth(headers, [], ["BearerToken"])
    headers["sec-websocket-protocol"] = _PROTOCOL
    url = get_websocket_url(f"{client.configuration.host}{path}", query)
    websocket.setdefaulttimeout(SILENCE_S)  # of the connect too, which takes no other
    try:
        return create_websocket(client.configuration, url, headers)
    except websocket.WebSocketBadStatusException as error:
        raise HandshakeError(error.status_code, _error_message(error)) from error
    except (websocket.WebSocketException, OSError) as error:
        raise LostConnectionError(f"no connection to the container: {error}") from error


def stdout_of(connection: Any, *, silence_s: float = SILENCE_S) -> Iterator[bytes]:
    """Yield the command's stdout until it has ended well; closes the connection.

    Raises:
        CommandError: It failed.
        LostConnectionError: The connection broke before its end.
    """
    said = b""
    try:
        for channel, data in _messages(connection, silence_s):
            if channel == _STDOUT and data:
                yield data
            elif channel == _STDERR:
                said = (said + data)[-_KEPT_BYTES:]
            # The status comes last. A stream that ends without it was cut, whatever it has sent.
            elif channel == _STATUS and data:
                _raise_unless_succeeded(data, said.decode(errors="replace").strip())
                return
        raise LostConnectionError("the connection ended before the command did")
    finally:
        # A peer that is gone answers no close frame, so it gets one second.
        connection.close(timeout=1)


def _messages(connection: Any, silence_s: float) -> Iterator[tuple[int, bytes]]:
    """Channel and content of each message; ends where the other side closes."""
    import websocket

    connection.settimeout(silence_s)
    unanswered = 0
    while True:
        try:
            # Control frames too: a pong is the only sign of life of a silent command.
            kind, frame = connection.recv_data_frame(control_frame=True)
        except websocket.WebSocketTimeoutException as error:
            unanswered += 1
            if unanswered > _PINGS:
                raise LostConnectionError("no more data came") from error
            connection.ping()
            continue
        except (websocket.WebSocketException, OSError) as error:
            raise LostConnectionError(f"the connection broke: {error}") from error
        unanswered = 0
        if kind == websocket.ABNF.OPCODE_CLOSE:
            return
        if kind in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) and frame.data:
            # In this protocol the first byte of a message is its channel.
            yield frame.data[0], bytes(frame.data[1:])


def _raise_unless_succeeded(status: bytes, stderr: str) -> None:
    try:
        content = parse_json(status)
        if content["status"] == "Success":
            return
        causes = (content.get("details") or {}).get("causes") or []
        code = next((int(c["message"]) for c in causes if c.get("reason") == "ExitCode"), None)
        words = stderr or str(content.get("message") or "no reason given")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LostConnectionError("the command's exit status is unknown") from error
    raise CommandError(words, code)


def _error_message(error: Any) -> str:
    try:
        words = parse_json(error.resp_body)["message"]
    except (TypeError, ValueError, KeyError):
        words = str(error).partition(" -+-+-")[0]
    return str(words).strip().rstrip(".")
