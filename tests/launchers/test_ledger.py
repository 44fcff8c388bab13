"""The ledger knows what may exist outside, whatever happened to its writers."""

import json
import os
import stat
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from shardyard.errors import StorageError
from shardyard.io.files import take_lock
from shardyard.launchers.ledger import SUBMITTED, Ledger, LedgerEntry, Submission
from shardyard.launchers.registry import LAUNCHERS


def intend(ledger: Ledger, name: str) -> LedgerEntry:
    return ledger.intend(
        "slurm job", name, launcher="slurm", folder=str(ledger.path.parent), nodes="1"
    )


def names(entries: list[LedgerEntry]) -> list[str]:
    return [found.name for found in entries]


def test_what_was_only_intended_may_exist(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "objects.jsonl")
    intend(ledger, "a")
    job = ledger.confirm(intend(ledger, "b"), "17")
    assert names(ledger.live()) == ["a", "b"]
    assert names(ledger.all()) == ["b"]
    ledger.remove(job)
    assert names(ledger.live()) == ["a"]
    assert names(ledger.ever_intended()) == ["a", "b", "b"], "what is gone was begun, too"


def test_a_torn_line_costs_itself_and_no_other(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "objects.jsonl")
    intend(ledger, "a")
    with ledger.path.open("a") as file:
        file.write('{"t": 1, "action": "inte')
    intend(ledger, "b")
    intend(ledger, "c")
    assert names(ledger.live()) == ["a", "b", "c"]


