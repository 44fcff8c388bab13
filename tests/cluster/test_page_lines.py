"""The lines of the pages from an empty account to a model, in their order: each ends with 0.

AWS is moto's, with stand-ins for eksctl, kubectl and helm that keep state. A line that needs a run
is left out: no nodes are behind the cluster. A block of text behind one of lines shows what they
print, with ``...`` for what differs from run to run.
"""

import os
import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.cluster.clients import new_world, world_named
from shardyard.cluster.create import make, scale
from shardyard.cluster.delete import remove
from tests.cluster import batch_stand_in, stand_in
from tests.cluster.clients import client_of, playing_aws
from tests.cluster.test_batch_life import open_default_group
from tests.docs.shown import not_printed, steps_of
from tests.test_docs import ROOT, files_of

pytestmark = pytest.mark.heavy

FAST = {"poll_s": 0.0, "limit_s": 0.05}
OFFERS = {
    "llama2-on-eks": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32"},
    "imagenet-on-spot-nodes": {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "4"},
}
"""What the page says that each node offers."""


@pytest.fixture(autouse=True)
def aws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("KUBECONFIG", "")
    with playing_aws():
        open_default_group()
        yield


def _stand_in_for(monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """Clusters of the command line are made in moto's account."""
    desk: Any = batch_stand_in if page == "bert-on-aws-batch" else stand_in
    account = desk.Account(**({} if page == "bert-on-aws-batch" else {"offers": OFFERS[page]}))

    def new(*words: Any) -> Any:
        return desk.in_account(new_world(*words), account)

    def named(*words: Any) -> Any:
        return desk.in_account(world_named(*words), account)

    at = "shardyard.cli.cluster"
    monkeypatch.setattr(f"{at}.new_world", new)
    monkeypatch.setattr(f"{at}.world_named", named)
    acts: dict[str, Any] = {"make": make, "scale": scale, "remove": remove}
    for name, act in acts.items():
        monkeypatch.setattr(f"{at}.{name}", partial(act, **FAST))


def _export(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, _, value = word.partition("=")
    value = value.replace("$PWD", os.getcwd())  # noqa: PTH109
    assert Path(value).is_file(), f"{value} is not there yet"
    monkeypatch.setenv(name, value)


@pytest.mark.parametrize("page", ["llama2-on-eks", "imagenet-on-spot-nodes", "bert-on-aws-batch"])
def test_the_lines_of_a_page_work_one_behind_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stand_in_for(monkeypatch, page)
    before = client_of("cloudformation").describe_stacks()["Stacks"]
    for name, text in files_of(ROOT / f"docs/tutorials/{page}.md").items():
        (tmp_path / name).write_text(text)
    ran = []
    for step in steps_of(ROOT / f"docs/tutorials/{page}.md"):
        printed = ""
        for line in step.commands if not step.is_console else ():
            words = shlex.split(line, comments=True)
            if words[0] == "export":
                _export(words[1], monkeypatch)
            if words[0] != "shardyard" or "RUN" in words or (words[1] == "plan" and not step.shown):
                continue
            asks = words[1:3] in (
                ["cluster", "create"], ["cluster", "scale"], ["cluster", "delete"]
            )  # fmt: skip
            code = main([*words[1:], *(["--yes"] if asks else [])])
            said = capsys.readouterr()
            assert code == 0, f"{line}\n{said.out}{said.err}"
            printed += said.out + said.err
            ran.append(" ".join(words[1:3]))
        assert not printed or not_printed(step.shown, printed) == [], printed
    ran = [words for words in ran if not words.startswith("plan ")]
    assert ran[0] == "cluster create" and "cluster delete" in ran
    assert client_of("cloudformation").describe_stacks()["Stacks"] == before == []
