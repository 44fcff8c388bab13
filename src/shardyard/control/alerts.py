"""Send alerts on a run to the user's own addresses: ``observe.alerts``.

They follow from the run's events as these grow, in the process that watches the agent of
node 0. The training takes no part in it. Each address has a thread: one that is slow or
down holds up neither the run nor another address. A failed delivery is logged, without the
address.
"""

import http.client
import json
import os
import threading
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

from shardyard.config.schema.observe import Alert, When
from shardyard.control.follow import Tail, describe_event
from shardyard.errors import RequestError
from shardyard.io.polling import poll_in_background
from shardyard.log import warn
from shardyard.rundir.layout import RunDir
from shardyard.units import format_usd

_LOOK_S = 1.0
_ANSWER_S = 10.0
_TRIES_AFTER_S = (0.0, 1.0, 4.0)
_LAST_WAIT_S = 20.0
"""For what is not delivered when the run has ended."""


@contextmanager
def alerting(run: RunDir, alerts: Sequence[Alert], environ: Mapping[str, str]) -> Iterator[None]:
    """Send alerts of what is written while the block runs.

    Args:
        environ: Holds the addresses by the names of their secrets.
    """
    if not alerts:
        yield
        return
    tail = Tail(run.events)
    tail.read()  # of earlier attempts
    senders = [_Sender(alert, environ.get(alert.webhook, "")) for alert in alerts]

    def poll() -> None:
        for event in tail.read():
            for sender in senders:
                sender.handle_event(event, run)

    with ExitStack() as stack:
        for sender in senders:
            stack.callback(sender.close)
        with poll_in_background(poll, every_s=_LOOK_S, name="alerts", poll_at_end=True):
            yield


def validate_addresses(alerts: Sequence[Alert], environ: Mapping[str, str]) -> None:
    """Raise if an alert could never be delivered, before there is anything to tell.

    Args:
        environ: Holds the addresses by the names of their secrets.

    Raises:
        RequestError: Addresses that are none; all are named, by their secrets.
    """
    names = dict.fromkeys(alert.webhook for alert in alerts)
    why = {name: address_error(environ.get(name, "")) for name in names}
    wrong = [f"secrets.{name}: {reason}" for name, reason in why.items() if reason]
    if wrong:
        raise RequestError(
            f"{'; '.join(wrong)}. observe.alerts posts there: it must hold one address, such as "
            "https://hooks.example.org/services/A/B."
        )


def address_error(text: str) -> str:
    """Return why an address cannot be posted to; empty: it can. Hides the address, a secret."""
    wrong = next((each for each in text if not "!" <= each <= "~"), None)
    if wrong is not None:
        name = unicodedata.name(wrong, f"U+{ord(wrong):04X}")
        return f"the address holds {name!r}, which no address can"
    try:
        parts = urllib.parse.urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"it holds no address ({error})".replace(text, "...")
    if parts.scheme not in ("http", "https"):
        return "it holds no address that begins with https:// or http://"
    return "" if host else "the address names no host"


def what_it_is(event: Mapping[str, Any], alert: Alert) -> When | None:
    """Return the kind of alert to send for this event, if any."""
    condition: When | None = None
    match event.get("kind"):
        case "attempt_ended" if event.get("outcome") == "failed":
            condition = "failed"
        case "stalled" if event.get("seconds"):
            condition = "stalled"
        case "run_finished" if event.get("is_target_met"):
            condition = "target"
        case "spent" if alert.above_usd is not None and event.get("usd", 0) > alert.above_usd:
            condition = "cost"
        case "device_problem":
            condition = "device_problem"
    return condition if condition in alert.when else None


class _Sender:
    """One address."""

    def __init__(self, alert: Alert, address: str) -> None:
        self._alert = alert
        self._address = address
        self._queue: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._has_sent_cost = False
        self._thread = threading.Thread(target=self._send_all, name="alert", daemon=True)
        self._thread.start()

    def handle_event(self, event: dict[str, Any], run: RunDir) -> None:
        """Send what follows from an event, if anything does."""
        what = what_it_is(event, self._alert)
        if what is None or (what == "cost" and self._has_sent_cost):
            return
        self._has_sent_cost |= what == "cost"
        words = f"{run.run_id}: {_words(what, event)}"
        facts = {key: value for key, value in event.items() if not isinstance(value, dict | list)}
        self._queue.put({"text": words, "what": what, "run_id": run.run_id, "event": facts})

    def close(self) -> None:
        """Deliver what is left, for a while."""
        self._queue.put(None)
        self._thread.join(_LAST_WAIT_S)
        if self._thread.is_alive():
            warn(f"observe.alerts: {self._alert.webhook} did not take an alert in time")

    def _send_all(self) -> None:
        while (content := self._queue.get()) is not None:
            if why := self._send(content):
                warn(
                    f"observe.alerts: {self._alert.webhook} did not take the alert "
                    f"{content['what']!r}: {why}. Look at the address in secrets."
                )

    def _send(self, content: dict[str, Any]) -> str:
        """Post; why it was not taken, or empty."""
        why = ""
        for wait_s in _TRIES_AFTER_S:
            time.sleep(wait_s)
            why, is_final = post(self._address, content)
            if not why or is_final:
                return why
        return why


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An alert goes where the secret says, and nowhere else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    urllib.request.HTTPHandler(),
    urllib.request.HTTPSHandler(),
    urllib.request.HTTPDefaultErrorHandler(),
    urllib.request.HTTPErrorProcessor(),
    _NoRedirect(),
):
    _OPENER.add_handler(_handler)  # no file:, no ftp:


def post(address: str, content: Mapping[str, Any]) -> tuple[str, bool]:
    """Post JSON; why it was not taken (empty: it was), and whether another try would not help."""
    if why := address_error(address):
        return why, True
    headers = {"Content-Type": "application/json", "User-Agent": "shardyard"}
    try:
        request = urllib.request.Request(address, json.dumps(content).encode(), headers)
        with _OPENER.open(request, timeout=_ANSWER_S) as answer:
            answer.read(1024)
        return "", True
    except urllib.error.HTTPError as error:
        with error:
            is_final = 300 <= error.code < 500 and error.code not in (408, 425, 429)
            return f"it answered with HTTP {error.code}", is_final
    except urllib.error.URLError as error:
        number = error.reason.errno if isinstance(error.reason, OSError) else None
        return os.strerror(number) if number else "it was not reached", False
    except (OSError, ValueError, http.client.HTTPException) as error:
        return type(error).__name__, False


def _words(what: When, event: dict[str, Any]) -> str:
    match what:
        case "failed":
            return f"failed: {event.get('reason', 'no reason given')}"
        case "stalled" | "device_problem":
            return describe_event(event) or what
        case "target":
            return f"reached its target at step {event.get('step')}"
        case "cost":
            return f"has cost {format_usd(event['usd'])}"
