"""A cluster that parts are installed in, by programs that write down how they were called."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard.cli import main
from tests.launchers.kubernetes.api_server import ApiServer, running_server
from tests.launchers.kubernetes.requests import IMAGE

RECORDER = """#!/bin/sh
printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"
[ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }
"""


def rented(*words: str) -> tuple[str, ...]:
    """A recipe's words for a p5.48xlarge."""
    return ("cluster.device=auto", "cluster.devices=auto", "cluster.instance=p5.48xlarge", *words)


class Site:
    """A cluster, a folder of runs, and programs that write down their calls."""

    def __init__(self, server: ApiServer, kubeconfig: Path, folder: Path) -> None:
        self.server = server
        self.kubeconfig = kubeconfig
        self.runs = folder / "runs"
        self.log = folder / "calls"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("kubectl", "helm"):
            (self.programs / name).write_text(RECORDER)
            (self.programs / name).chmod(0o755)

    def doctor(self, *words: str) -> int:
        recipe = (
            "model.preset=llama-tiny", "data.source=/runs/text", "run.steps=2", "cluster.nodes=2",
            "cluster.device=cpu", "cluster.devices=2", f"launch.image={IMAGE}",
            "launch.run_dir=/runs", "launch.volumes=[{path: /runs, claim: runs}]",
            "launch.kubernetes.context=test", f"run.dir={self.runs}",
        )  # fmt: skip
        from shardyard.launchers.kubernetes.launcher import KubernetesLauncher  # an extra

        launchers = {"kubernetes": KubernetesLauncher(kubeconfig=self.kubeconfig)}
        return main(["doctor", *recipe, "--on", "kubernetes", *words], launchers=launchers)

    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def ledger(self) -> list[str]:
        text = (self.runs / "installed-kubernetes-test.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [f"{line['action']} {line['kind']} {line['name']}" for line in lines]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with running_server(tmp_path) as (server, kubeconfig):
        made = Site(server, kubeconfig, tmp_path)
        monkeypatch.setenv("PATH", f"{made.programs}:{os.environ['PATH']}")
        monkeypatch.setenv("CALLS", str(made.log))
        monkeypatch.setenv("REFUSAL", "")
        yield made
