"""Preparing: the same bytes whatever happens, at once the second time, clear refusals."""

import fcntl
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shardyard.config.fingerprint import digest
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.data.byte_ranges import SourceFile
from shardyard.data.prepare import prepare, request_of
from shardyard.data.shards import TokenShards, read_metadata, verify
from shardyard.errors import DataError, RequestError, StorageError

NUM_LINES = 5000
"""Some 4 MB of text: four pieces. Long words that become one token each make it quick."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "lines.jsonl"
    words = [word * 8 for word in ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")]
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(NUM_LINES):
            text = " ".join(draw.choices(words, k=number % 41))
            file.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    return path


@pytest.fixture(scope="module")
def reference(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus prepared in one process, undisturbed."""
    return Path(run(corpus, tmp_path_factory.mktemp("reference")).dir)


def recipe_of(source: Path, folder: Path, **settings: Any) -> Recipe:
    data = {"source": str(source), "dir": str(folder), "vocab_size": 600, "workers": 1}
    return Recipe.model_validate({"data": {**data, **settings}})


def run(
    source: Path, folder: Path, *, model_dir: Path | None = None, **settings: Any
) -> DatasetMetadata:
    recipe = recipe_of(source, folder, **settings)
    return prepare(recipe, model_dir=model_dir, progress=lambda *_: None)


def start(recipe: Recipe, folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.json"
    path.write_text(recipe.model_dump_json())
    command = [sys.executable, "-m", "shardyard.data", str(path), *options]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def contents(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def wait_until_ended(session: int) -> None:
    """Wait until no process of a session is left; members are read from /proc."""
    for _ in range(500):
        if not members_of(session):
            return
        time.sleep(0.01)
    raise AssertionError(f"left running: {members_of(session)}")


def members_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def test_every_document_is_there_whole_and_on_one_side(corpus: Path, reference: Path) -> None:
    texts = Counter(json.loads(line)["text"] for line in corpus.read_text().splitlines())
    tokenizer = Tokenizer.from_file(str(reference / "tokenizer.json"))
    found: Counter[str] = Counter()
    share = {}
    for split in ("train", "eval"):
        shards = TokenShards(reference, split)
        tokens = shards.read(0, shards.num_tokens)
        documents = np.split(tokens, shards.document_starts[1:])
        share[split] = len(documents) / NUM_LINES
        found.update(tokenizer.decode(document.tolist()[:-1]) for document in documents)
    assert found == texts
    # 5 % of 5,000 documents: standard deviation 0.3 %
    assert 0.036 < share["eval"] < 0.064


def test_the_facts_agree_with_the_shards(corpus: Path, reference: Path) -> None:
    facts = run(corpus, reference.parent)
    shards = {split: TokenShards(reference, split) for split in ("train", "eval")}
    tokens = shards["train"].read(0, shards["train"].num_tokens)
    shares = [count / len(tokens) for count in Counter(tokens.tolist()).values()]
    assert facts.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in shares))
    assert facts.train_tokens == len(tokens)
    assert facts.eval_tokens == shards["eval"].num_tokens
    assert facts.train_documents == len(shards["train"].document_starts)
    assert facts.train_documents + facts.eval_documents == NUM_LINES
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    assert facts.train_bytes is not None and facts.eval_bytes is not None
    assert facts.train_bytes + facts.eval_bytes == sum(len(text.encode()) for text in texts)
    tokenizer = Tokenizer.from_file(str(reference / "tokenizer.json"))
    held_out = tokenizer.decode(shards["eval"].read(0, facts.eval_tokens).tolist())
    assert facts.eval_bytes == len(held_out.encode())
    assert facts.vocab_size == len(AutoTokenizer.from_pretrained(reference))
    assert len(list(reference.glob("train-*.bin"))) == 4
    verify(reference)


