"""What is fetched from the hub, once, whole and as the hub has it; against a stand-in."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.config.model.hub import HubRequest, Level, commit_of, digest_of, fetch
from shardyard.config.model.source import model_folder
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.control.request import Request
from shardyard.data.tokenizer import find_tokenizer
from shardyard.errors import CapacityError, DataError, RecipeError, RequestError
from shardyard.hardware.machine import Machine
from shardyard.io.digests import COMPLETE
from tests.hub import Hub, running_hub, saved_llama

NAME = "acme/llama"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved_llama(tmp_path_factory.mktemp("saved") / "llama")
    (folder / "modeling_llama.py").write_text("raise SystemExit('code of a repository ran')\n")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running_hub() as hub:
        hub.take_over(monkeypatch, tmp_path / "home")
        yield hub


def wanted(revision: str | None = None, level: Level = "weights") -> HubRequest:
    return HubRequest(kind="model.hub", name=NAME, revision=revision, level=level)


def get(store: Path | None, revision: str | None = None, level: Level = "weights") -> Path:
    return fetch(wanted(revision, level), store, log=said.append)


said: list[str] = []


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    said.clear()


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_store_holds_a_folder_for_each_commit_with_a_list_and_no_code(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    commit = hub.add(NAME, llama)
    folder = get(tmp_path / "store")
    assert folder == tmp_path / "store" / f"acme--llama@{commit[:12]}"
    names = {path.name for path in folder.iterdir()}
    kept = {path.name for path in llama.iterdir()} - {"modeling_llama.py", "pytorch_model.bin"}
    assert names == kept | {COMPLETE, ".lock"}
    listed = json.loads((folder / COMPLETE).read_text())["files"]
    assert set(listed) == kept
    assert all((folder / name).stat().st_size == listed[name]["bytes"] for name in kept)
    assert (folder / WEIGHTS).read_bytes() == (llama / WEIGHTS).read_bytes()
    assert commit_of(folder) == commit


def test_what_is_fetched_is_not_fetched_again(hub: Hub, llama: Path, tmp_path: Path) -> None:
    commit = hub.add(NAME, llama, tag="v1")
    folder = get(tmp_path / "store")
    for revision in (None, "v1", commit):
        assert get(tmp_path / "store", revision) == folder
    assert set(hub.downloads.values()) == {1}
    before = hub.requests.total()
    get(tmp_path / "store", commit)
    assert hub.requests.total() == before  # a commit cannot have moved


def test_what_the_cache_of_this_machine_has_is_copied(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    cached = get(None)
    folder = get(tmp_path / "store")
    assert set(hub.downloads.values()) == {1}
    assert commit_of(cached) == commit_of(folder) == cached.name
    assert (folder / WEIGHTS).stat().st_nlink == 1 and not (folder / WEIGHTS).is_symlink()


def test_a_shape_needs_no_weights_and_weights_are_added_later(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    folder = get(tmp_path / "store", level="config")
    assert not (folder / WEIGHTS).exists()
    assert get(tmp_path / "store") == folder and (folder / WEIGHTS).is_file()
    assert set(hub.downloads.values()) == {1}


def test_two_stores_have_one_digest_and_other_weights_another(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    digests = {digest_of(get(tmp_path / name)) for name in ("a", "b")}
    hub.add(NAME, saved_llama(tmp_path / "other", seed=1))
    digests.add(digest_of(get(tmp_path / "a")))
    assert len(digests) == 2 and None not in digests


def test_a_moved_branch_is_another_folder_and_a_pinned_commit_is_not_moved(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    first = hub.add(NAME, llama, tag="v1")
    folder = get(tmp_path / "store")
    second = hub.add(NAME, saved_llama(tmp_path / "other", seed=1))
    assert commit_of(get(tmp_path / "store")) == second
    assert get(tmp_path / "store", "v1") == get(tmp_path / "store", first) == folder
    pinned = Model(hub=NAME, revision="v1", dir=str(tmp_path / "store"))
    assert model_folder(pinned) == folder
    again = model_folder(Model(hub=NAME, dir=str(tmp_path / "store")), commit=first)
    assert again == folder


def test_without_the_hub_what_the_same_request_found_before_is_used(
    hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(NAME, llama, tag="v1")
    folder, cached = get(tmp_path / "store", "v1"), get(None)
    other = tmp_path / "other"
    hub.is_down = True
    assert get(tmp_path / "store", "v1") == get(tmp_path / "store", commit) == folder
    assert get(None) == cached
    assert digest_of(get(other)) == digest_of(folder)  # from the cache of this machine
    offline(monkeypatch)
    assert get(tmp_path / "store", "v1") == folder
    assert get(None) == get(None, commit) == cached
    with pytest.raises(RequestError, match=r"at revision v2 is not on this machine whole"):
        get(tmp_path / "store", "v2")


def test_a_file_that_is_gone_is_fetched_again_and_a_changed_one_is_refused(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    folder = get(tmp_path / "store")
    (folder / "config.json").unlink()
    assert get(tmp_path / "store") == folder and (folder / "config.json").is_file()
    assert hub.downloads[NAME, "config.json"] == 2 and hub.downloads[NAME, WEIGHTS] == 1
    os.utime(folder / WEIGHTS, (1, 1))  # read again, and found the same
    get(tmp_path / "store")
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(RequestError, match=rf"{WEIGHTS} was changed after it was fetched"):
        get(tmp_path / "store")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"format": 1, "made_of": {"hub": "x", "commit": ".."}, "files": {}}'],
)
def test_a_damaged_list_is_made_again_from_files_that_are_held_against_the_hub(
    text: str, hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    folder = get(tmp_path / "store")
    before = json.loads((folder / COMPLETE).read_text())["files"]
    (folder / COMPLETE).write_text(text)
    said.clear()
    assert get(tmp_path / "store") == folder
    assert any(f"note: {folder}: {COMPLETE} is" in words for words in said)
    assert json.loads((folder / COMPLETE).read_text())["files"] == before
    assert set(hub.downloads.values()) == {1}


def test_a_file_of_the_cache_that_is_damaged_is_fetched_from_the_hub(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    blob = (get(None) / WEIGHTS).resolve()
    blob.write_bytes(bytes(blob.stat().st_size))
    assert (get(tmp_path / "store") / WEIGHTS).read_bytes() == (llama / WEIGHTS).read_bytes()
    assert hub.downloads[NAME, WEIGHTS] == 2


def test_a_damaged_file_of_the_cache_is_named_where_the_hub_cannot_be_asked(
    hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, llama)
    file = get(None) / "config.json"
    file.resolve().write_text(file.read_text() + " ")
    offline(monkeypatch)
    with pytest.raises(DataError) as caught:
        get(tmp_path / "store")
    words = str(caught.value)
    assert words.startswith(f"{file} is damaged") and f"`rm '{file.resolve()}'`" in words


@pytest.mark.heavy
def test_a_proxy_that_takes_the_connection_and_says_nothing_is_waited_for_once(
    hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is used if all is there; else the proxy is named, without its password."""
    from huggingface_hub import close_session, constants

    hub.add(NAME, llama)
    cached = get(None)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel takes connections
        proxy = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{proxy}")
        monkeypatch.setenv("NO_PROXY", "")
        monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
        monkeypatch.setattr("shardyard.config.model.hub.ANSWER_S", 0.5)
        close_session()  # it keeps the proxies of its first request
        try:
            began_s = time.monotonic()
            assert get(None) == cached
            with pytest.raises(CapacityError, match=f"through the proxy {proxy} ") as caught:
                get(tmp_path / "store", "v9")
            assert time.monotonic() - began_s < 10.0
        finally:
            close_session()
    assert "secret" not in str(caught.value)


