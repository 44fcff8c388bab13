"""Every node has what node 0 has, or is named, before any of them trains."""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.model.hub import HubRequest, commit_of, digest_of, fetch
from shardyard.config.resolved import DatasetMetadata, EvalSetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import LostNodeError, RequestError, ShardyardError
from shardyard.families.presets import PRESETS
from shardyard.node.preflight import Readiness, prepare_node, serve_digests, wait_for_nodes
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir
from tests.hub import Hub, running_hub, saved_llama

WEIGHTS = "model.safetensors"
HOST = os.uname().nodename


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "runs" / "r")


@pytest.fixture
def facts(tmp_path: Path) -> DatasetMetadata:
    folder = tmp_path / "prepared" / "text-0"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"fingerprint": "f"}))
    return DatasetMetadata(
        dir=str(folder), fingerprint="f", vocab_size=512, train_tokens=1000, eval_tokens=100,
        train_documents=2, eval_documents=1, unigram_entropy=5.0,
    )  # fmt: skip


def resolved(facts: DatasetMetadata, model_dir: Path | None = None, **sections: Any) -> Resolved:
    given: dict[str, Any] = {"cluster": {"nodes": 2, "devices": 1}, **sections}
    if model_dir is not None and "model" not in given:
        given["model"] = {"path": str(model_dir)}
    return Resolved(
        recipe=Recipe.model_validate(given), reasons={}, shape=PRESETS["llama-tiny"].shape,
        data=facts, steps=3, model_dir=None if model_dir is None else str(model_dir),
    )  # fmt: skip


class Nodes:
    """Node 0 of a session here, and node 1 in a thread, which may see other files."""

    def __init__(self, run: RunDir, ours: Resolved, theirs: Resolved | None = None) -> None:
        self._files = Readiness(run, "s")
        self._ours = ours
        self.said: list[str] = []
        self.errors: list[ShardyardError] = []
        write_resolved(run.resolved(0), theirs or ours)

    def node_0(self, **limits: float) -> None:
        wait_for_nodes(self._files, 0, self._ours, say=self.said.append, **limits)

    @contextmanager
    def answers(self) -> Iterator[None]:
        with serve_digests(self._files, 0, self._ours):
            yield

    @contextmanager
    def node_1(self, *, stays_s: float = 0.0) -> Iterator[None]:
        def be_node_1() -> None:
            try:
                with prepare_node(self._files, 0, 1, log=self.said.append):
                    time.sleep(stays_s)
            except ShardyardError as error:
                self.errors.append(error)

        thread = threading.Thread(target=be_node_1)
        thread.start()
        try:
            yield
        finally:
            thread.join(timeout=30)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self._files.report(1).read_text())
        return report


def test_a_shared_folder_is_the_same_without_reading_it(
    run: RunDir, facts: DatasetMetadata, llama: Path
) -> None:
    nodes = Nodes(run, resolved(facts, llama))
    with nodes.answers(), nodes.node_1():
        nodes.node_0()
    assert nodes.report()["state"] == "ready" and nodes.report()["host"] == HOST
    assert not any("reads" in words for words in nodes.said)