def test_a_line_is_on_disk_before_what_it_tells_of_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def watch(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").resolve()
        flushed.append("" if path.is_dir() else path.read_text())

    monkeypatch.setattr(os, "fsync", watch)
    ledger = Ledger(tmp_path / "objects.jsonl")
    intend(ledger, "a")
    assert flushed == [ledger.path.read_text(), ""], "the line, then the name of the file"


def test_a_ledger_that_cannot_be_written_stops_what_follows(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Each object must be listed here before it is created"):
        intend(Ledger(tmp_path / "file" / "objects.jsonl"), "a")


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [Path.mkdir, make_fifo, make_loop, make_dangling])
def test_what_stands_in_the_place_of_a_ledger_does_not_say_that_nothing_is_left(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    make(ledger.path)
    for look in (ledger.live, ledger.jobs, ledger.all):
        with pytest.raises(StorageError, match=r"cannot be read: .* and cost money. Restore"):
            look()


SLURM = {"launcher": "slurm", "kind": "slurm job", "name": "r", "id": "17"}
LOCAL = {"launcher": "local", "kind": "local job", "name": "r/job-0", "id": "12-34"}
BATCH_PLACE = {"region": "us-east-1", "queue": "trainers"}
DEFINITION = {
    "launcher": "aws-batch", "kind": "batch job definition", "name": "shardyard-r",
    "id": "arn:aws:batch:us-east-1:123456789012:job-definition/shardyard-r:1",
    "details": BATCH_PLACE,
}  # fmt: skip
BATCH = {
    "launcher": "aws-batch", "kind": "batch job", "name": "shardyard-r",
    "id": "11111111-2222-3333-4444-555555555555", "details": BATCH_PLACE,
}  # fmt: skip
JOBSET = {
    "launcher": "kubernetes", "kind": "JobSet", "name": "r",
    "id": "11111111-2222-3333-4444-555555555555",
    "details": {"context": "test", "namespace": "default"},
}  # fmt: skip


def written(folder: Path, line: dict[str, Any]) -> Ledger:
    """A ledger of one line; details of a job that has a folder are made to fit."""
    fitting: dict[str, Any] = {
        "slurm": {"folder": str(folder), "nodes": "2"},
        "local": {"folder": str(folder / "logs" / "job-0"), "boot": ""},
    }
    details = {**fitting.get(str(line["launcher"]), {}), **line.get("details", {})}
    content = {"t": 1.0, "action": "created", **line, "details": details}
    ledger = Ledger(folder / "ledger.jsonl")
    ledger.path.write_text(json.dumps(content) + "\n")
    return ledger


@pytest.mark.parametrize("line", [SLURM, LOCAL, DEFINITION, BATCH, JOBSET])
def test_a_line_as_a_launcher_writes_it_is_read(tmp_path: Path, line: dict[str, Any]) -> None:
    (entry,) = written(tmp_path, line).live()
    assert (entry.id, entry.name) == (line["id"], line["name"])


@pytest.mark.parametrize(
    ("line", "changes", "words"),
    [
        (SLURM, {"id": "-uroot"}, "id='-uroot' begins with a hyphen"),
        (SLURM, {"id": "17,18"}, "id='17,18' is not what slurm calls a slurm job"),
        (SLURM, {"id": "17_1"}, "id='17_1' is not"),
        (SLURM, {"id": "\u0661\u0667"}, "is not what slurm calls"),
        (SLURM, {"id": 17}, "id=17 is not text"),
        (SLURM, {"id": None}, "is created and has no id"),
        (SLURM, {"id": "17\n18"}, "has a control character"),
        (SLURM, {"name": "r --user=root"}, "name='r --user=root' is not"),
        (SLURM, {"name": "r\x1b]0;x\x07"}, "has a control character"),
        (SLURM, {"kind": "JobSet"}, "slurm has no kind='JobSet'"),
        (SLURM, {"kind": "job"}, "slurm has no kind='job' that is created"),
        (SLURM, {"action": "destroy"}, "action='destroy' is unknown"),
        (SLURM, {"details": {"cluster": "all,--me"}}, "details.cluster='all,--me' is not"),
        (SLURM, {"details": {"nodes": "many"}}, "details.nodes='many' is not"),
        (SLURM, {"details": {"nodes": 2}}, "details.nodes=2 is not text"),
        (SLURM, {"details": {"folder": "/etc"}}, "details.folder='/etc' is not where"),
        (SLURM, {"details": {"folder": "-x"}}, "begins with a hyphen"),
        (LOCAL, {"id": "1"}, "id='1' is not what local calls a local job"),
        (LOCAL, {"id": "0-1"}, "id='0-1' is not"),
        (LOCAL, {"details": {"folder": "/tmp"}}, "details.folder='/tmp' is not where"),
        (LOCAL, {"details": {"folder": "logs/../.."}}, "is not where"),
        (DEFINITION, {"name": "colleague-prod"}, "name='colleague-prod' is not"),
        (DEFINITION, {"id": "colleague-prod:3"}, "id='colleague-prod:3' is not"),
        (BATCH, {"id": "colleague"}, "id='colleague' is not"),
        (BATCH, {"details": {"region": "evil.example/"}}, "details.region="),
        (JOBSET, {"name": "a/../../pods/b"}, "name='a/../../pods/b' is not"),
        (JOBSET, {"kind": "Node"}, "kubernetes has no kind='Node'"),
        (JOBSET, {"id": "any"}, "id='any' is not"),
        (JOBSET, {"details": {"namespace": "a/b"}}, "details.namespace='a/b' is not"),
        (JOBSET, {"details": {"context": "--all"}}, "begins with a hyphen"),
    ],
)
def test_a_line_that_no_launcher_writes_is_refused_by_its_number(
    tmp_path: Path, line: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    for ask in (Ledger.live, Ledger.jobs, Ledger.all):
        with pytest.raises(StorageError) as caught:
            details = {**line.get("details", {}), **changes.get("details", {})}
            ask(written(tmp_path, {**line, **changes, "details": details}))
        said = str(caught.value)
        assert f"{tmp_path}/ledger.jsonl line 1 is not a line of a ledger: " in said
        assert words in said and "Fix or remove that line" in said


def test_a_job_s_folder_is_the_run_s_own_also_through_a_symbolic_link(tmp_path: Path) -> None:
    run, old = tmp_path / "new" / "r", tmp_path / "old"
    run.mkdir(parents=True)
    line = {**SLURM, "details": {"folder": str(old / "r")}}
    with pytest.raises(StorageError, match="leave a symbolic link at its old place"):
        written(run, line).live()
    old.symlink_to(run.parent)
    assert names(written(run, line).live()) == ["r"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "logs").mkdir()
    (run / "logs" / "job-0").symlink_to(elsewhere)
    with pytest.raises(StorageError, match=r"details\.folder"):
        written(run, LOCAL).live()


def test_every_launcher_declares_what_it_writes() -> None:
    for place in LAUNCHERS.values():
        module, _, name = place.partition(":")
        assert SUBMITTED in getattr(import_module(module), name).forms


def test_a_ledger_and_its_folder_are_made_for_their_owner_alone_to_write(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "runs" / "r" / "ledger.jsonl")
    before = os.umask(0)
    try:
        ledger.record(Submission(launcher="moon", run_id="r", id="1", name="r"))
    finally:
        os.umask(before)
    for path in (ledger.path, ledger.path.parent, ledger.path.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


WHOLE = json.dumps({"t": 1.5, "action": "created", "kind": "slurm job", "name": "é", "n": -3e9,
                    "launcher": "slurm", "id": None, "details": {"folder": "/a"}})  # fmt: skip


def test_every_beginning_of_a_line_is_that_of_a_killed_writer(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    intend(ledger, "a")
    before = ledger.path.read_text()
    for length in range(1, len(WHOLE)):
        ledger.path.write_text(before + WHOLE[:length])
        assert names(ledger.live()) == ["a"], WHOLE[:length]
        assert ledger.torn_lines() == [2]


def test_a_complete_line_without_one_of_its_marks_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    intend(ledger, "a")
    before = ledger.path.read_text()
    for place, mark in enumerate(WHOLE[:-2]):
        if mark in '":,{':
            ledger.path.write_text(f"{before}{WHOLE[:place]}{WHOLE[place + 1 :]}\n")
            with pytest.raises(StorageError, match=r"line 2 is not a line of a ledger"):
                ledger.live()


@pytest.mark.parametrize("content", ["", '{"t": 1.5, "action": "inte', "\0" * 90, None])
def test_a_ledger_that_lost_its_lines_does_not_say_that_nothing_is_left(
    content: str | None, tmp_path: Path
) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert ledger.live() == [], "nothing was ever submitted"
    (tmp_path / "submissions").mkdir()
    if content is not None:
        ledger.path.write_text(content)
    with pytest.raises(StorageError, match="as a power cut leaves") as caught:
        ledger.live()
    if "\0" not in (content or ""):
        command = str(caught.value).partition("write a new one: ")[2]
        ledger.path.write_text(command.partition("echo '")[2].partition("'")[0] + "\n")
        assert ledger.live() == [], "as the message says"


def test_a_ledger_is_empty_only_while_a_command_submits(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with ledger.open() as file:
        assert take_lock(file.fileno())
        assert ledger.live() == []
    with pytest.raises(StorageError, match="is empty"):
        ledger.live()
    ledger.remove_empty()
    assert ledger.live() == []
