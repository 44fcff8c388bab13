"""The measurement of the page of runs, small."""

from pathlib import Path

import pytest

from benchmarks import serve_runs
from benchmarks.serve_runs import long_names, measure_curves, measure_list, measure_page
from tests.debian_packages import need

pytestmark = pytest.mark.system


def test_a_list_and_curves_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure_list(tmp_path / "list", 20, rounds=1)
    assert found["cold_s"] > 0 and found["warm_s"] > 0 and found["peak_bytes"] > 10**7
    monkeypatch.setattr(serve_runs, "_LONG_RUNS", 3)
    monkeypatch.setattr(serve_runs, "_LONG_STEPS", 500)
    curves = measure_curves(tmp_path / "long", rounds=1)
    assert 0 < curves["polling_bytes_per_s"] < 1000 and curves["sent_bytes"] > 1000


def test_the_first_chart_in_a_browser_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("chromium")
    monkeypatch.setattr(serve_runs, "_LONG_RUNS", 3)
    monkeypatch.setattr(serve_runs, "_LONG_STEPS", 500)
    measure_curves(tmp_path, rounds=1)
    found = measure_page(tmp_path, long_names(), rounds=1)
    assert 0 < found["first_chart_ms"] <= found["all_charts_ms"]
