"""The etcd that we render lets in only who shows the certificate of its Secret; a real etcd."""

import base64
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shardyard.config.endpoints import parse_rendezvous_endpoint
from shardyard.config.load import load_recipe
from shardyard.elastic.rendezvous.etcd_client import Etcd, EtcdSilentError
from shardyard.errors import RequestError
from shardyard.io.polling import wait_for
from shardyard.launchers.kubernetes.etcd import (
    command,
    empty_secret,
    filled,
    health_port,
    render_etcd,
)
from shardyard.launchers.kubernetes.etcd_certificate import FILES, FOLDER
from shardyard.launchers.kubernetes.objects import render_objects
from shardyard.launchers.kubernetes.placement import pod_spec
from tests.debian_packages import need
from tests.launchers.kubernetes.requests import request_for
from tests.launchers.kubernetes.schemas import check_builtin

ETCD = ("launch.kubernetes.target=pytorchjob", "launch.kubernetes.etcd=etcd:2379")


def pods_of(*overrides: str) -> dict[str, Any]:
    return pod_spec(render_objects(request_for(*ETCD, *overrides))[-1])


def variables_of(spec: dict[str, Any]) -> dict[str, str]:
    env = spec["containers"][0]["env"]
    return {each["name"]: each["value"] for each in env if "value" in each}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """What the kubelet makes of the Secret."""
    need("openssl")
    folder = tmp_path / "secret"
    folder.mkdir()
    empty = empty_secret(request_for(*ETCD).recipe.launch.kubernetes)
    assert empty is not None
    secret = filled(empty)
    check_builtin(secret)
    for name, content in secret["data"].items():
        (folder / name).write_bytes(base64.b64decode(content))
    return folder


@pytest.fixture
def port(files: Path, tmp_path: Path) -> Iterator[int]:
    """Port of a real etcd that runs what the container runs."""
    need("etcd-server")
    port = free_port()
    argv = command(
        "localhost", port, data=str(tmp_path / "data"), certificate=str(files), host="127.0.0.1"
    )
    argv = [word.replace(f":{health_port(port)}", f":{port + 1}") for word in argv]
    peer = f"http://127.0.0.1:{port + 2}"
    argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    argv += ["--initial-cluster", f"default={peer}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        health = f"http://127.0.0.1:{port + 1}/health"
        assert wait_for(lambda: answers(health), within_s=30, every_s=0.1), (
            tmp_path / "log"
        ).read_text()
        yield port
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def free_port() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = int(first.getsockname()[1])
            with suppress(OSError):
                for beside in (port + 1, port + 2):
                    socket.create_server(("127.0.0.1", beside)).close()
                return port


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
        return b"true" in answer.read()
    return False


@pytest.mark.system
def test_only_a_pod_with_the_secret_reaches_etcd(files: Path, port: int) -> None:
    spec = pods_of()
    given = {
        name: value.replace(FOLDER, str(files))
        for name, value in variables_of(spec).items()
        if name in FILES
    }
    place = parse_rendezvous_endpoint(f"etcds://localhost:{port}")
    assert place is not None
    assert Etcd(place, given).grant_lease(10) > 0
    only_trusts = {"ETCDCTL_CACERT": given["ETCDCTL_CACERT"]}
    # The server's alert, or a connection that is gone before the alert was read.
    with pytest.raises((RequestError, EtcdSilentError), match="ETCDCTL_CERT and ETCDCTL_KEY"):
        Etcd(place, only_trusts).grant_lease(10)
    plain = parse_rendezvous_endpoint(f"etcd://localhost:{port}")
    assert plain is not None
    with pytest.raises(EtcdSilentError, match="etcds://"):
        Etcd(plain, {}).grant_lease(10)
    key = {"ETCDCTL_CERT": files / "tls.crt", "ETCDCTL_KEY": files / "tls.key"}
    theirs = {name: str(path) for name, path in {"ETCDCTL_CACERT": files / "ca.crt"}.items()}
    for variables, code in ((theirs | {k: str(v) for k, v in key.items()}, 0), (theirs, 1)):
        done = subprocess.run(
            ["etcdctl", "--endpoints", f"https://localhost:{port}", "--command-timeout=3s",
             "get", "x"],
            env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3", **variables},
            check=False, capture_output=True,
        )  # fmt: skip
        assert done.returncode == code, done.stderr


def test_pods_of_a_run_mount_the_secret_and_meet_with_tls() -> None:
    spec = pods_of()
    assert variables_of(spec)["SHARDYARD_RENDEZVOUS"] == "etcds://etcd:2379"
    (secret,) = (each["secret"] for each in spec["volumes"] if "secret" in each)
    assert secret == {"secretName": "etcd-tls", "defaultMode": 0o440}
    assert {"name": "etcd-tls", "mountPath": FOLDER, "readOnly": True} in spec["containers"][0][
        "volumeMounts"
    ]


@pytest.mark.parametrize(
    "words",
    [["launch.kubernetes.etcd_secret=null"], ["launch.kubernetes.etcd=etcd.infra:2379"]],
)
def test_an_etcd_of_ones_own_is_reached_as_before(words: list[str]) -> None:
    spec = pods_of(*words)
    assert variables_of(spec)["SHARDYARD_RENDEZVOUS"].startswith("etcd://")
    assert not any("secret" in each for each in spec["volumes"])


def test_a_secret_of_ones_own_is_mounted_and_not_made() -> None:
    word = "launch.kubernetes.etcd_secret=mine"
    (secret,) = (each["secret"] for each in pods_of(word)["volumes"] if "secret" in each)
    assert secret["secretName"] == "mine"
    settings = load_recipe([], [*ETCD, word]).launch.kubernetes
    assert empty_secret(settings) is None
    deployment = render_etcd(settings)[-1]
    assert (
        "--client-cert-auth" in deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    )