def test_a_set_that_was_prepared_before_bytes_were_counted_still_opens(
    reference: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(reference, tmp_path / "old")
    manifest = json.loads((copy / "manifest.json").read_text())
    for split in manifest["splits"].values():
        del split["bytes"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    facts = read_metadata(copy)
    assert (facts.train_bytes, facts.eval_bytes) == (None, None)
    assert facts.eval_tokens == read_metadata(reference).eval_tokens


def test_a_second_call_does_nothing(corpus: Path, reference: Path) -> None:
    calls: list[str] = []
    times = {path: path.stat().st_mtime_ns for path in reference.iterdir()}
    prepare(
        recipe_of(corpus, reference.parent),
        model_dir=None,
        progress=lambda activity, *_: calls.append(activity),
    )
    assert calls == []
    assert {path: path.stat().st_mtime_ns for path in reference.iterdir()} == times


@pytest.mark.heavy
def test_three_workers_write_the_same_bytes(corpus: Path, reference: Path, tmp_path: Path) -> None:
    process = start(recipe_of(corpus, tmp_path / "out", workers=3), tmp_path)
    answer, talk = process.communicate(timeout=60)
    assert process.returncode == 0, talk
    folder = Path(json.loads(answer)["dir"])
    assert contents(folder) == contents(reference)
    assert DatasetMetadata(**json.loads(answer)) == replace(
        run(corpus, reference.parent), dir=str(folder)
    )
    assert re.search("turning text into tokens: (\\S+) of \\1 MB", talk.decode())


@pytest.mark.heavy
def test_kills_at_random_moments_change_no_byte(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path / "out", workers=2)
    draw = random.Random(7)
    for _ in range(6):
        process = start(recipe, tmp_path)
        try:
            process.wait(draw.uniform(0.3, 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        wait_until_ended(process.pid)
    facts = run(corpus, tmp_path / "out")
    assert contents(Path(facts.dir)) == contents(reference)


@pytest.mark.heavy
def test_finished_pieces_are_kept_after_a_kill(corpus: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop_at_half(activity: str, done_bytes: int, total_bytes: int) -> None:
        if activity == "turning text into tokens" and done_bytes > total_bytes / 2:
            raise StopError

    with pytest.raises(StopError):
        prepare(recipe_of(corpus, tmp_path), model_dir=None, progress=stop_at_half)
    calls: list[tuple[str, int]] = []
    prepare(
        recipe_of(corpus, tmp_path),
        model_dir=None,
        progress=lambda activity, done_bytes, _: calls.append((activity, done_bytes)),
    )
    assert {activity for activity, _ in calls} == {"turning text into tokens"}
    assert calls[0][1] > corpus.stat().st_size / 2
    assert len(calls) < 4


@pytest.mark.heavy
def test_ctrl_c_ends_everything_with_130_and_no_traceback(corpus: Path, tmp_path: Path) -> None:
    process = start(recipe_of(corpus, tmp_path / "out", workers=2), tmp_path)
    while not list((tmp_path / "out").glob("*/pieces/*.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    answer, talk = process.communicate(timeout=60)
    assert process.returncode == 130
    assert answer == b""
    assert b"Traceback" not in talk
    wait_until_ended(process.pid)


def test_a_second_process_waits_for_the_first(corpus: Path, reference: Path) -> None:
    folder = reference
    (folder / "pieces").mkdir()  # left by a kill between the manifest and the end
    lock = (folder / ".lock").open("r+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    activities: list[str] = []
    waits = threading.Event()

    def note(activity: str, *_: int) -> None:
        activities.append(activity)
        waits.set()

    thread = threading.Thread(
        target=lambda: prepare(recipe_of(corpus, folder.parent), model_dir=None, progress=note)
    )
    thread.start()
    assert waits.wait(10)
    lock.close()
    thread.join(10)
    assert not thread.is_alive()
    assert activities == ["waiting for another process that prepares the same data"]
    assert not (folder / "pieces").exists()


@pytest.mark.heavy
def test_two_at_once_write_one_sound_data_set(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path / "out")
    both = [start(recipe, tmp_path / name) for name in ("a", "b")]
    answers = [process.communicate(timeout=60)[0] for process in both]
    assert answers[0] == answers[1]
    assert contents(Path(json.loads(answers[0])["dir"])) == contents(reference)


@pytest.mark.heavy
def test_copied_text_gives_the_same_fingerprint_elsewhere(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    moved = shutil.copyfile(corpus, tmp_path / "lines.jsonl")
    facts = run(moved, tmp_path / "out")
    assert facts.fingerprint == run(corpus, reference.parent).fingerprint
    assert Path(facts.dir).name != reference.name


@pytest.mark.parametrize(
    "change", [{"vocab_size": 601}, {"eval_fraction": 0.06}, {"text_key": "body"}]
)
def test_another_request_is_another_folder(tmp_path: Path, change: dict[str, Any]) -> None:
    source = tmp_path / "x.jsonl"
    lines = [{"text": f"text {number}", "body": f"body {number}"} for number in range(99)]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    assert run(source, tmp_path).dir != run(source, tmp_path, **change).dir


def test_a_node_prepares_under_the_name_that_another_one_gave(tmp_path: Path) -> None:
    """Which depends on the times of its files, and those differ from node to node."""
    (tmp_path / "text.txt").write_text("words of a text\n" * 200)
    ours = run(tmp_path / "text.txt", tmp_path / "ours", eval_fraction=0.0)
    os.utime(tmp_path / "text.txt", (1, 1))
    recipe = recipe_of(tmp_path / "text.txt", tmp_path / "theirs", eval_fraction=0.0)
    named = tmp_path / "theirs" / Path(ours.dir).name
    theirs = prepare(recipe, model_dir=None, progress=lambda *_: None, folder=named)
    assert (theirs.dir, theirs.fingerprint) == (str(named), ours.fingerprint)
    found = prepare(recipe, model_dir=None, progress=lambda *_: None)
    assert found.dir == str(named), "by its content"


def listed(name: str, format: str) -> SourceFile:
    return SourceFile(f"/text/{name}", name, format, size_bytes=10, version=20)


def test_what_was_prepared_by_an_earlier_version_is_found_again() -> None:
    """The digests are those of commit ab19be9."""
    files = [listed("a.jsonl", "jsonl"), listed("b.TXT", "text"), listed("c", "text")]
    assert digest(request_of(Data(), files, None)) == "0a0f960678d8db99"
    assert digest(request_of(Data(), files[1:], {"tokenizer.json": b"x"})) == "0d8bc4f918496e1c"


def test_text_gives_the_bytes_that_it_gave_earlier_versions(tmp_path: Path) -> None:
    """The fingerprint is that of commit 36be9b1: of each token, and of the tokenizer."""
    words = [
        "alpha",
        "Beta",
        "déjà",
        "\n\n",
        "3.14",
        "<|endoftext|>",
        "日本",
        "\U0001f600",
        "    return",
    ]
    draw = random.Random(1)
    texts = [" ".join(draw.choices(words, k=number)) for number in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.md").write_text("".join(texts))
    source = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.md")]
    data = {"source": source, "dir": str(tmp_path / "out"), "vocab_size": 400, "workers": 1}
    recipe = Recipe.model_validate({"data": data})
    facts = prepare(recipe, model_dir=None, progress=lambda *_: None)
    assert facts.fingerprint == "a1b455587331ec13"


@pytest.mark.parametrize(("name", "format"), [("a.json", "json"), ("a.JSONL", "jsonl")])
def test_what_an_earlier_version_took_for_one_text_is_prepared_anew(name: str, format: str) -> None:
    requests = [request_of(Data(), [listed(name, kind)], None) for kind in ("text", format)]
    assert requests[0]["files"] != requests[1]["files"]


@pytest.mark.heavy
def test_changed_text_is_prepared_anew(tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some words\n" * 20000)
    first = run(source, tmp_path)
    source.write_text("other words\n" * 20000)
    assert run(source, tmp_path).fingerprint != first.fingerprint


def test_equal_documents_are_on_one_side(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"text": f"text {number % 40}"}) + "\n" for number in range(200))
    )
    facts = run(tmp_path / "x.jsonl", tmp_path, eval_fraction=0.3)
    assert facts.eval_documents % 5 == 0
    assert facts.eval_documents + facts.train_documents == 200


@pytest.mark.heavy
def test_a_single_book_has_a_held_out_part_and_nothing_is_lost(tmp_path: Path) -> None:
    text = "".join(f"line {number} of the book\n" for number in range(45000))  # 1.1 MB
    (tmp_path / "book.txt").write_text(text)
    facts = run(tmp_path / "book.txt", tmp_path)
    folder = Path(facts.dir)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    lines: list[str] = []
    for split in ("train", "eval"):
        shards = TokenShards(folder, split)
        tokens = shards.read(0, shards.num_tokens)
        assert len(shards.document_starts) <= 4
        lines += tokenizer.decode(tokens.tolist()).splitlines()
    assert facts.eval_tokens > 0
    assert sorted(lines) == sorted(text.splitlines())


@pytest.mark.parametrize("eval_fraction", [0.0001, 0.9999])
def test_a_small_corpus_has_a_document_on_either_side(tmp_path: Path, eval_fraction: float) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "three"}\n')
    facts = run(tmp_path / "x.jsonl", tmp_path, eval_fraction=eval_fraction)
    assert sorted((facts.train_documents, facts.eval_documents)) == [1, 2]
    assert (facts.eval_documents == 1) == (eval_fraction < 0.5)
    verify(Path(facts.dir))


def test_without_a_held_out_split_all_is_training(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    facts = run(tmp_path / "a.txt", tmp_path, eval_fraction=0.0)
    assert (facts.train_documents, facts.eval_documents, facts.eval_tokens) == (1, 0, 0)
    assert TokenShards(Path(facts.dir), "eval").num_tokens == 0


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one document")
    with pytest.raises(RequestError, match=r"one document of at most 64 KiB.*eval_fraction=0\."):
        run(tmp_path / "a.txt", tmp_path)


def test_lines_without_text_are_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(DataError, match="is an empty corpus: its files hold no text"):
        run(tmp_path / "x.jsonl", tmp_path)


@pytest.mark.heavy
def test_the_models_own_tokenizer_is_used_and_kept(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reference / name, model_dir)
    facts = run(corpus, tmp_path / "out", model_dir=model_dir)
    kept = Path(facts.dir)
    assert (kept / "tokenizer.json").read_bytes() == (reference / "tokenizer.json").read_bytes()
    assert (kept / "train-00000.bin").read_bytes() == (reference / "train-00000.bin").read_bytes()


@pytest.mark.heavy
def test_text_that_changes_meanwhile_is_refused(corpus: Path, tmp_path: Path) -> None:
    source = shutil.copyfile(corpus, tmp_path / "lines.jsonl")

    def append(activity: str, *_: int) -> None:
        if activity == "turning text into tokens":
            with source.open("a") as file:
                file.write('{"text": "more"}\n')

    with pytest.raises(DataError, match=r"changed while it was being prepared.*Prepare again"):
        prepare(recipe_of(source, tmp_path), model_dir=None, progress=append)


def test_a_damaged_data_set_is_refused_not_used(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    shutil.copytree(reference, tmp_path / reference.name)
    (tmp_path / reference.name / "train-00002.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"train-00002\.bin is damaged.*Delete the folder"):
        run(corpus, tmp_path)


def test_a_folder_that_cannot_be_made_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written: Not a directory.*data\.dir"):
        run(corpus, tmp_path / "file")


@pytest.mark.heavy
def test_a_full_disk_is_one_message_and_the_next_try_goes_on(
    corpus: Path, reference: Path, tmp_path: Path
) -> None:
    """A limit on the size of files stands for the full disk: writes fail half-way likewise."""
    recipe = recipe_of(corpus, tmp_path / "out", workers=2)
    (tmp_path / "recipe.json").write_text(recipe.model_dump_json())
    command = f"ulimit -f 40; exec {sys.executable} -m shardyard.data {tmp_path}/recipe.json"
    done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, check=False)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit_code"]) == (1, 1)
    assert "train-0000" in answer["error"]
    assert "cannot be written: File too large" in answer["error"]
    assert "finished pieces are kept" in answer["error"]
    assert b"Traceback" not in done.stderr
    assert contents(Path(run(corpus, tmp_path / "out").dir)) == contents(reference)
