"""Limits of a site file hold for plans, launches and dry runs, by launcher and by price."""

from pathlib import Path

import pytest

from shardyard.cli import main

RECIPE = (
    "model.preset=llama2-7b", "cluster.instance=p5.48xlarge", "run.steps=300",
    "optim.global_batch=64",
)  # fmt: skip
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "site.yaml"
    monkeypatch.setenv("SHARDYARD_SITE", str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return file


@pytest.mark.parametrize("verb", ["plan", "launch"])
def test_too_many_nodes_are_rejected_by_every_verb(site: Path, capsys: Captured, verb: str) -> None:
    site.write_text("limits: {max_nodes: 1}\n")
    options = ["--on", "slurm", "--dry-run"] if verb == "launch" else []
    assert main([verb, *RECIPE, "cluster.nodes=2", *options]) == 2
    said = capsys.readouterr().err
    assert "cluster.nodes=2 is above limits.max_nodes=1 of site file ~/site.yaml, line 1" in said


@pytest.mark.parametrize("option", ["--dry-run", "--yes", "--force"])
def test_another_launcher_and_a_higher_price_are_rejected(
    site: Path, capsys: Captured, option: str
) -> None:
    words = ["launch", *RECIPE, option]
    site.write_text("limits: {launchers: [kubernetes], max_usd: 0.5}\n")
    assert main([*words, "--on", "slurm"]) == 2
    said = capsys.readouterr().err
    assert "--on slurm is not among limits.launchers=kubernetes of site file ~/site.yaml" in said
    assert "Use --on kubernetes." in said
    site.write_text("limits: {launchers: [slurm], max_usd: 0.5}\n")
    assert main([*words, "--on", "kubernetes"]) == 2  # first, without what that one needs
    assert "Use --on slurm." in (said := capsys.readouterr().err) and "launch.image" not in said
    assert main([*words, "--on", "slurm"]) == 2
    said = capsys.readouterr().err
    assert "the price is predicted to be $" in said and "above limits.max_usd=0.5 of site" in said
    assert main([*words, "run.steps=null", "--on", "slurm"]) == 2
    assert "site.yaml, line 1, but the price is not known: " in capsys.readouterr().err
    assert not (site.parent / "runs").exists()


def test_the_gate_finds_a_price_above_the_limit(site: Path, capsys: Captured) -> None:
    site.write_text("limits: {max_usd: 0.5}\n")
    assert main(["plan", *RECIPE, "--check"]) == 11
    assert "above limits.max_usd=0.5 of site file ~/site.yaml, line 1" in capsys.readouterr().err
