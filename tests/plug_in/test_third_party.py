"""A package of somebody else's, installed: it trains, renders, and is missed where it lacks.

The package is the folder `letters` beside this file.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.config.load import load_recipe
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.control.attempt import Attempt, write_down
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.launchers.base import pop_launched_by
from shardyard.node.handshake import Session
from shardyard.node.preflight import Readiness, _compare_plug_ins, prepare_node, wait_for_nodes
from shardyard.plugins import PlugIn
from shardyard.rundir.attempt_files import read_resolved, write_resolved
from shardyard.rundir.layout import RunDir
from tests.distributed.runs import MACHINE

RECIPE = """
model: {preset: helium-mini}
task: {name: vowels, vowels: {at_least: 2}}
data: {source: 'letters://shelf', seq_len: 32, vocab_size: 300, workers: 1}
optim: {global_batch: 4}
run: {id: r, steps: 2, target: {vowel_score: 0.9}}
cluster: {device: cpu, devices: 2}
launch: {paper_mail: {to: me, labels: {on.top: fragile}}}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which pip has installed the package."""
    folder = tmp_path_factory.mktemp("site")
    source = shutil.copytree(Path(__file__).parent / "letters", folder.with_name("source"))
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", *words, "--target", folder, source],
        check=True, timeout=120,
    )  # fmt: skip
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command line stands: a recipe and some text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "text").mkdir()
    for number in range(40):
        text = f"A sentence about the number {number}. " * 20
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    return tmp_path


def run(site: Path | None, *arguments: str, module: str = "shardyard") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process that sees the package, or does not."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ |= {} if site is None else {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environ, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.heavy
def test_a_recipe_trains_with_what_a_package_adds(site: Path, here: Path) -> None:
    code, answer, talk = run(site, "train", "recipe.yaml", "--json")
    assert code == 0, talk
    assert json.loads(answer)["steps_done"] == 2
    attempt = here / "runs" / "r" / "attempts" / "0"
    manifest = json.loads((attempt / "manifest.json").read_text())
    package = {"distribution": "shardyard-letters", "version": "1.0"}
    assert manifest["plug_ins"] == [
        {"group": "tasks", "name": "vowels", **package},
        {"group": "families", "name": "helium", **package},
        {"group": "sources", "name": "letters", **package},
        {"group": "sources", "name": ".ltr", **package},
    ]
    settings = json.loads((attempt / "resolved.json").read_text())["settings"]
    assert settings["task.vowels.letters"]["value"] == "aeiou"
    assert "vowel_score" in (here / "runs" / "r" / "metrics.jsonl").read_text()

    code, _, talk = run(None, "resume", "r", "run.steps=3")
    assert code == 2 and "task.name=vowels: unknown task 'vowels'." in talk
    code, _, talk = run(None, "report", "r")
    assert code == 0, talk


@pytest.mark.heavy
def test_a_launcher_of_a_package_renders(site: Path, here: Path) -> None:
    see = ["launch.volumes=[{path: " + str(here) + ", claim: a}]", f"data.source={here}/text"]
    words = ["--on", "paper-mail", "--dry-run", f"data.dir={here}/prepared", "cluster.nodes=2"]
    code, letter, talk = run(site, "launch", "recipe.yaml", *words, *see)
    assert code == 0, talk
    assert letter.startswith("To: me\nStamps: 1\n{'on.top': 'fragile'}\n")
    assert letter.count("--place given") == 2
    (line, *_) = (line for line in letter.splitlines() if "--node-rank 0" in line)
    environ = dict(word.split("=", 1) for word in shlex.split(line)[:2])
    found = pop_launched_by(environ)
    assert found is not None and found.what == "the launcher 'paper-mail' of shardyard-letters 1.0"
    assert list(environ) == ["SHARDYARD_MARK"], "no process that it starts is told"
    code, _, talk = run(None, "launch", "recipe.yaml", *words)
    assert code == 2 and "unknown launcher 'paper-mail'. Available: local, slurm," in talk


@pytest.mark.heavy
def test_a_node_without_the_package_says_so_to_all_before_any_trains(here: Path) -> None:
    folder = RunDir(here / "runs" / "r")
    place = ["--place", "given", "--nodes", "2", "--rendezvous", "127.0.0.1:1", "--session", "s"]
    words = ["recipe.yaml", "--run-dir", str(folder.path), *place]
    with Session(folder, "s").announced(0):
        code, _, talk = run(None, *words, "--node-rank", "1", module="shardyard.node")
    assert code == 2 and "unknown task 'vowels'" in talk
    with pytest.raises(RequestError, match=r"(?s)node 1 .*: .*unknown task 'vowels'"):
        wait_for_nodes(Readiness(folder, "s"), 0, resolved(here), say=print)

    code, _, talk = run(None, *words, "--node-rank", "0", module="shardyard.node")
    assert code == 2
    assert "unknown task 'vowels'" in (folder.path / "sessions" / "s.json").read_text()


@pytest.mark.usefixtures("letters")
def test_a_node_with_another_version_is_refused(here: Path) -> None:
    folder = RunDir(here / "runs" / "r")
    write_resolved(folder.resolved(0), resolved(here))
    package = {"distribution": "shardyard-letters", "version": "0.9"}
    listed = {"plug_ins": [{"group": "tasks", "name": "vowels", **package}]}
    folder.manifest(0).write_text(json.dumps(listed))
    with (
        pytest.raises(RequestError, match=r"uses shardyard-letters 1.0, and node 0 .*letters 0.9"),
        prepare_node(Readiness(folder, "s"), 0, 1, log=print),
    ):
        pass


@pytest.mark.heavy
@pytest.mark.usefixtures("letters")
def test_the_manifest_names_who_launched_and_who_read_and_a_node_needs_neither(here: Path) -> None:
    folder, package = RunDir(here / "runs" / "r"), {"distribution": "letters", "version": "0.1"}
    settled = resolved(here)
    read = {"group": "sources", "name": ".ltr", **package}
    settled = replace(settled, data=replace(settled.data, readers=(read,)))
    attempt = Attempt(
        run_dir=folder, number=0, requested=settled.recipe, resolved=settled, machine=MACHINE
    )
    launched_by = PlugIn(group="launchers", name="paper-mail", object_reference="", **package)
    write_down(attempt, None, launched_by=launched_by)
    named = [each["name"] for each in json.loads(folder.manifest(0).read_text())["plug_ins"]]
    assert named == ["vowels", "letters", "paper-mail", ".ltr"]
    assert read_resolved(folder.resolved(0)).data == settled.data
    _compare_plug_ins(settled, folder.manifest(0))  # of other versions of launcher and reader


def resolved(here: Path) -> Resolved:
    """The recipe as node 0 has settled it."""
    recipe = load_recipe([here / "recipe.yaml"], ["cluster.nodes=2"], of_run=True)
    facts = DatasetMetadata(
        dir="prepared", fingerprint="f", vocab_size=300, train_tokens=1000, eval_tokens=100,
        train_documents=2, eval_documents=1, unigram_entropy=5.0,
    )  # fmt: skip
    shape = replace(PRESETS["llama-tiny"].shape, vocab_size=300)
    return Resolved(recipe=recipe, reasons={}, shape=shape, data=facts, steps=2)