def test_a_copy_is_read_and_found_the_same(
    run: RunDir, facts: DatasetMetadata, llama: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    nodes = Nodes(run, resolved(facts, llama), resolved(facts, copy))
    with nodes.answers(), nodes.node_1():
        nodes.node_0()
    assert any("reads" in words for words in nodes.said)
    assert nodes.report()["state"] == "ready"


def change(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")


def test_a_file_that_differs_is_named_with_rank_and_host_and_ends_the_job_with_2(
    run: RunDir, facts: DatasetMetadata, llama: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(llama, tmp_path / "copy")
    change(copy)
    (copy / "more.json").write_text("{}")
    nodes = Nodes(run, resolved(facts, llama), resolved(facts, copy))
    with nodes.answers(), nodes.node_1(), pytest.raises(RequestError) as caught:
        nodes.node_0()
    said = str(caught.value)
    assert said.startswith(f"node 1 ({HOST}): {copy} is not what node 0 has there: ")
    assert f"{WEIGHTS} has the SHA-256" in said and "more.json is not on node 0" in said
    assert "config.json has" not in said
    assert caught.value.exit_code == 2 and [error.exit_code for error in nodes.errors] == [2]


def test_a_folder_that_is_not_on_the_node_is_refused(
    run: RunDir, facts: DatasetMetadata, llama: Path, tmp_path: Path
) -> None:
    nodes = Nodes(run, resolved(facts, llama), resolved(facts, tmp_path / "none"))
    with nodes.answers(), nodes.node_1(), pytest.raises(RequestError) as caught:
        nodes.node_0()
    assert "none is not there, and node 0 reads the model from it" in str(caught.value)
    assert "launch.volumes" in str(caught.value)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.take_over(monkeypatch, tmp_path / "home")
        yield hub


def of_hub(facts: DatasetMetadata, store: Path, commit: str) -> Resolved:
    folder = store / f"acme--llama@{commit[:12]}"
    model = {"hub": "acme/llama", "dir": str(store)}
    found = digest_of(folder)  # of node 0: the other one has not fetched it yet
    return replace(resolved(facts, folder, model=model), model_commit=commit, model_digest=found)


def fetched(store: Path) -> Path:
    wanted = HubRequest(kind="model.hub", name="acme/llama", revision=None, level="weights")
    return fetch(wanted, store, log=lambda _: None)


def test_a_node_without_the_store_fetches_the_same_commit_after_the_branch_moved(
    hub: Hub, run: RunDir, facts: DatasetMetadata, llama: Path, tmp_path: Path
) -> None:
    commit = hub.add("acme/llama", llama)
    first = fetched(tmp_path / "a")
    hub.add("acme/llama", saved_llama(tmp_path / "other", seed=1))
    nodes = Nodes(run, of_hub(facts, tmp_path / "a", commit), of_hub(facts, tmp_path / "b", commit))
    with nodes.answers(), nodes.node_1():
        nodes.node_0()
    (second,) = (tmp_path / "b").iterdir()
    assert commit_of(second) == commit and digest_of(second) == digest_of(first)
    assert hub.downloads["acme/llama", WEIGHTS] == 2
    assert any("fetching model.hub=acme/llama" in words for words in nodes.said)


def test_a_file_of_a_store_that_was_changed_is_named(
    hub: Hub, run: RunDir, facts: DatasetMetadata, llama: Path, tmp_path: Path
) -> None:
    commit = hub.add("acme/llama", llama)
    fetched(tmp_path / "a")
    change(fetched(tmp_path / "b"))
    nodes = Nodes(run, of_hub(facts, tmp_path / "a", commit), of_hub(facts, tmp_path / "b", commit))
    with nodes.answers(), nodes.node_1(), pytest.raises(RequestError) as caught:
        nodes.node_0()
    assert str(caught.value).startswith(f"node 1 ({HOST}): ")
    assert f"{WEIGHTS} was changed after it was fetched" in str(caught.value)


def test_data_of_another_fingerprint_is_refused(
    run: RunDir, facts: DatasetMetadata, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text(json.dumps({"fingerprint": "g"}))
    theirs = replace(facts, dir=str(tmp_path / "other"))
    nodes = Nodes(run, resolved(facts), resolved(theirs))
    with nodes.answers(), nodes.node_1(), pytest.raises(RequestError) as caught:
        nodes.node_0()
    assert "has the fingerprint g here and f on node 0" in str(caught.value)
    assert "data.source=python-stdlib or tokenizer has other content" in str(caught.value)


def test_a_set_of_another_fingerprint_is_refused(
    run: RunDir, facts: DatasetMetadata, tmp_path: Path
) -> None:
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / "manifest.json").write_text(json.dumps({"fingerprint": "g"}))
    hard = EvalSetMetadata(name="hard", data=replace(facts, dir=str(tmp_path / "hard")))
    both = resolved(replace(facts, eval_sets=(hard,)), data={"eval_sets": {"hard": "hard.jsonl"}})
    nodes = Nodes(run, both)
    with nodes.answers(), nodes.node_1(), pytest.raises(RequestError) as caught:
        nodes.node_0()
    assert "hard has the fingerprint g here and f on node 0" in str(caught.value)
    assert "data.eval_sets.hard=hard.jsonl or tokenizer has other content" in str(caught.value)


def test_a_node_that_died_is_named_and_does_not_hang_the_others(
    run: RunDir, facts: DatasetMetadata
) -> None:
    nodes = Nodes(run, resolved(facts))
    with nodes.answers(), nodes.node_1():
        pass  # it got ready, and beats no more
    with pytest.raises(LostNodeError) as caught:
        nodes.node_0(lost_after_s=-1.0)
    assert f"node 1 ({HOST}) is ready, then no more. The run begins with 2" in str(caught.value)
    report = nodes.report() | {"state": "stopped", "words": "was stopped (SystemExit)"}
    Readiness(run, "s").report(1).write_text(json.dumps(report))
    with pytest.raises(LostNodeError, match=r"was stopped \(SystemExit\), then no more"):
        nodes.node_0()


def test_a_node_that_never_came_is_waited_for_and_then_named(
    run: RunDir, facts: DatasetMetadata
) -> None:
    nodes = Nodes(run, resolved(facts))
    with pytest.raises(LostNodeError, match="node 1 was not heard of for"):
        nodes.node_0(comes_within_s=0.5, say_every_s=0.2)
    assert nodes.said[0].endswith("node 1 has not been heard of")


def test_an_elastic_run_begins_with_those_that_are_ready(
    run: RunDir, facts: DatasetMetadata
) -> None:
    elastic = {"min_nodes": 2, "start_wait_s": 0.5}
    cluster = {"nodes": 3, "devices": 1}
    nodes = Nodes(run, resolved(facts, elastic=elastic, cluster=cluster))
    with nodes.answers(), nodes.node_1(stays_s=1.0):
        started_s = time.monotonic()
        nodes.node_0()
        assert time.monotonic() - started_s >= 0.5


def test_what_another_start_of_the_session_said_is_not_heard(
    run: RunDir, facts: DatasetMetadata
) -> None:
    nodes = Nodes(run, resolved(facts))
    with nodes.answers(), nodes.node_1():
        nodes.node_0()
    report = nodes.report()
    Readiness(run, "s").report(1).write_text(json.dumps(report | {"attempt": 7}))
    with pytest.raises(LostNodeError, match="node 1 was not heard of"):
        nodes.node_0(comes_within_s=0.3)
    for text in ("{", "[]", json.dumps({**report, "state": "?"})):
        Readiness(run, "s").report(1).write_text(text)
        with pytest.raises(LostNodeError, match="node 1 was not heard of"):
            nodes.node_0(comes_within_s=0.0)
    Readiness(run, "s").withdraw()
    assert not list((run.path / "sessions").iterdir())
