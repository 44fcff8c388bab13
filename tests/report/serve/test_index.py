"""The list of runs: read again only where files changed, and never wrong because it was kept."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from shardyard.control.runs import list_runs
from shardyard.report.serve import index as index_module
from shardyard.report.serve.index import FILE, Index
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from tests.report.serve.runs import line, make_run


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_LEAST_S", 0.0)
    monkeypatch.setattr(index_module, "_SHARE", 0)


def test_rows_say_what_the_verb_says(tmp_path: Path) -> None:
    make_run(tmp_path, "a", steps=30, every=10)
    make_run(tmp_path, "b", steps=5, end="failed")
    make_run(tmp_path, "c", steps=3, end=None)
    (tmp_path / "no run").mkdir()
    found = {row.id: row for row in Index(tmp_path).rows()}
    verb = {run.state.id: run.state for run in list_runs(tmp_path)}
    assert found.keys() == verb.keys() == {"a", "b", "c"}
    for name, row in found.items():
        state = verb[name]
        assert (row.state, row.step, row.loss) == (state.state, state.step, state.loss)
    assert found["a"].eval_loss == 4.0 + 5.0 / 30 and found["b"].eval_loss is None


def test_only_what_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_run(tmp_path, "a", steps=3)
    make_run(tmp_path, "b", steps=3)
    index = Index(tmp_path)
    index.rows()
    read: list[str] = []
    whole = index_module._read

    def noted(run: RunDir) -> index_module.RunRow:
        read.append(run.run_id)
        return whole(run)

    monkeypatch.setattr(index_module, "_read", noted)
    index.rows()
    assert read == []
    with first.metrics.open("a") as file:
        file.write(json.dumps(line(4)) + "\n")
    assert {row.id: row.step for row in index.rows()} == {"a": 4, "b": 3}
    assert read == ["a"]


def test_what_was_kept_is_used_and_may_be_gone_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "a", steps=3)
    first = Index(tmp_path)
    rows = first.rows()
    first.write()
    monkeypatch.setattr(index_module, "_read", lambda _: pytest.fail("it is known"))
    assert Index(tmp_path).rows() == rows
    monkeypatch.undo()
    for content in (b"", b"{", b'{"version": 1, "runs": [{"row": {"id": 3}}]}', b'{"version": 0}'):
        (tmp_path / FILE).write_bytes(content)
        assert [asdict(row) for row in Index(tmp_path).rows()] == [asdict(row) for row in rows]


def test_a_process_that_takes_a_run_up_or_is_lost_changes_its_row(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=3, end=None)
    index = Index(tmp_path)
    assert [row.state for row in index.rows()] == ["lost"]
    lease = Lease(run.lease)
    assert [row.state for row in index.rows()] == ["running"]
    lease.close()
    assert [row.state for row in index.rows()] == ["lost"]


def test_a_folder_that_goes_is_no_row_any_more(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", steps=3)
    index = Index(tmp_path)
    assert index.has("a") and not index.has("../a")
    run.path.rename(tmp_path / ".a")
    assert not index.has("a")
