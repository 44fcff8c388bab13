"""Wrong situations of the Hugging Face hub, and of the folder that models are kept in."""

import subprocess
from contextlib import suppress
from pathlib import Path

from tests.hub import STRANGER, Hub, saved_llama
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("Hugging Face hub")
row = SITUATIONS.row

NAME = "acme/llama"
WEIGHTS = "model.safetensors"


class HubDesk(Desk):
    """A node, or a machine that trains itself: it fetches into a folder for models."""

    hub: Hub

    def connect(self, hub: Hub) -> None:
        """Ask this hub, without a token and with an empty cache."""
        self.hub = hub
        self.store = self.folder / "models"
        self.commit = hub.add(NAME, saved_llama(self.folder / "llama"))
        self.log_in(None)

    def log_in(self, token: str | None) -> None:
        self.hub.take_over(self.environ, self.folder / "home", token=token)

    def train(self, *words: str) -> int:
        """Train, with what is to be different."""
        base = [f"model.hub={NAME}", f"model.dir={self.store}", "data.workers=1", "run.steps=1"]
        given = {word.partition("=")[0] for word in words}
        kept = [word for word in base if word.partition("=")[0] not in given]
        return self.shardyard("train", *kept, *words, "--dry-run")

    def fetched(self) -> Path:
        """The folder of the model, fetched before the situation comes about."""
        from shardyard.config.model.hub import HubRequest, fetch

        wanted = HubRequest(kind="model.hub", name=NAME, revision=None, level="weights")
        return fetch(wanted, self.store, log=lambda _: None)

    def mount(self, options: str) -> Path:
        """The folder for models is a file system of its own, in memory; gone after the test."""
        self.store.mkdir(exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.store)]
        subprocess.run(words, check=True, capture_output=True)
        self.is_mounted = True
        return self.store

    is_mounted = False

    def close(self) -> None:
        if self.is_mounted:
            with suppress(OSError):
                subprocess.run(["umount", "--lazy", str(self.store)], check=True)


@row(
    "gated model, and no token",
    4,
    says="accepted its terms, and this process cannot show that: it has no token",
    do="or set HF_TOKEN; for launched nodes, `secrets: {HF_TOKEN: ...}`",
)
def _(desk: HubDesk) -> int:
    desk.hub.repos[NAME].is_gated = True
    return desk.train()


@row(
    "gated model, and a token of somebody who has not accepted its terms",
    4,
    says="its token is of somebody who has not",
    do="Accept them on its page",
)
def _(desk: HubDesk) -> int:
    desk.hub.repos[NAME].is_gated = True
    desk.log_in(STRANGER)
    return desk.train()


@row(
    "token that the hub does not know",
    4,
    says="the hub refuses the token that this process has",
    do="Make another one that may read",
)
def _(desk: HubDesk) -> int:
    desk.log_in("hf_of_nobody")
    return desk.train()


@row(
    "repository that is not there",
    2,
    says="model.hub=acme/lama: the Hugging Face hub has no such repository, or it is private and "
    "somebody without a token may not see it",
    do="Check the name (owner/name)",
)
def _(desk: HubDesk) -> int:
    return desk.train("model.hub=acme/lama")


@row(
    "private repository, and a token of somebody else",
    2,
    says="or it is private and the token of this process may not see it",
    do="log in with `hf auth login` or set HF_TOKEN",
)
def _(desk: HubDesk) -> int:
    desk.hub.repos[NAME].is_private = True
    desk.log_in(STRANGER)
    return desk.train()


@row(
    "name that no repository can have",
    2,
    says="model.hub=acme llama is not a name of a repository",
    do="Write owner/name",
)
def _(desk: HubDesk) -> int:
    return desk.train("model.hub=acme llama")


@row(
    "revision that is not there",
    2,
    says="model.hub=acme/llama at revision v2: the repository has no such branch, tag or commit",
    do="name one with model.revision",
)
def _(desk: HubDesk) -> int:
    return desk.train("model.revision=v2")


