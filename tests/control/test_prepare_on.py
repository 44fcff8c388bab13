"""`shardyard prepare --on`: what is sent, how it is found again, and what `launch` says of it."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shardyard.cli import main
from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.control.prepare_remote import data_line, find_prepared
from shardyard.launchers.ledger import Ledger
from shardyard.node.main import with_homes
from shardyard.node.side_job import SideWork
from shardyard.node.side_jobs import prepare
from shardyard.rundir.layout import RunDir
from tests.cli.fake_launcher import CAPABILITIES, AnsweringLauncher
from tests.hub import running_hub, saved_llama

Captured = pytest.CaptureFixture[str]
FACTS = DatasetMetadata(
    dir="/vol/runs/prepared/x-1", fingerprint="f", vocab_size=300, train_tokens=12345,
    eval_tokens=10, train_documents=3, eval_documents=1, unigram_entropy=2.0,
)  # fmt: skip
RESULT = {
    "data": asdict(FACTS),
    "model_dir": "/vol/runs/models/acme--llama@0123",
    "model_commit": "0123",
    "model_digest": "45",
}
FAR = replace(CAPABILITIES, shares_folder=False)


class Site:
    """A folder in which a recipe is prepared and launched by a launcher that shares no folder."""

    def __init__(self, folder: Path) -> None:
        kind = type("Far", (AnsweringLauncher,), {"capabilities": FAR})
        self.fake: AnsweringLauncher = kind(result=RESULT)
        self.runs = folder / "runs"
        self.words = [
            "model.preset=llama-tiny", "data.source=/vol/text", "run.name=first",
            f"run.dir={self.runs}", "launch.run_dir=/vol/runs", "run.steps=3",
            "launch.volumes=[{path: /vol, claim: c}]", "cluster.instance=g5.xlarge",
            "cluster.nodes=2",
        ]  # fmt: skip

    def run(self, verb: str, *words: str) -> int:
        return main([verb, *self.words, "--on", "fake", *words], launchers={"fake": self.fake})

    def folders(self) -> list[Path]:
        return sorted(self.runs.glob("*")) if self.runs.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_nodes_get_the_recipe_and_the_folder_is_one_of_its_own(
    site: Site, capsys: Captured
) -> None:
    assert site.run("prepare", "--yes", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    (folder,) = site.folders()
    assert folder.name.startswith("first-prepare-2")
    assert answer["run_id"] == folder.name and answer["data"]["train_tokens"] == 12345
    (request,) = site.fake.submitted
    assert request.side is not None and request.side.kind == "prepare"
    assert (request.run_dir, request.nodes) == (f"/vol/runs/{folder.name}", 1)
    assert request.recipe.run.dir == "/vol/runs"
    assert Ledger(folder / "ledger.jsonl").jobs() == []
    assert site.run("prepare", "--yes") == 0
    out = capsys.readouterr().out
    assert "12,345 tokens of 3 documents" in out
    assert "/vol/runs/models/acme--llama@0123, commit 0123" in out


def test_a_dry_run_prints_the_request_and_makes_nothing(site: Site, capsys: Captured) -> None:
    assert site.run("prepare", "--dry-run") == 0
    assert capsys.readouterr().out == site.fake.render(site.fake.submitted[-1]).text
    assert site.folders() == []


def test_the_same_recipe_goes_on_in_the_same_folder_and_another_has_its_own(site: Site) -> None:
    for _ in range(2):
        assert site.run("prepare", "--yes") == 0
    (folder,) = site.folders()
    assert [len(Ledger(folder / "ledger.jsonl").side_jobs())] == [2]
    assert site.run("prepare", "--yes", "data.vocab_size=500") == 0
    assert site.run("prepare", "--yes", "--verify") == 0
    assert len(site.folders()) == 3


def test_yes_without_a_launcher_is_refused(capsys: Captured) -> None:
    assert main(["prepare", "model.preset=llama-tiny", "--yes"]) == 2
    assert "--yes goes with --on" in capsys.readouterr().err


def launched(site: Site, capsys: Captured, *words: str, code: int = 0) -> str:
    """The line about the data."""
    capsys.readouterr()
    assert site.run("launch", "--dry-run", *words) == code
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("data:")]
    return line


def test_launch_says_that_the_data_is_ready_or_what_to_do_about_it(
    site: Site, capsys: Captured
) -> None:
    before = launched(site, capsys)
    assert "node 0 prepares, and the accelerators of all 2 nodes wait for it, at $" in before
    assert "an hour" in before
    command = before.partition("Without accelerators: ")[2]
    assert command.startswith("shardyard prepare model.preset=llama-tiny")
    assert command.endswith("--on fake") and "'launch.volumes=[{path: /vol, claim: c}]'" in command
    assert site.run("prepare", "--yes") == 0
    (folder,) = site.folders()
    assert launched(site, capsys) == f"data: ready, 12,345 tokens, prepared by {folder.name}"
    assert "ready" in launched(site, capsys, "optim.lr=1e-3", "run.steps=9", "data.workers=2")


@pytest.mark.parametrize(
    "word",
    [
        "data.vocab_size=500",
        "data.source=/vol/other",
        "model.preset=llama3-8b",
        "launch.volumes=[{path: /vol, claim: other}]",
        "launch.run_dir=/vol/others",
        "launch.kubernetes.context=other",
    ],
)
def test_what_was_prepared_elsewhere_or_of_something_else_is_not_ready(
    site: Site, capsys: Captured, word: str
) -> None:
    code = 2 if "llama3-8b" in word else 0  # which does not fit
    assert site.run("prepare", "--yes") == 0
    assert "no finished job has prepared it there" in launched(site, capsys, word, code=code)


def test_what_a_shared_folder_holds_no_more_is_not_ready(site: Site, tmp_path: Path) -> None:
    site.words.append("data.source=python-stdlib")
    data = {**asdict(FACTS), "dir": str(tmp_path)}
    site.fake = AnsweringLauncher(result={**RESULT, "data": data})
    assert site.run("prepare", "--yes") == 0
    (folder,) = site.folders()
    recipe = load_recipe([folder / "recipe.yaml"])
    assert find_prepared(site.runs, site.fake, recipe) is not None
    site.fake.result = RESULT  # in a folder that is not there
    assert site.run("prepare", "--yes") == 0
    assert find_prepared(site.runs, site.fake, recipe) is None


def test_no_price_is_told_where_none_is_known() -> None:
    line = data_line(None, ["r.yaml"], launcher="slurm", nodes=1, usd_per_hour=None)
    assert line == (
        "data: no finished job has prepared it there; what is missing node 0 prepares, and the "
        "accelerators wait for it. Without accelerators: shardyard prepare r.yaml --on slurm"
    )


def work_on(folder: Path, **arguments: Any) -> SideWork:
    (folder / "text").mkdir()
    for number in range(4):
        words = [f"{place} and {number}\n" for place in range(2000)]
        (folder / "text" / f"{number}.txt").write_text("".join(words))
    recipe = load_recipe(
        [],
        [
            "model.preset=llama-tiny", f"data.source={folder}/text", "data.vocab_size=300",
            "data.eval_fraction=0.3", "launch.side.cpus=1",
        ],
    )  # fmt: skip
    run = RunDir(folder / "volume" / "runs" / "first-prepare-1")
    return SideWork(run=run, recipe=recipe, arguments={"verify": True, **arguments})


@pytest.mark.heavy
def test_a_node_prepares_beside_the_runs_where_a_later_node_0_looks(tmp_path: Path) -> None:
    work = work_on(tmp_path, is_this_machine=False, shares_folder=False)
    answer = prepare(work)
    folder = Path(answer["data"]["dir"])
    assert folder.parent == tmp_path / "volume" / "runs" / "prepared"
    training = RunDir(work.run.path.parent / "first")
    later = with_homes(work.recipe, training, shares_folder=False)
    assert Path(later.data.dir) == folder.parent
    written = (folder / "manifest.json").stat().st_mtime_ns
    assert prepare(work) == answer
    assert (folder / "manifest.json").stat().st_mtime_ns == written, "nothing is done twice"


@pytest.mark.heavy
def test_the_model_of_the_hub_is_fetched_once_for_all_that_come_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_on(tmp_path, is_this_machine=False, shares_folder=False)
    with running_hub() as hub:
        commit = hub.add("acme/llama", saved_llama(tmp_path / "llama"))
        hub.take_over(monkeypatch, tmp_path / "home")
        model = work.recipe.model.model_copy(update={"preset": None, "hub": "acme/llama"})
        work = replace(work, recipe=work.recipe.model_copy(update={"model": model}))
        answer = prepare(work)
        assert prepare(work) == answer
        assert set(hub.downloads.values()) == {1}
    folder = Path(answer["model_dir"])
    assert folder.parent == tmp_path / "volume" / "runs" / "models"
    assert (folder / "complete.json").is_file() and (folder / "model.safetensors").is_file()
    assert answer["model_commit"] == commit and answer["model_digest"]


def test_a_folder_that_the_recipe_names_or_that_is_shared_stays() -> None:
    run = RunDir(Path("/vol/runs/first"))
    given = load_recipe([], ["data.dir=/vol/mine", "model.dir=/vol/models"])
    assert with_homes(given, run, shares_folder=False) is given
    settled = with_homes(Recipe(), run, shares_folder=True)
    assert settled.data == Recipe().data
    assert settled.model.dir == "/vol/runs/models"
