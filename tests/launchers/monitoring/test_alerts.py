"""Each alert fires where it should and nowhere else, says Prometheus' own rule tester."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardyard.launchers.monitoring.alerts import ALERTS, render
from tests.debian_packages import need
from tests.launchers.monitoring.queries import metrics_of, unknown_in

PAGE = Path(__file__).parents[3] / "docs" / "monitoring.md"


@dataclass(frozen=True)
class Case:
    """Series of an hour, in promtool's notation of a value a minute, and one alert."""

    what: str
    alert: str
    series: dict[str, str]
    minute: int
    value: str | None = None
    """As an annotation shows it where it fires; None: it does not fire."""
    labels: dict[str, str] = field(default_factory=lambda: {"run_id": "a"})


def of_run(
    metric: str, values: str, *, node: int = 0, pod: str = "p", more: str = ""
) -> dict[str, str]:
    return {f'shardyard_{metric}{{run_id="a",node="{node}",instance="{pod}"{more}}}': values}


def states(pod: str = "p", node: int = 0, **values: str) -> dict[str, str]:
    """What an agent tells of its attempt; states that are not named are 0 as long as others."""
    found: dict[str, str] = {}
    for state, told in values.items():
        found |= of_run("run_state", told, node=node, pod=pod, more=f',state="{state}"')
    return found


def problems(values: str, pod: str = "p") -> dict[str, str]:
    return of_run("events_total", values, pod=pod, more=',kind="device_problem"')


def xid(values: str) -> dict[str, str]:
    return {'DCGM_FI_DEV_XID_ERRORS{gpu="3",Hostname="n0"}': values}


WORKING = states(running="1x60")
GPU = {"gpu": "3", "Hostname": "n0"}
FAILED = states(running="1x5 0 stale", failed="0x5 1 stale")
LOST = states(running="1x5 stale", failed="0x5 stale")

CASES = [
    Case("its agent said so and is gone", "RunFailed", FAILED, 10, value=""),
    Case("an hour later it is old", "RunFailed", FAILED, 75),
    Case("another attempt runs", "RunFailed", {**FAILED, **states("q", running="_x9 2x60")}, 12),
    Case(
        "another attempt finished",
        "RunFailed",
        {**FAILED, **states("q", running="_x9 2 0 stale", finished="_x9 0 2 stale")},
        20,
    ),
    Case(
        "the other node said last that it runs",
        "RunFailed",
        {**FAILED, **states("q", 1, running="1x5 stale")},
        10,
        value="",
    ),
    Case("it finished", "RunFailed", states(running="1x5 0 stale", finished="0x5 1 stale"), 10),
    Case("killed without a word", "RunLost", LOST, 15, value=""),
    Case("it may be started again", "RunLost", LOST, 8),
    Case("it was started again", "RunLost", {**LOST, **states("q", running="_x8 2x60")}, 15),
    Case("one node of two answers", "RunLost", {**LOST, **states("q", 1, running="1x60")}, 15),
    Case("it finished", "RunLost", states(running="1x5 0 stale", finished="0x5 1 stale"), 15),
    Case("it was draining", "RunLost", states(running="1x5 0 stale", draining="0x5 1 stale"), 15),
    Case("it failed, which is told", "RunLost", FAILED, 15),
    Case(
        "its second attempt, after a drain",
        "RunLost",
        {
            **states(running="1x5 0 stale", drained="0x5 1 stale"),
            **states("q", running="_x8 2x6 stale", drained="_x8 0x6 stale"),
        },
        25,
        value="",
    ),
    Case(
        "20 usual steps and 2 minutes",
        "RunStalled",
        {**WORKING, **of_run("step_seconds", "1x60"), **of_run("step_age_seconds", "0+60x60")},
        10,
        value="10m 0s",
    ),
    Case(
        "its steps take long",
        "RunStalled",
        {**WORKING, **of_run("step_seconds", "60x60"), **of_run("step_age_seconds", "0+60x60")},
        15,
    ),
    Case(
        "no first step",
        "RunStalled",
        {**WORKING, **of_run("step_age_seconds", "0+60x60")},
        13,
        value="13m 0s",
    ),
    Case(
        "the first step takes long",
        "RunStalled",
        {**WORKING, **of_run("step_age_seconds", "0+60x60")},
        9,
    ),
    Case(
        "one node does not see the run's folder",
        "RunStalled",
        {
            **WORKING,
            **of_run("step_seconds", "1x60"),
            **of_run("step_age_seconds", "1x60"),
            **of_run("step_age_seconds", "0+60x60", node=1),
        },
        30,
    ),
    Case(
        "three intervals and 10 minutes",
        "CheckpointOld",
        {
            **WORKING,
            **of_run("step_seconds", "10x60"),
            **of_run("checkpoint_every_steps", "10x60"),
            **of_run("checkpoint_age_seconds", "0+60x60"),
        },
        20,
        value="20m 0s",
    ),
    Case(
        "it was not due",
        "CheckpointOld",
        {
            **WORKING,
            **of_run("step_seconds", "10x60"),
            **of_run("checkpoint_every_steps", "100x60"),
            **of_run("checkpoint_age_seconds", "0+60x60"),
        },
        20,
    ),
    Case("it computed wrongly", "DeviceProblem", problems("0x5 1x20"), 8, value=""),
    Case("long ago", "DeviceProblem", problems("1x60"), 30),
    Case("an hour ago", "DeviceProblem", problems("0x5 1x80"), 75),
    Case(
        "and its agent is another now",
        "DeviceProblem",
        {**problems("0x5 stale"), **problems("_x6 1x20", pod="q")},
        10,
        value="",
    ),
    Case("off the bus", "DeviceXid", xid("0x5 79x20"), 8, value="79", labels=GPU),
    Case("the program's own fault", "DeviceXid", xid("0x5 13x20"), 8, labels=GPU),
    Case("none", "DeviceXid", xid("0x60"), 8, labels=GPU),
]