def test_a_connection_that_is_lost_goes_on_where_it_was(
    hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)  # of 10 MB
    hub.add(NAME, llama)
    hub.cut(WEIGHTS, after=200_000)
    folder = get(tmp_path / "store")
    assert hub.sent[NAME, WEIGHTS] == (llama / WEIGHTS).stat().st_size
    assert (folder / WEIGHTS).read_bytes() == (llama / WEIGHTS).read_bytes()


def test_finished_files_are_kept_when_the_connection_is_lost_for_good(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    hub.cut(WEIGHTS, after=200_000, is_reset=True)
    with pytest.raises(CapacityError, match=r"cannot be reached .* Finished files are kept"):
        get(tmp_path / "store")
    folder = get(tmp_path / "store")
    assert set(hub.downloads.values()) == {1}
    assert not list(folder.rglob("*incomplete*"))


SCRIPT = """
import sys
from pathlib import Path
from shardyard.config.model.hub import HubRequest, fetch
wanted = HubRequest(kind="model.hub", name="acme/llama", revision=None, level="weights")
fetch(wanted, Path(sys.argv[1]), log=print)
"""


@pytest.mark.heavy
def test_a_process_killed_in_the_middle_leaves_no_half_and_the_next_has_equal_digests(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    hub.add(NAME, llama)
    store = tmp_path / "store"
    hub.pause_s = 0.1
    for kill in range(2):
        before = hub.sent[NAME, WEIGHTS]
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(store)],
            env={**os.environ, **hub.environ(tmp_path / f"home-{kill}")},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline_s = time.monotonic() + 60
        while hub.sent[NAME, WEIGHTS] == before and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert hub.sent[NAME, WEIGHTS] > before
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert list(store.rglob("*incomplete*")) and not list(store.rglob(COMPLETE))
    hub.pause_s = 0.0
    folder = get(store)
    assert not list(store.rglob("*incomplete*"))
    assert digest_of(folder) == digest_of(get(tmp_path / "other"))
    assert (folder / WEIGHTS).read_bytes() == (llama / WEIGHTS).read_bytes()


def test_one_fetches_and_the_others_wait_for_it(hub: Hub, llama: Path, tmp_path: Path) -> None:
    hub.add(NAME, llama)
    hub.pause_s = 0.02
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(get(tmp_path / "store"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3
    assert set(hub.downloads.values()) == {1}
    assert sum("waiting for another process" in words for words in said) >= 1


def test_the_lock_of_a_holder_that_died_holds_nobody_up(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    commit = hub.add(NAME, llama)
    folder = tmp_path / "store" / f"acme--llama@{commit[:12]}"
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert get(tmp_path / "store") == folder


def test_a_resume_takes_the_commit_that_it_began_with_also_offline_after_the_branch_moved(
    hub: Hub, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.add(NAME, llama)
    recipe = Recipe.model_validate({"model": {"hub": NAME}, "run": {"steps": 1}})
    began = resolve(Request.of(recipe))
    assert began.model_commit == first == Path(str(began.model_dir)).name
    hub.add(NAME, saved_llama(tmp_path / "other", seed=1))
    for _ in range(2):
        again = resolve(Request.of(recipe, previous=began), previous=began)
        assert (again.model_commit, again.model_dir) == (first, began.model_dir)
        offline(monkeypatch)
    monkeypatch.undo()
    hub.take_over(monkeypatch, tmp_path / "home")
    moved = recipe.model_copy(update={"model": Model(hub=NAME, revision="main")})
    with pytest.raises(RecipeError, match=r"model\.commit: .* changes what is learnt"):
        resolve(Request.of(moved, previous=began), previous=began)


def resolve(request: Request, *, previous: Resolved | None = None) -> Resolved:
    machine = Machine(
        device="cpu", name="a CPU", count=1, memory_bytes=2**33, cores=2, hostname="laptop"
    )
    return request.resolve(machine, DATA, previous=previous)


DATA = DatasetMetadata(
    dir="none", fingerprint="0", vocab_size=512, train_tokens=9999, eval_tokens=999,
    train_documents=2, eval_documents=1, unigram_entropy=5.0,
)  # fmt: skip


def test_a_tokenizer_of_the_hub_is_kept_in_the_store_at_its_revision(
    hub: Hub, llama: Path, tmp_path: Path
) -> None:
    commit = hub.add(NAME, llama, tag="v1")
    other = saved_llama(tmp_path / "other")
    (other / "tokenizer.json").write_text("another one")
    hub.add(NAME, other)
    store = tmp_path / "store"
    for revision in ("v1", commit, "v1"):
        files = find_tokenizer(f"{NAME}@{revision}", None, store=store)
        assert files is not None
        assert files["tokenizer.json"] == (llama / "tokenizer.json").read_bytes()
    (folder,) = store.iterdir()
    assert commit_of(folder) == commit and not (folder / WEIGHTS).exists()
    assert set(hub.downloads.values()) == {1}
    assert get(store, "v1") == folder and (folder / WEIGHTS).is_file()
    newest = find_tokenizer(NAME, None, store=store)
    assert newest is not None and newest["tokenizer.json"] == b"another one"