@row(
    "revision without a repository",
    2,
    says="model.revision=v2 is of a repository on the hub, and model.hub names none",
    do="leave the revision out",
)
def _(desk: HubDesk) -> int:
    return desk.train("model.hub=null", "model.preset=llama-tiny", "model.revision=v2")


@row(
    "repository without weights that may be opened",
    2,
    says="has no weights to load: no model.safetensors",
    do="or start from random weights with model.weights=random",
)
def _(desk: HubDesk) -> int:
    (desk.folder / "llama" / WEIGHTS).rename(desk.folder / "llama" / "pytorch_model.bin")
    desk.hub.add(NAME, desk.folder / "llama")
    return desk.train()


@row(
    "tokenizer of a repository that has none",
    2,
    says="holds no tokenizer.json",
    do="or set data.tokenizer=train",
)
def _(desk: HubDesk) -> int:
    only = desk.folder / "only"
    only.mkdir()
    (only / "config.json").write_text("{}")
    desk.hub.add("acme/bare", only)
    (desk.folder / "text.txt").write_text("words\n" * 99)
    settings = ("model.preset=llama-tiny", "data.tokenizer=acme/bare", "data.source=text.txt")
    return desk.shardyard("prepare", *settings, f"model.dir={desk.store}")


@row(
    "offline, and nothing fetched before",
    2,
    says="is not on this machine whole, and HF_HUB_OFFLINE forbids to ask the Hugging Face hub",
    do="Unset it, or fetch it elsewhere and give its folder with model.path",
)
def _(desk: HubDesk) -> int:
    desk.environ.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return desk.train()


@row(
    "hub that does not answer, and nothing fetched before",
    3,
    says="is not on this machine whole, and the Hugging Face hub cannot be reached",
    do="Check the network and do the same again",
)
def _(desk: HubDesk) -> int:
    desk.hub.is_down = True
    return desk.train()


@row(
    "connection lost in the middle of a file",
    3,
    says="cannot be reached (ReadError",
    do="Finished files are kept. Check the network and do the same again",
)
def _(desk: HubDesk) -> int:
    desk.hub.cut(WEIGHTS, after=200_000, is_reset=True)
    return desk.train()


@row(
    "file that arrives with other bytes, twice",
    1,
    says="model.safetensors has another digest than the hub gives for it",
    do="It is removed; do the same again",
)
def _(desk: HubDesk) -> int:
    desk.hub.spoiled.add(WEIGHTS)
    return desk.train()


@row(
    "folder for models without room",
    1,
    says="are to be fetched and 512.0 KiB are free",
    do="Make room (`df -h`)",
)
def _(desk: HubDesk) -> int:
    desk.mount("size=512k")
    return desk.train()


@row(
    "folder for models that takes no more files",
    1,
    says="models: ",
    do="or choose another folder with model.dir",
)
def _(desk: HubDesk) -> int:
    desk.mount("size=16m,nr_inodes=4")
    return desk.train()


@row(
    "folder for models that may not be written",
    1,
    says="Read-only file system",
    do="give the run's user the right to write there",
)
def _(desk: HubDesk) -> int:
    desk.mount("ro")
    return desk.train()


@row(
    "folder for models below a file",
    2,
    says="which is a file, not a folder",
    do="Fix the path",
)
def _(desk: HubDesk) -> int:
    desk.store.write_text("")
    return desk.train(f"model.dir={desk.store / 'models'}")


@row(
    "list of what was fetched is damaged, and the hub does not answer",
    3,
    says="complete.json is damaged (JSONDecodeError: Expecting value: line 1 column 1 (char 0)); "
    "its files are held against the hub again",
    do="Check the network",
)
def _(desk: HubDesk) -> int:
    (desk.fetched() / "complete.json").write_text("")
    desk.hub.is_down = True
    return desk.train()


@row(
    "file that was changed after it was fetched",
    2,
    says="model.safetensors was changed after it was fetched",
    do="Remove the file to have it fetched again",
)
def _(desk: HubDesk) -> int:
    with (desk.fetched() / WEIGHTS).open("ab") as file:
        file.write(b"\0")
    return desk.train()
