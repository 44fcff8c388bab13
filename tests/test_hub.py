"""The stand-in for the hub is what huggingface_hub takes for one, and counts what it sends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tests.hub import STRANGER, TOKEN, Hub, running_hub, saved_llama

NAME = "acme/llama"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.take_over(monkeypatch, tmp_path / "home")
        yield hub


def test_a_snapshot_is_the_folder_and_each_file_is_sent_once(hub: Hub, llama: Path) -> None:
    commit = hub.add(NAME, llama, tag="v1")
    for revision in (None, "main", "v1", commit):
        folder = Path(snapshot_download(NAME, revision=revision))
        assert folder.name == commit
        for path in llama.iterdir():
            assert (folder / path.name).read_bytes() == path.read_bytes()
    assert hub.downloads == {(NAME, path.name): 1 for path in llama.iterdir()}


def test_a_branch_moves_and_commits_stay(hub: Hub, llama: Path, tmp_path: Path) -> None:
    first = hub.add(NAME, llama, tag="v1")
    second = hub.add(NAME, saved_llama(tmp_path / "other", seed=1))
    assert HfApi().model_info(NAME).sha == second != first
    assert HfApi().model_info(NAME, revision="v1").sha == first
    info = HfApi().model_info(NAME, revision=first, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or ()}
    assert sizes["model.safetensors"] == (llama / "model.safetensors").stat().st_size


def test_a_connection_that_breaks_goes_on_where_it_broke(
    hub: Hub, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # of 10 MB
    hub.add(NAME, llama)
    hub.cut("model.safetensors", after=100_000)
    path = Path(hf_hub_download(NAME, "model.safetensors"))
    assert path.read_bytes() == (llama / "model.safetensors").read_bytes()
    assert hub.sent[NAME, "model.safetensors"] == path.stat().st_size
    assert hub.downloads[NAME, "model.safetensors"] == 1


def test_what_is_refused_has_the_hubs_own_errors(hub: Hub, llama: Path) -> None:
    hub.add(NAME, llama)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info("acme/nothing")
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info(NAME, revision="v9")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(NAME, "nothing.json")
    hub.repos[NAME].is_gated = True
    for token in (None, STRANGER):
        with pytest.raises(GatedRepoError):
            hf_hub_download(NAME, "config.json", token=token)
    assert hf_hub_download(NAME, "config.json", token=TOKEN)
    hub.repos[NAME].is_private = True
    with pytest.raises(RepositoryNotFoundError):
        HfApi().model_info(NAME, token=STRANGER)
