"""The ledger knows what may exist outside, whatever happened to its writers."""

from pathlib import Path

import pytest

from shardyard.errors import StorageError
from shardyard.launch.ledger import Entry, Ledger


def intend(ledger: Ledger, name: str) -> Entry:
    return ledger.intend("slurm job", name, launcher="slurm")


def names(entries: list[Entry]) -> list[str]:
    return [found.name for found in entries]


def test_what_was_only_intended_may_exist(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "objects.jsonl")
    intend(ledger, "a")
    job = ledger.confirm(intend(ledger, "b"), "17")
    assert names(ledger.live()) == ["a", "b"]
    assert names(ledger.all()) == ["b"]
    ledger.remove(job)
    assert names(ledger.live()) == ["a"]


def test_a_torn_line_costs_itself_and_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "objects.jsonl")
    intend(ledger, "a")
    with ledger.path.open("a") as file:
        file.write('{"t": 1, "action": "inte')
    intend(ledger, "b")
    intend(ledger, "c")
    assert names(ledger.live()) == ["a", "b", "c"]


def test_a_ledger_that_cannot_be_written_stops_what_follows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Nothing is created outside"):
        intend(Ledger(tmp_path / "file" / "objects.jsonl"), "a")
