"""Pushes to a hub: whole or not at all, repeated without sending anything twice, never over others.

huggingface_hub's own client talks to the server of ``tests/hub.py``.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.errors import AccessError, LostError, RequestError
from shardyard.io.digests import COMPLETE, FolderDigests, write_digests
from shardyard.transfer.hub import HubRepository, check_repository, parse_repository, push
from tests.hub import READER, STRANGER, TOKEN, Hub, running_hub

MODEL = HubRepository(name="acme/tuned", branch="main")
CARD = "---\ntags:\n- shardyard\n---\n\n# tuned\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as running:
        running.take_over(monkeypatch, tmp_path / "home", token=TOKEN)
        yield running


def export(folder: Path, step: int = 4, files: int = 2) -> FolderDigests:
    folder.mkdir()
    for number in range(files):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([step, number]) * 50_000)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return write_digests(folder, {"step": step})


def send(folder: Path, complete: FolderDigests, to: HubRepository = MODEL, **card: str) -> bool:
    return push(
        to, check_repository(to), folder, complete, card=card.get("card", CARD), is_public=False,
        on_progress=lambda _name, _bytes: None,
    )  # fmt: skip


def held(hub: Hub, to: HubRepository = MODEL) -> dict[str, bytes]:
    repo = hub.repos[to.name]
    return repo.commits[repo.refs[to.branch]]


def test_a_new_repository_is_private_and_holds_the_folder_and_its_card(
    hub: Hub, tmp_path: Path
) -> None:
    complete = export(tmp_path / "hf")
    assert send(tmp_path / "hf", complete)
    assert hub.repos["acme/tuned"].is_private
    files = {name: content for name, content in held(hub).items() if name != ".gitattributes"}
    assert files.pop("README.md") == CARD.encode()
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert len(hub.repos["acme/tuned"].commits) == 2, "the repository's first commit, and ours"


def test_the_same_export_again_sends_nothing_and_commits_nothing(hub: Hub, tmp_path: Path) -> None:
    complete = export(tmp_path / "hf")
    assert send(tmp_path / "hf", complete)
    uploads, commits = dict(hub.uploads), len(hub.repos["acme/tuned"].commits)
    assert not send(tmp_path / "hf", complete)
    assert (dict(hub.uploads), len(hub.repos["acme/tuned"].commits)) == (uploads, commits)


def test_a_later_export_replaces_the_files_of_the_one_before(hub: Hub, tmp_path: Path) -> None:
    send(tmp_path / "a", export(tmp_path / "a", step=4, files=3))
    assert send(tmp_path / "b", export(tmp_path / "b", step=8, files=1))
    files = held(hub)
    assert sorted(name for name in files if name.endswith("safetensors")) == ["model-0.safetensors"]
    assert files["model-0.safetensors"][:1] == bytes([8])


def test_a_push_that_broke_sends_only_what_is_missing(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the client tries again by itself first
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _s: None)
    complete = export(tmp_path / "hf", files=3)
    hub.uploads_before_down = 1
    with pytest.raises(LostError, match="Repeat the command; files that arrived are not sent"):
        send(tmp_path / "hf", complete)
    assert COMPLETE not in held(hub), "a reader sees nothing of it"
    hub.uploads_before_down = None
    assert send(tmp_path / "hf", complete)
    assert set(hub.uploads.values()) == {1} and len(hub.uploads) == 3


def test_a_branch_is_made_and_main_stays_as_it_is(hub: Hub, tmp_path: Path) -> None:
    other = parse_repository("hf://acme/tuned@step-4")
    assert send(tmp_path / "hf", export(tmp_path / "hf"), other)
    assert COMPLETE in held(hub, other) and COMPLETE not in held(hub)


@pytest.mark.usefixtures("hub")
def test_of_a_new_branch_the_repository_is_known(tmp_path: Path) -> None:
    send(tmp_path / "hf", export(tmp_path / "hf"))
    state = check_repository(parse_repository("hf://acme/tuned@step-4"))
    assert state is not None and state.is_private and state.commit is None


def test_a_new_branch_has_no_files_of_main(hub: Hub, tmp_path: Path) -> None:
    send(tmp_path / "a", export(tmp_path / "a", files=3))
    other = parse_repository("hf://acme/tuned@small")
    assert send(tmp_path / "b", export(tmp_path / "b", step=8, files=1), other)
    assert "model-2.safetensors" in held(hub) and "model-2.safetensors" not in held(hub, other)


def test_files_of_somebody_else_are_not_overwritten(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "pytorch_model.bin").write_bytes(b"1")
    hub.add("acme/tuned", tmp_path / "theirs")
    complete = export(tmp_path / "hf")
    with pytest.raises(RequestError, match=r"holds 'pytorch_model.bin', which no export .* wrote"):
        send(tmp_path / "hf", complete)
    assert list(held(hub)) == ["pytorch_model.bin"]


def test_a_commit_of_somebody_in_between_is_not_overwritten(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import HfApi

    send(tmp_path / "a", export(tmp_path / "a"))
    theirs = dict(held(hub)) | {"notes.txt": b"1"}
    sent = HfApi.preupload_lfs_files

    def interrupted(api: HfApi, *args: object, **more: object) -> None:
        hub.repos["acme/tuned"].commits["f" * 40] = theirs
        hub.repos["acme/tuned"].refs["main"] = "f" * 40
        sent(api, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(HfApi, "preupload_lfs_files", interrupted)
    with pytest.raises(RequestError, match="somebody pushed there since this command began"):
        send(tmp_path / "b", export(tmp_path / "b", step=8))
    assert held(hub) == theirs


@pytest.mark.parametrize(
    ("token", "name", "words"),
    [
        ("", "acme/tuned", "this process has no token .* `hf auth login`"),
        (READER, "acme/tuned", "the token 'of a test' of acme may only read"),
        ("hf_wrong", "acme/tuned", "denies it to the token of this process .401"),
        (STRANGER, "acme/tuned", "Use a token that may write for acme: `hf auth login`"),
        (TOKEN, "other/tuned", "Use a token that may write for other: `hf auth login`"),
    ],
)
def test_a_token_that_may_not_write_is_named_with_the_fix(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, name: str, words: str
) -> None:
    hub.take_over(monkeypatch, tmp_path / "home", token=token)
    complete = export(tmp_path / "hf")
    with pytest.raises(AccessError, match=words):
        send(tmp_path / "hf", complete, HubRepository(name=name, branch="main"))
    assert hub.repos == {}


def test_a_hub_that_cannot_be_reached_says_so(hub: Hub) -> None:
    hub.is_down = True
    with pytest.raises(LostError, match=re.escape("cannot read hf://acme/tuned: the connection")):
        check_repository(MODEL)


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://acme", "hf://datasets/acme/x", "hf://acme/x/model", "hf://acme/x@", "hf:x"],
)
def test_what_is_no_model_repository_is_rejected(text: str) -> None:
    with pytest.raises(RequestError, match="Give hf://owner/name"):
        parse_repository(text)
