"""Every command of the pages on launching runs as a dry run in a folder that has only the examples.

Three kinds of command are not answered alone, and are known by their form: `doctor --on` asks a
target, what names a RUN asks for a run that was launched before, and what names a cluster for one
that was made.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from shardyard.cli import main
from shardyard.cluster.batch.queue import launch_settings
from shardyard.cluster.clients import World
from shardyard.cluster.create import kubernetes_settings
from shardyard.cluster.fsx import FileSystemOutputs
from shardyard.cluster.spec import ClusterSpec
from shardyard.cluster.spec_file import read_cluster_spec
from shardyard.config.paths import check_mounted_paths
from shardyard.config.schema.recipe import Recipe
from shardyard.control.submission import launcher_named
from shardyard.io.yaml import read_yaml
from shardyard.launchers.kubernetes.objects import to_yaml
from tests.test_docs import _FENCED, ROOT, files_of

pytestmark = pytest.mark.heavy

NO_CLUSTER = "own-code.md"
"""The tutorial that stays on one machine."""
WAYS = sorted(p for p in (ROOT / "docs/tutorials").glob("*.md") if p.name != NO_CLUSTER)
"""From an empty account to a trained model and back."""
PAGES = sorted([*(ROOT / "docs").glob("launch*.md"), *WAYS])
EXAMPLE = "examples/llama2-7b-finetune.yaml"
SOURCES = sorted((ROOT / "examples" / "sources").glob("*.yaml"))


def lines() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for language, block in _FENCED.findall(page.read_text()):
            for line in block.splitlines() if language == "sh" else ():
                # what plans is run by test_docs.py
                if line.startswith("shardyard ") and not (
                    page in WAYS and line.startswith("shardyard plan ")
                ):
                    yield page.name, line
    for example in (ROOT / EXAMPLE, *SOURCES):
        found = re.findall(
            r"^# +(shardyard (?:launch|plan|prepare) .*)$", example.read_text(), re.M
        )
        yield from ((example.name, line.partition("  ")[0]) for line in found)


LINES = list(lines())


def test_all_pages_on_launching_have_commands() -> None:
    assert {page for page, _ in LINES} >= {page.name for page in PAGES}
    assert len(LINES) >= 10


@pytest.fixture
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the examples, without a network, a cluster or an account."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    _write_files_of_pages(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "aws"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


def _find_no_program(argv: list[str], **_: Any) -> None:
    raise FileNotFoundError(2, "No such file or directory", argv[0])


def _write_files_of_pages(folder: Path) -> None:
    """What the pages' readers save, and what their `cluster create` would have written."""
    for page in WAYS:
        for name, text in files_of(page).items():
            (folder / name).write_text(text)
    ways = {page.name for page in WAYS}
    for of, line in LINES:
        if of in ways and " cluster create " in line:
            words = [word for word in shlex.split(line)[3:] if not word.startswith("-")]
            given = [word if "=" in word else str(folder / word) for word in words]
            _write_settings(folder, read_cluster_spec(given))


def _write_settings(folder: Path, given: ClusterSpec) -> None:
    world = World(
        folder=folder / "clusters" / f"{given.name}.{given.region}", spec=given, owner="0" * 16
    )
    world.folder.mkdir(parents=True)
    if given.kind == "batch":
        made = FileSystemOutputs(
            file_system="fs-0123456789abcdef0", mount_name="",
            access_point="fsap-0123456789abcdef0",
        )  # fmt: skip
        roles = {
            name: f"arn:aws:iam::123456789012:role/{name}" for name in ("JobRole", "ExecutionRole")
        }
        settings = launch_settings(world, roles, made)
    else:
        world.kubeconfig.write_text("current-context: my-cluster")
        settings = kubernetes_settings(world)
    (world.folder / "launch.yaml").write_text(to_yaml((settings,)))


