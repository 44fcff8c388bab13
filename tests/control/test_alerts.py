"""Alerts reach a real address that is well, down, slow or wrong, and nothing waits for one."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.schema.observe import Alert
from shardyard.control import alerts
from shardyard.control.alerts import alerting, post, validate_addresses
from shardyard.errors import RequestError
from shardyard.rundir.jsonl import EventWriter
from shardyard.rundir.layout import RunDir
from tests.control.receiver import Receiver, receiver
from tests.image.registries import free_port


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "_LOOK_S", 0.02)
    monkeypatch.setattr(alerts, "_TRIES_AFTER_S", (0.0, 0.02, 0.05))
    monkeypatch.setattr(alerts, "_ANSWER_S", 0.5)
    monkeypatch.setattr(alerts, "_LAST_WAIT_S", 3.0)


def send(folder: Path, address: str, *events: dict[str, Any], **alert: Any) -> None:
    """What a run writes while alerts are sent to one address."""
    run = RunDir(folder / "bert-1")
    writer = EventWriter(run.events, attempt=0, generation=0)
    writer.write("attempt_ended", outcome="failed", reason="of an earlier attempt")
    told = Alert(when=alert.pop("when"), webhook="OWN", **alert)
    with alerting(run, (told,), {"OWN": address}):
        for event in events:
            writer.write(event.pop("kind"), **event)


FAILED = {"kind": "attempt_ended", "outcome": "failed", "exit_code": 1, "reason": "rank 1 was lost"}
STALLED = {"kind": "stalled", "seconds": 900.0, "usual_s": 2.0}
PROBLEM = {"kind": "device_problem", "node": "n1", "node_rank": 1, "device": 3,
           "cause": "XID 79: the device has fallen off the bus", "whose": "device"}  # fmt: skip


def texts(found: Receiver) -> list[str]:
    return [content["text"] for content in found.came]


def test_each_kind_is_told_once_to_who_asked_for_it(tmp_path: Path) -> None:
    every = ("failed", "stalled", "target", "cost", "device_problem")
    with receiver() as found:
        send(
            tmp_path, found.address, dict(STALLED), {"kind": "stalled", "seconds": 0, "usual_s": 2},
            {"kind": "spent", "usd": 99.0, "usd_per_hour": 98.0}, {"kind": "spent", "usd": 101.0},
            {"kind": "spent", "usd": 103.0}, dict(PROBLEM),
            {"kind": "run_finished", "step": 70, "is_target_met": True}, dict(FAILED),
            when=every, above_usd=100.0,
        )  # fmt: skip
    assert [content["what"] for content in found.came] == [
        "stalled", "cost", "device_problem", "target", "failed",
    ]  # fmt: skip
    assert texts(found)[1:] == [
        "bert-1: has cost $101.00",
        "bert-1: device 3 on n1: XID 79: the device has fallen off the bus",
        "bert-1: reached its target at step 70",
        "bert-1: failed: rank 1 was lost",
    ]
    assert found.came[-1]["run_id"] == "bert-1" and found.came[-1]["event"]["exit_code"] == 1


def test_nothing_is_sent_that_was_not_asked_for(tmp_path: Path) -> None:
    with receiver() as found:
        drained = {"kind": "attempt_ended", "outcome": "drained", "exit_code": 143}
        done = {"kind": "run_finished", "step": 70, "is_target_met": False}
        send(tmp_path, found.address, dict(STALLED), drained, done, when=("failed", "target"))
    assert found.came == []


def test_an_address_that_fails_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    with receiver(500, 503, 200) as found:
        send(tmp_path, found.address, dict(FAILED), when=("failed",))
    assert len(found.came) == 1 and found.tries == 3


@pytest.mark.parametrize(("code", "tries"), [(404, 1), (401, 1), (302, 1), (500, 3), (429, 3)])
def test_one_that_refuses_is_said_without_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, tries: int
) -> None:
    with receiver(code) as found, caplog.at_level(logging.WARNING):
        send(tmp_path, found.address, dict(FAILED), when=("failed",))
    assert found.tries == tries and found.came == []
    assert caplog.messages == [
        f"observe.alerts: OWN did not take the alert 'failed': it answered with HTTP {code}. Look "
        "at the address in secrets."
    ]


def test_one_that_is_down_is_said_without_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"http://127.0.0.1:{free_port()}/token"
    with caplog.at_level(logging.WARNING):
        send(tmp_path, address, dict(FAILED), when=("failed",))
    (told,) = caplog.messages
    assert "Connection refused" in told and "token" not in told and "127.0.0.1" not in told


def test_a_slow_one_holds_up_no_other_and_no_run_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir(tmp_path / "bert-1")
    writer = EventWriter(run.events, attempt=0, generation=0)
    both = tuple(Alert(when=("failed",), webhook=name) for name in ("SLOW", "WELL"))
    with receiver(5.0) as slow, receiver() as well, caplog.at_level(logging.WARNING):
        began_s = time.monotonic()
        with alerting(run, both, {"SLOW": slow.address, "WELL": well.address}):
            writer.write("attempt_ended", outcome="failed", reason="lost")
            while not well.came:
                time.sleep(0.01)
            assert time.monotonic() - began_s < 2.0
        assert time.monotonic() - began_s < 5.0
    assert "SLOW did not take" in caplog.messages[0]


@pytest.mark.parametrize("address", ["", "file:///etc/passwd", "ftp://a/b", "hooks.example"])
def test_what_is_no_web_address_is_not_opened(address: str) -> None:
    why, is_final = post(address, {})
    assert "holds no address that begins with https:// or http://" in why and is_final


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("hooks.example/secret", "it holds no address that begins with https:// or http://"),
        ("https://", "the address names no host"),
        ("https://a/secret\u201d", "the address holds 'RIGHT DOUBLE QUOTATION MARK'"),
        ("https://a/secret b", "the address holds 'SPACE'"),
        ("https://a:port/secret", "it holds no address (Port could not be cast"),
        ("https://[::1/secret", "it holds no address (Invalid IPv6 URL)"),
    ],
)
def test_an_address_that_can_take_nothing_is_rejected_before_the_run(
    address: str, why: str
) -> None:
    wrong, right = (Alert(when=("failed",), webhook=name) for name in ("OWN", "OTHER"))
    environ = {"OWN": address, "OTHER": "http://127.0.0.1:9/x"}
    validate_addresses([right], environ)
    with pytest.raises(RequestError) as error:
        validate_addresses([wrong, right, wrong], environ)
    assert str(error.value).startswith(f"secrets.OWN: {why}")
    assert "secret" not in str(error.value).replace("secrets.OWN", "")


def test_an_address_with_odd_letters_is_no_traceback() -> None:
    why, _ = post("http://127.0.0.1:1/a b\n", {"text": "x"})
    assert why