@pytest.mark.heavy
def test_every_rule_fires_where_it_should_and_nowhere_else(tmp_path: Path) -> None:
    need("prometheus")
    rules = tmp_path / "rules.yaml"
    rules.write_text(yaml.safe_dump(render()))
    tests = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", **_test(case)} for case in CASES],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests, sort_keys=False))
    for words in (("check", "rules", str(rules)), ("test", "rules", str(tmp_path / "tests.yaml"))):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _test(case: Case) -> dict[str, Any]:
    name = f"Shardyard{case.alert}"
    expected = [] if case.value is None else [_expected(case, name)]
    return {
        "name": f"{name}: {case.what}",
        "input_series": [{"series": one, "values": told} for one, told in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{case.minute}m", "alertname": name, "exp_alerts": expected}
        ],
    }


def _expected(case: Case, name: str) -> dict[str, Any]:
    (alert,) = (alert for alert in ALERTS if alert.name == name)
    words = {f"{{{{ $labels.{label} }}}}": told for label, told in case.labels.items()}
    value = case.value or ""
    words |= {"{{ $value | humanizeDuration }}": value, "{{ $value }}": value}
    shown = {"summary": alert.summary, "description": alert.todo}
    for word, told in words.items():
        shown = {key: text.replace(word, told) for key, text in shown.items()}
    assert "{{" not in "".join(shown.values())
    return {"exp_labels": {**case.labels, "severity": alert.severity}, "exp_annotations": shown}


def test_every_alert_fires_in_some_case_and_stays_quiet_in_another() -> None:
    for alert in ALERTS:
        name = alert.name.removeprefix("Shardyard")
        assert {case.value is None for case in CASES if case.alert == name} == {True, False}, name


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_no_alert_asks_for_what_nobody_exports(alert: Any) -> None:
    assert f"| {alert.name} |" in PAGE.read_text()
    shown = alert.summary + alert.todo
    assert metrics_of(alert.expr) and unknown_in(alert.expr, shown) == set()
    assert alert.todo.endswith(".") and "$labels" in alert.summary
