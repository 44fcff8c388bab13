"""Wrong requests to `shardyard plan`: each is told what is wrong, why, and what would be right."""

import re
from pathlib import Path

import pytest

from shardyard.cli import main

RECIPE = """
model: {preset: llama2-7b}
data: {source: ./my-text}
cluster: {nodes: 2, instance: p5.48xlarge}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "ours.recipe.yaml"
    path.write_text(RECIPE)
    return str(path)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a wrong request, on one line; nothing else is printed."""
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return " ".join(shown.err.split())


WRONG = [
    (["cluster.instance=p5.48xlage"], r"Did you mean p5\.48xlarge, "),
    (["cluster.instance=p5"], r"Did you mean p5\.4xlarge, p5\.48xlarge, p5e"),
    (["model.preset=llama2-7B"], r"is not a preset\. Did you mean llama2-7b\?"),
    (["--offer"], r"unknown option --offer\. Did you mean --offers\?"),
    (["--layouts", "-1"], r"'--layouts': -1 is not in the range x>=0"),
    (["--deadline", "soon"], r"'soon' is not a length of time such as 90min, 24h or 1\.5d\. See `"),
    (["--deadline", "infd"], r"'infd' is not a length of time"),
    (["--budget", "cheap"], r"'--budget': 'cheap' is not a number above 0\."),
    (["--budget", "-5"], r"'-5' is not a number above 0"),
    (["--budget", "nan"], r"'nan' is not a number above 0"),
    (["--critical-batch", "0"], r"'--critical-batch': '0' is not a number above 0"),
    (["parallel.tp=3"], r"tp=3 does not divide the 8 devices .* Use 1, 2, 4 or 8"),
    (["parallel.ep=2"], r"ep=2 but the model has no experts to split\. Use 1"),
    (["parallel.cp=2", "data.seq_len=4098"], r"cp=2 needs samples of a multiple of 4 tokens"),
    (
        [
            "parallel.pp=2",
            "parallel.schedule=zb-v",
            "parallel.virtual_stages=2",
            "model.preset=llama3.2-1b",
            "optim.global_batch=64",
        ],
        r"schedule=zb-v but the model's head is its embedding",
    ),
    (["optim.global_batch=4"], r"=4 is fewer samples than the 16 data-parallel .* at most 4 ranks"),
    (
        ["parallel.pp=8", "optim.global_batch=8", "optim.micro_batch=2"],
        r"pp=8 stages but 2 micro-batches a step .* at most 2 stages",
    ),
    (["cluster.devices=16"], r"a node of p5\.48xlarge has 8 x H100 SXM\..* at most 8, or more"),
    (
        ["cluster.device=cpu"],
        r"cluster\.instance names accelerators, .* Use cluster\.device=auto for them, or "
        r"cluster\.instance=null for the processes of this machine",
    ),
    (["--dry-run-model", "parallel.pp=2"], r"parallel\.pp=2: a stage waits for other"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_request_is_told_what_would_be_right(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    text = refusal(capsys, recipe, *arguments)
    assert re.search(message, text), text


CLUSTERS = [
    ("accelerator: H1000\ndevices_per_node: 8\nnetwork_gbps: 3200", r"'H1000' is not .* H100 SXM"),
    (
        "accelerator: H100 SXM\nnetwork_gbps: 3200",
        r"devices_per_node: is missing. Give a number",
    ),
    (
        "accelerator: H100 SXM\ndevices_per_node: 8",
        r"network_gbps: is missing, but cluster\.nodes=2",
    ),
    (
        "accelerator: H100 SXM\ndevices_per_node: 0\nnetwork_gbps: 1",
        r"devices_per_node=0 cannot be",
    ),
    ("accelerator: H100 SXM\ndevices: 8", r"devices: unknown key\. Did you mean devices_"),
    ("hello", r"holds no keys\. It needs accelerator, devices_per_node and network_gbps"),
]


@pytest.mark.parametrize(("content", "message"), CLUSTERS)
def test_an_impossible_cluster_is_refused_by_key(
    recipe: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str,
    message: str,
) -> None:
    path = tmp_path / "ours.yaml"
    path.write_text(content)
    text = refusal(capsys, recipe, "cluster.instance=null", f"cluster.file={path}")
    assert re.search(message, text), text


@pytest.mark.heavy
def test_a_model_too_large_for_this_machine_is_planned_for_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["model.preset=llama2-70b", "run.steps=500", "cluster.device=cpu"]
    assert main(["plan", *words]) == 0
    assert f"shardyard plan {' '.join(words)} --offers" in capsys.readouterr().out
    assert main(["plan", "model.preset=llama-tiny", "run.steps=5", "cluster.device=cpu"]) == 0
    assert "--offers" not in capsys.readouterr().out
