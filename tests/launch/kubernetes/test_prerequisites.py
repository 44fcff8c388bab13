"""What a cluster needs: listed, checked, and as commands to read."""

import pytest

from shardyard.launch.kubernetes.prerequisites import install_hint, install_script, needed
from tests.launch.kubernetes.requests import request_for


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


@pytest.mark.parametrize("target", ["jobset", "trainjob", "pytorchjob"])
def test_every_command_pins_a_version(target: str) -> None:
    parts = needed(request_for(f"launch.kubernetes.target={target}", "launch.kubernetes.queue=a"))
    for part in parts:
        assert all(part.version in command for command in part.install)
        assert part.name in install_script(parts)


def test_the_hint_for_an_unknown_kind_invents_nothing() -> None:
    assert "Kubernetes cluster" in install_hint("Pod")
    assert "Kubeflow Trainer 2.3.0" in install_hint("ClusterTrainingRuntime")