@pytest.mark.usefixtures("_empty_folder")
@pytest.mark.parametrize(("page", "line"), LINES)
def test_a_command_of_a_page_runs(
    page: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = shlex.split(line, comments=True)
    verb, *rest = words[1:]
    names_a_run = "RUN" in rest
    names_a_cluster = verb == "cluster" and rest[0] != "create"
    asks_a_target = verb == "doctor" and "--on" in rest
    is_planned = "--predict" in rest  # a study that runs nothing, and writes its page
    if _has_dry_run(verb, rest) and "--dry-run" not in rest and not (asks_a_target or is_planned):
        rest.append("--dry-run")
    if asks_a_target:
        monkeypatch.setattr("subprocess.Popen", _find_no_program)
    code = main([verb, *rest])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "bug of shardyard" not in said.err
    if names_a_run:
        assert code == 2 and "RUN" in said.err, said.err
    elif names_a_cluster:
        assert code == 2 and f"no cluster {rest[1]} was made from here" in said.err, said.err
    elif asks_a_target and "--install" in rest:  # an empty one will do for what it lacks
        assert code == 0 and ("kubectl apply" in said.out or "helm upgrade" in said.out), said.err
    elif asks_a_target:
        assert code in (1, 2, 3, 4), said.out + said.err  # there is none
    elif page == Path(EXAMPLE).name and "--on slurm" in line:  # its text is a folder of the user's
        assert code == 2 and "/shared/my-text does not exist on this machine" in said.err
    else:
        assert code == 0, said.err
        _refuse_paths_of_this_machine(said.out, line, tmp_path)
    written = {"runs"} if is_planned else set()
    saved = {name for way in WAYS for name in files_of(way)}
    assert {path.name for path in tmp_path.iterdir()} == {"examples", "clusters"} | saved | written


@pytest.mark.usefixtures("_empty_folder")
@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_the_example_is_rendered_for_every_kind_of_job(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next(line for page, line in LINES if "yaml" in page and "--on kubernetes" in line)
    words = [*shlex.split(line)[1:], f"launch.kubernetes.target={target}", "--dry-run"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "price: $110.08 an hour, about $38.09 for the run" in said.err
    recipe = _refuse_paths_of_this_machine(said.out, line, tmp_path)
    assert recipe.model.hub == "meta-llama/Llama-2-7b-hf"
    assert recipe.secrets == {"HF_TOKEN": "k8s:hf-token/token"}


@pytest.mark.usefixtures("_empty_folder")
def test_the_example_without_what_a_place_needs_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for on, words in (
        ("kubernetes", "set secrets.HF_TOKEN=k8s:"),
        ("aws-batch", "set secrets.HF_TOKEN=aws-sm:"),
    ):
        volume = ("launch.volumes=[{path: /shared, host: /a}]", "launch.run_dir=/shared/runs")
        assert main(["launch", EXAMPLE, "--on", on, "--dry-run", *volume]) == 2
        assert words in capsys.readouterr().err
        assert main(["launch", EXAMPLE, "--on", on, "--dry-run"]) == 2
        assert f"data.source=/shared/my-text is in no folder that nodes of {on} see" in (
            capsys.readouterr().err
        )


def _has_dry_run(verb: str, rest: list[str]) -> bool:
    program = import_module(f"shardyard.cli.{verb}").command
    if isinstance(program, click.Group):
        program = program.commands[rest[0]]
    return any("--dry-run" in param.opts for param in program.params)


def _refuse_paths_of_this_machine(out: str, line: str, folder: Path) -> Recipe:
    """A request for nodes elsewhere names no folder of this machine; its recipe."""
    if ("--on kubernetes" not in line and "--on aws-batch" not in line) or "launch" not in line:
        return Recipe()
    assert str(folder) not in out and str(Path.home()) not in out and sys.prefix not in out
    recipe = Recipe.model_validate(read_yaml(_sent_recipe(out), source="what is sent"))
    place = "kubernetes" if "--on kubernetes" in line else "aws-batch"

    assert check_mounted_paths(recipe, launcher_named(place).node_paths(recipe)) == []
    return recipe


def _sent_recipe(out: str) -> str:
    """The recipe in a ConfigMap, or in a variable of a job definition."""

    if out.startswith("["):
        found = [value for key, value in _pairs(json.loads(out)) if key == "SHARDYARD_RECIPE"]
    else:
        maps = [each for each in yaml.safe_load_all(out) if each["kind"] == "ConfigMap"]
        found = [each["data"]["recipe.yaml"] for each in maps]
    assert len(set(found)) == 1
    return str(found[0])


def _pairs(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every ``{"name": ..., "value": ...}`` in a request."""
    if isinstance(tree, dict):
        if "name" in tree and "value" in tree:
            yield tree["name"], tree["value"]
        tree = list(tree.values())
    for inner in tree if isinstance(tree, list) else ():
        yield from _pairs(inner)


def _verbs_of(page: Path) -> list[str]:
    words = [shlex.split(line)[1:3] for name, line in LINES if name == page.name]
    plans = ["plan"] if "shardyard plan " in page.read_text() else []
    return plans + [
        " ".join(each) if each[0] in ("cluster", "image") else each[0] for each in words
    ]


@pytest.mark.parametrize("name", ["train-on-slurm.md", "llama2-70b.md"])
def test_a_way_on_slurm_goes_from_a_plan_to_an_export_and_says_what_it_needs(name: str) -> None:
    (page,) = [page for page in WAYS if page.name == name]
    verbs = _verbs_of(page)
    wanted = ["plan", "doctor", "prepare", "launch", "watch", "resume", "report"]
    wanted += ["export", "teardown"]
    places = [verbs.index(verb) for verb in wanted]
    assert places == sorted(places), verbs
    assert "Shardyard does not create a Slurm cluster" in " ".join(page.read_text().split())


@pytest.mark.usefixtures("_empty_folder")
def test_the_levers_of_a_70b_model_are_as_they_are_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs/tutorials/llama2-70b.md").read_text()
    rows = re.findall(r"^\| .* \| `(.*)` \| ([\d.]+ GiB)(.*) \| ([\d.]+ K) \|$", page, re.M)
    assert len(rows) > 12
    for settings, memory, fit, speed in rows:
        words = ["memory.recompute=full", *settings.split()]
        assert main(["plan", "70b.yaml", *words, "--layouts", "0"]) == 0
        said = capsys.readouterr().out
        verdict = "does not fit" if fit else "fits"
        assert re.search(rf"^memory +{verdict} +{re.escape(memory)} are", said, re.M), settings
        assert f" {speed} tokens/s" in said, settings


@pytest.mark.parametrize(
    "name", ["llama2-on-eks.md", "imagenet-on-spot-nodes.md", "bert-on-aws-batch.md"]
)
def test_a_way_goes_from_an_empty_account_and_back(name: str) -> None:
    (page,) = [page for page in WAYS if page.name == name]
    verbs = _verbs_of(page)
    wanted = [
        "plan", "cluster create", "image build", "image push", "prepare", "launch", "report",
        "export", "teardown", "cluster delete",
    ]  # fmt: skip
    wanted[2:2] = (
        ["doctor"] if name != "bert-on-aws-batch.md" else []
    )  # a queue has nothing to install
    places = [verbs.index(verb) for verb in wanted]
    assert places == sorted(places), f"{name} has {verbs}"
    assert "shardyard watch RUN" in page.read_text()


@pytest.mark.usefixtures("_empty_folder")
@pytest.mark.parametrize("name", ["llama2-on-eks.md", "imagenet-on-spot-nodes.md"])
def test_a_way_says_hardware_time_and_price_as_they_are_planned(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (page,) = [page for page in WAYS if page.name == name]
    (line,) = [line for of, line in LINES if of == name and " cluster create " in line]
    assert main([*shlex.split(line)[1:], "--dry-run", "--json"]) == 0
    usd = json.loads(capsys.readouterr().out)["predicted"]["usd"]
    cluster, *runs = re.findall(
        r"^\| .* \| (?:\d.*|24 h) \| (\$[\d.,]+) \|$", page.read_text(), re.M
    )
    assert cluster == f"${usd:,.2f}"
    headers = "".join(example.read_text() for example in SOURCES)  # held to plans by test_docs.py
    assert runs and all(f"price   {price} at " in headers for price in runs)
