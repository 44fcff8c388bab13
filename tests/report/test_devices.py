"""Devices on the report: panels from telemetry, and a verdict from events."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from shardyard.report.charts import Series, device_panels, in_buckets
from shardyard.report.health import health_of
from shardyard.report.page import write_report
from shardyard.report.run_data import read_run
from shardyard.rundir.layout import RunDir
from tests.report.synthetic import BEGAN_T, RunWriter, resolved_run


def run_of(folder: Path) -> RunWriter:
    run = RunDir(folder / "quickstart-1")
    run.path.mkdir()
    writer = RunWriter(run, resolved_run())
    writer.begin()
    writer.start()
    writer.steps(1, 40)
    return writer


def write_telemetry(run: RunDir, node: int, *, devices: int, lines: int = 60) -> None:
    run.telemetry.mkdir(exist_ok=True)
    head = {"t": BEGAN_T, "node": f"n{node}", "attempt": 0, "cores": 8,
            "names": ["H100"] * devices, "memory_bytes": [80 * 2**30] * devices}  # fmt: skip
    rows: list[dict[str, Any]] = [head]
    for k in range(lines):
        row: dict[str, Any] = {
            "t": BEGAN_T + 5 * k,
            "host": {
                "cpu_busy_cores": 3.0,
                "network_sent_bytes": 10**9 * k,
                "disk_read_bytes": None,
            },
        }
        if devices:
            row["devices"] = {
                "utilisation": [0.9] * devices, "power_w": [600.0 + k] * (devices - 1) + [None],
                "pcie_sent_bytes": [10**8 * k] * devices,
            }  # fmt: skip
        rows.append(row)
    run.telemetry_of(node).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_panels_of_what_there_are_numbers_for(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    writer.write()
    write_telemetry(writer.run, 0, devices=2)
    found = device_panels(read_run(writer.run))
    assert set(found) == {
        "device-utilisation", "device-power-w", "device-pcie-sent-bytes",
        "device-cpu-busy-cores", "device-network-sent-bytes",
    }  # fmt: skip
    assert "0.0" in found["device-power-w"], "a line a device"
    assert "first step" in found["device-utilisation"]


@pytest.mark.parametrize("lines", [2, 60])
def test_an_attempt_that_no_sample_is_of_is_still_inside_of_the_picture(
    tmp_path: Path, lines: int
) -> None:
    """Two samples, then a resume an hour later: its marks were hundreds of widths to the right."""
    writer = run_of(tmp_path)
    writer.end(0, "finished")
    writer.clock_t += 3600
    writer.begin()
    writer.start(load_step=40)
    writer.write()
    write_telemetry(writer.run, 0, devices=1, lines=lines)
    panel = device_panels(read_run(writer.run))["device-cpu-busy-cores"]
    (drawn,) = re.findall(r'viewBox="0 0 ([\d.]+) ', panel)
    places = [float(x) for x in re.findall(r'<text[^>]*x="([\d.]+)"', panel)]
    assert places and max(places) < float(drawn)


def test_of_many_devices_the_middle_and_the_band(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    writer.write()
    for node in range(4):
        write_telemetry(writer.run, node, devices=8)
    assert "the middle one of 32" in device_panels(read_run(writer.run))["device-utilisation"]


def test_a_stretch_without_numbers_is_a_gap() -> None:
    series = Series("a", [0.0, 10.0, 90.0, 100.0], [1.0, None, 3.0, 3.0])
    row = in_buckets(series, 0.0, 100.0)
    assert row[0] == 1.0 and row[-1] == 3.0
    assert all(math.isnan(value) for value in row[1:270])


def test_the_verdict_says_what_was_wrong_and_until_when(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    problem = {"node": "n1", "node_rank": 1, "device": 3, "problem": "slowed",
               "cause": "its clock is held down by heat", "whose": "device"}  # fmt: skip
    writer.event("device_problem", **problem, found_t=1.0)
    writer.clock_t += 30
    writer.event("device_well", **problem, found_t=2.0)
    writer.event("program_error", **{**problem, "problem": "xid", "cause": "XID 31: a fault"})
    writer.write()
    health = health_of(read_run(writer.run))
    first, second = health.problems
    assert first.startswith("device 3 on n1: its clock is held down by heat, from ")
    assert " until " in first and " until " not in second
    write_report(writer.run)
    assert "2 things to look at" in writer.run.report_markdown.read_text()
    assert 'id="devices-section"' in writer.run.report_html.read_text()


def test_ranks_of_a_node_that_become_slow_together_are_one_line_and_a_link_is_another(
    tmp_path: Path,
) -> None:
    writer = run_of(tmp_path)
    slow = {"node": "n1", "what": "compute", "factor": 1.2, "compute_s": 0.12, "peers_s": 0.1}
    for rank, step in ((8, 64), (9, 64), (10, 64), (3, 80)):
        node = {"node": "n0"} if rank == 3 else {}
        writer.event("straggler", **{**slow, **node}, rank=rank, step=step, is_over=False)
    link = {"ranks": [0, 1], "nodes": ["n0"], "exchange_s": 0.2, "peers_s": 0.1, "step": 90}
    writer.event("slow_link", **link, factor=2.0, is_over=False)
    writer.clock_t += 30
    writer.event("straggler", **slow, rank=8, step=128, is_over=True)
    writer.event("slow_link", **link, factor=1.0, is_over=True)
    writer.write()
    of_node, of_rank, of_link = health_of(read_run(writer.run)).problems
    assert of_node.startswith("rank 8 on n1: computes 120 ms") and " until " in of_node
    assert "(and 2 more ranks there)" in of_node
    assert of_rank.startswith("rank 3 on n0: ") and " until " not in of_rank
    assert of_link.startswith("link of 2 ranks from 0 to 1 on n0: ") and " until " in of_link


def test_a_collapsed_router_is_in_the_verdict_with_its_fix(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    reason = "A router has collapsed. The likely fix: model.router_aux_loss=0.01."
    writer.event("router_collapsed", step=4, expert_load=4.0, reason=reason)
    writer.write()
    health = health_of(read_run(writer.run))
    assert health.words == "1 thing to look at." and health.problems == (reason,)


def test_watched_and_nothing_found_is_healthy(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    writer.write()
    assert "no node wrote telemetry" in health_of(read_run(writer.run)).words
    write_telemetry(writer.run, 0, devices=0)
    assert health_of(read_run(writer.run)).words == "Healthy: one node watched, no faults."


def test_a_counter_that_stands_still_has_no_panel_and_rates_have_units(tmp_path: Path) -> None:
    writer = run_of(tmp_path)
    writer.write()
    write_telemetry(writer.run, 0, devices=1)
    panel = device_panels(read_run(writer.run))["device-network-sent-bytes"]
    assert " MB/s<" in panel
    path = writer.run.telemetry_of(0)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows[1:]):
        row["host"] |= {"network_sent_bytes": 10 * number, "cpu_busy_cores": 0.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = device_panels(read_run(writer.run))
    assert not {"device-network-sent-bytes", "device-cpu-busy-cores"} & set(found)
