"""The entry of a node: what it refuses before anything is started. Real jobs: tests/e2e."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.launchers.node_rank import NodeAssignment
from shardyard.node.budget import AttemptLimits, LimitMonitor
from shardyard.node.main import check_shared_accelerators, scheduler_exit_code, with_nodes
from shardyard.rundir.layout import RunDir

GIVEN = ["--place", "given", "--node-rank", "0", "--nodes", "2", "--rendezvous", "127.0.0.1:29400"]


def node(folder: Path, *options: str, text: str = "") -> tuple[int, str]:
    """Exit code and talk of a node entry."""
    (folder / "r.yaml").write_text(text or "model: {preset: llama-tiny}\n")
    environ = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-m", "shardyard.node", "r.yaml", "--run-dir", "run", *options],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr and done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options",
    [GIVEN, [*GIVEN[:6], "--session", "s"], [*GIVEN[:-1], "here", "--session", "s"]],
)
def test_a_given_place_is_given_whole(tmp_path: Path, options: list[str]) -> None:
    code, talk = node(tmp_path, *options)
    assert code == 2
    assert "--place given needs all of --node-rank K --nodes N" in talk


@pytest.mark.heavy
def test_a_node_beyond_the_last_is_refused(tmp_path: Path) -> None:
    words = [*GIVEN, "--session", "s"]
    words[words.index("--node-rank") + 1] = "2"
    code, talk = node(tmp_path, *words)
    assert code == 2
    assert "--node-rank 2 is not a node of --nodes 2" in talk and "Use 0 to 1" in talk


@pytest.mark.heavy
def test_an_interface_that_is_not_there_is_named_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo,docker0")
    code, talk = node(tmp_path, *GIVEN, "--session", "s")
    assert code == 2
    assert "GLOO_SOCKET_IFNAME=^lo,docker0: gloo takes plain names, without ^" in talk


@pytest.mark.heavy
def test_a_place_without_its_variables_names_the_first_that_is_missing(tmp_path: Path) -> None:
    code, talk = node(tmp_path, "--place", "slurm")
    assert code == 2 and "the variable SLURM_JOB_ID is not set" in talk


@pytest.mark.heavy
def test_node_0_leaves_its_error_for_the_others(tmp_path: Path) -> None:
    text = "model: {preset: llama-tiny}\nrun: {steps: 1}\ncluster: {nodes: 3, device: cpu}\n"
    code, talk = node(tmp_path, *GIVEN, "--session", "s", text=text)
    assert code == 2
    word = json.loads((tmp_path / "run" / "sessions" / "s.json").read_text())
    assert word["exit_code"] == 2
    assert "the job has 2 nodes but the recipe asks for cluster.nodes=3" in word["ended"]
    assert word["ended"] in talk


def recipe(nodes: int, **elastic: int) -> Recipe:
    return Recipe.model_validate({"cluster": {"nodes": nodes}, "elastic": elastic})


def test_the_nodes_that_are_there_count_within_the_elastic_limits() -> None:
    asked = recipe(4, min_nodes=2)
    assert with_nodes(asked, 4) is asked
    fewer = with_nodes(asked, 2)
    assert fewer.cluster.nodes == 2
    assert (fewer.elastic.min_nodes, fewer.elastic.max_nodes) == (2, 4)
    more = with_nodes(recipe(2, max_nodes=3), 3)
    assert (more.cluster.nodes, more.elastic.min_nodes, more.elastic.max_nodes) == (3, 2, 3)


@pytest.mark.parametrize("there", [1, 5])
def test_other_numbers_of_nodes_are_refused_with_both_remedies(there: int) -> None:
    with pytest.raises(RequestError) as caught:
        with_nodes(recipe(4, min_nodes=2), there)
    assert f"the job has {there} nodes" in str(caught.value)
    assert "(elastic: 2 to 4)" in str(caught.value)
    assert "Submit it with 4 nodes" in str(caught.value)
    assert f"cluster.nodes={there}" in str(caught.value)


FACTS = DatasetMetadata(
    dir="none", fingerprint="0", vocab_size=300, train_tokens=1000, eval_tokens=100,
    train_documents=2, eval_documents=1, unigram_entropy=5.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "host", "device", "is_refused"),
    [
        (2, "127.0.0.1", "cuda", True),
        (2, "localhost", "hpu", True),
        (2, "127.0.0.1", "cpu", False),
        (1, "127.0.0.1", "cuda", False),
        (2, "10.0.0.7", "cuda", False),
        (2, "node-0", "cuda", False),
    ],
)
def test_nodes_that_are_one_machine_do_not_share_its_accelerators(
    nodes: int, host: str, device: str, is_refused: bool
) -> None:
    recipe = Recipe.model_validate({"cluster": {"nodes": nodes, "devices": 1, "device": device}})
    resolved = Resolved(
        recipe=recipe, reasons={}, shape=PRESETS["llama-tiny"].shape, data=FACTS, steps=3
    )
    place = NodeAssignment(node_rank=0, nodes=nodes, host=host, port=29400, session="s")
    if not is_refused:
        check_shared_accelerators(resolved, place)
        return
    with pytest.raises(RequestError) as caught:
        check_shared_accelerators(resolved, place)
    assert "every node would take the same accelerators" in str(caught.value)
    assert "cluster.device=cpu" in str(caught.value)


def test_where_a_drained_job_is_started_again_one_that_stopped_itself_is_final(
    tmp_path: Path,
) -> None:
    run, node = (
        RunDir(tmp_path),
        NodeAssignment(node_rank=0, nodes=1, host="h", port=1, session="s"),
    )
    pod = replace(node, is_container=True)
    terms = AttemptLimits(
        started_s=0.0, session="s", usd_per_hour=1.0, max_usd=1e-9, stop_idle_after_s=None
    )  # fmt: skip
    assert scheduler_exit_code(143, run, 0, pod) == 143
    assert LimitMonitor(run, 0, terms, now_s=0.0).poll(1.0)
    assert scheduler_exit_code(143, run, 0, pod) == 130
    assert scheduler_exit_code(0, run, 0, pod) == 0  # it came to its end all the same
    assert scheduler_exit_code(143, run, 1, pod) == 143  # another attempt, asked by its scheduler
    assert scheduler_exit_code(143, run, 0, node) == 143
