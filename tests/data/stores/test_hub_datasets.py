"""Datasets of the hub: found by name, revision, path and split; pinned to a commit; refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import list_files, read_sections, split_into_pieces
from shardyard.data.splits import find_corpus
from shardyard.data.stores import hub as hub_store
from shardyard.data.stores import range_reader
from shardyard.data.text_datasets import prepare_text
from shardyard.errors import AccessError, CapacityError, RequestError
from tests.hub import STRANGER, TOKEN, Hub, running_hub

NAME = "datasets/acme/tales"
FILES = {
    "README.md": "about",
    ".gitattributes": "",
    "LICENSE": "yours",
    "dataset_infos.json": "{}",
    "data/train-00000-of-00001.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    "data/test-00000-of-00001.jsonl": '{"text": "three"}\n',
    "extra/training_notes.txt": "four",
}


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as server:
        server.add(NAME, written(tmp_path / "files", FILES), tag="v1")
        server.take_over(monkeypatch, tmp_path / "home")
        hub_store._listed.cache_clear()
        yield server


def texts_of(source: str) -> list[str]:
    pieces = split_into_pieces(list_files(source), 2**20)
    return [section.text for piece in pieces for section in read_sections(piece, TextOf())]


@pytest.mark.parametrize(
    ("behind", "texts"),
    [
        ("", ["three", "one", "two", "four"]),
        ("@v1", ["three", "one", "two", "four"]),
        ("/data", ["three", "one", "two"]),
        ("/train", ["one", "two"]),
        ("@main/test", ["three"]),
        ("/data/train-00000-of-00001.jsonl", ["one", "two"]),
        ("/**/*.txt", ["four"]),
        ("/README.md", ["about"]),
    ],
)
def test_a_dataset_is_read_by_name_revision_path_and_split(
    hub: Hub, behind: str, texts: list[str]
) -> None:
    assert texts_of(f"hf://acme/tales{behind}") == texts
    assert texts_of(f"hf://datasets/acme/tales{behind}") == texts
    assert hub.requests["GET", f"/api/{NAME}"] <= 1, "listed once a process"


def test_named_splits_of_a_dataset_are_kept_apart_unless_the_address_names_one(
    hub: Hub, tmp_path: Path
) -> None:
    hub.add(NAME, written(tmp_path / "more", {"data/valid-0.jsonl": '{"text": "five"}\n'}))

    def divided(source: str) -> tuple[list[str], str | None]:
        corpus = find_corpus(Recipe.model_validate({"data": {"source": source}}))
        names = [f"{file.path.rpartition('/')[2]} {file.split}" for file in corpus.files]
        left_out = [file.name for file in corpus.excluded]
        return names, left_out[0] if left_out else None

    assert divided("hf://acme/tales@v1/data") == (
        ["train-00000-of-00001.jsonl None"], "test-00000-of-00001.jsonl"
    )  # fmt: skip
    assert divided("hf://acme/tales@v1/test")[0] == ["test-00000-of-00001.jsonl None"]
    assert divided("hf://acme/tales@v1/data/test-*")[0] == ["test-00000-of-00001.jsonl None"]
    assert divided("hf://acme/tales/validation")[0] == ["valid-0.jsonl None"]


@pytest.mark.heavy
def test_the_commit_is_pinned_and_another_one_is_prepared_anew(hub: Hub, tmp_path: Path) -> None:
    data = {"source": "hf://acme/tales/data", "dir": str(tmp_path / "d"), "vocab_size": 300}
    recipe = Recipe.model_validate({"data": {**data, "workers": 1, "eval_fraction": 0}})

    def prepared() -> str:
        hub_store._listed.cache_clear()
        return prepare(recipe, model_dir=None, progress=lambda *_: None).dir

    first = prepared()
    commit = hub.repos[NAME].refs["main"]
    (file, *_) = list_files("hf://acme/tales/train")
    assert file.path == f"hf://acme/tales@{commit}/data/train-00000-of-00001.jsonl"
    more = {**FILES, "data/train-00000-of-00001.jsonl": json.dumps({"text": "new"})}
    hub.add(NAME, written(tmp_path / "more", more))
    assert texts_of("hf://acme/tales/train") == ["one", "two"], "as it was when it was listed"
    second = prepared()
    assert second != first
    assert texts_of(f"hf://acme/tales@{commit}/train") == ["one", "two"]
    assert texts_of("hf://acme/tales/train") == ["new"]


@pytest.mark.heavy
def test_a_mixture_takes_datasets_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    mixture = [
        {"name": split, "source": f"hf://acme/tales/{split}", "weight": 1}
        for split in ("train", "test")
    ]
    data = {"mixture": mixture, "dir": str(tmp_path / "d"), "vocab_size": 300, "workers": 1}
    recipe = Recipe.model_validate({"data": {**data, "eval_fraction": 0}})
    facts = prepare_text(recipe, model_dir=None, progress=lambda *_: None)
    assert [part.data.train_documents for part in facts.parts] == [2, 1]
    assert hub.requests["GET", f"/api/{NAME}"] == 1


def test_what_is_not_there_is_named(hub: Hub) -> None:
    assert "acme/nothing" not in hub.repos
    with pytest.raises(RequestError, match=r"has no file, folder or split of that name; its files"):
        texts_of("hf://acme/tales/dev")
    with pytest.raises(RequestError, match=r"no such branch, tag.*hf://owner/name@revision"):
        texts_of("hf://acme/tales@v9")
    with pytest.raises(RequestError, match=r"has no such repository.*HF_TOKEN"):
        texts_of("hf://acme/nothing")
    with pytest.raises(RequestError, match=r"names no dataset of the Hugging Face hub.*@revision"):
        texts_of("hf://spaces/acme/tales")


def test_a_dataset_made_by_a_script_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.add("datasets/acme/old", written(tmp_path / "o", {"old.py": "", "x.jsonl": "{}"}))
    with pytest.raises(RequestError, match=r"by a script, old\.py.*acme/old@refs/convert/parquet"):
        texts_of("hf://acme/old")
    assert [file.name for file in list_files("hf://acme/old/x.jsonl")] == ["x.jsonl"]


def test_a_private_or_gated_dataset_asks_for_a_token(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos[NAME].is_private = True
    with pytest.raises(RequestError, match=r"it is private.*HF_TOKEN"):
        texts_of("hf://acme/tales/train")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert texts_of("hf://acme/tales/train") == ["one", "two"]
    hub.repos[NAME].is_private, hub.repos[NAME].is_gated = False, True
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    with pytest.raises(AccessError, match="accepted its terms"):
        texts_of("hf://acme/tales/train")


def test_a_hub_that_is_lost_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    files = list_files("hf://acme/tales/train")
    monkeypatch.setattr(range_reader, "_TRIES", 1)
    hub.is_down = True
    (piece,) = split_into_pieces(files, 2**20)
    with pytest.raises(CapacityError, match=r"hf://acme/tales@\w+/data/train.*then prepare again"):
        list(read_sections(piece, TextOf()))
    hub_store._listed.cache_clear()
    with pytest.raises(CapacityError, match="the Hugging Face hub cannot be reached"):
        list_files("hf://acme/tales/train")
