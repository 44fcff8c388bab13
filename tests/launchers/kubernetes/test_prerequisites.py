"""What a cluster needs: listed, checked, and as commands to read."""

from datetime import date
from itertools import pairwise

import pytest

from docs.generate.kubernetes import table
from shardyard.launchers.kubernetes.prerequisites import (
    ALL,
    Prerequisite,
    install_hint,
    needed,
)
from tests.launchers.kubernetes.requests import request_for


def names(*overrides: str) -> list[str]:
    return [part.name for part in needed(request_for(*overrides))]


def test_each_target_needs_its_controller_and_the_plugins_of_its_devices() -> None:
    assert names() == ["JobSet", "NVIDIA device plugin", "EFA device plugin"]
    assert names("launch.kubernetes.target=trainjob", "launch.kubernetes.efa=0") == [
        "Kubeflow Trainer", "NVIDIA device plugin",
    ]  # fmt: skip
    assert names(
        "launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd:2379",
        "launch.kubernetes.queue=team", "cluster.instance=dl1.24xlarge",
    ) == [
        "Kubeflow training operator", "Kueue", "Gaudi device plugin", "EFA device plugin", "etcd",
    ]  # fmt: skip


@pytest.mark.parametrize("part", ALL, ids=lambda part: part.name)
def test_every_release_is_pinned_dated_and_asked_of_a_named_context(part: Prerequisite) -> None:
    release = part.release
    if release is None:
        return
    context = "arn:aws:eks:us-east-1:123456789012:cluster/training"
    named = (["--context", context], ["--kube-context", context], ["--cluster", "training"])
    for command in (release.install(context), release.remove(context)):
        assert any(words in named for words in map(list, pairwise(command)))
    assert part.version in " ".join(release.install(context))
    date.fromisoformat(release.read_on)
    assert f"| {part.name} | {part.version} | `{release.url}` |" in table()


def test_the_hint_for_an_unknown_kind_invents_nothing() -> None:
    assert "Kubernetes cluster" in install_hint("Pod")
    assert "Kubeflow Trainer 2.3.0" in install_hint("ClusterTrainingRuntime")
