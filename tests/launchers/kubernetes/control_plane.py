"""A real Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler.

Version 1.20, as build_control_plane.sh makes it. There is no kubelet, so that no pod runs and logs
answer 500. JobSet, Kubeflow and Kueue are kinds whose objects are stored, with any field, and have
no controller. A proxy in front answers /openapi/v3, which 1.20 does not have yet.
"""

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.debian_packages import need

PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
ADMIN, ALICE = "admin-token", "alice-token"
_PATIENCE_S = 240.0
_TRAINER = "trainer.kubeflow.org"
_KINDS = (
    ("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", True),
    (_TRAINER, "v1alpha1", "trainjobs", "TrainJob", True),
    (_TRAINER, "v1alpha1", "clustertrainingruntimes", "ClusterTrainingRuntime", False),
    ("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob", True),
)  # fmt: skip


def binaries() -> Path:
    """Where the programs are; skips the test where they were not built."""
    need("etcd-server", "openssl")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("SHARDYARD_KUBE") or Path(cache) / "shardyard-tests/kube/bin")
    lacking = [name for name in PROGRAMS if not (folder / name).is_file()]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not in {folder}: make kubernetes builds them")
    return folder


@dataclass
class ControlPlane:
    """One that runs."""

    port: int
    """Of the proxy, which speaks HTTP."""
    api_port: int
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kubeconfig(self, name: str, token: str | None) -> Path:
        """One whose context ``test`` has these credentials."""
        path = self.folder / f"{name}.kubeconfig"
        user = {"token": token} if token else {}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}
            ],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(yaml.safe_dump(content))
        return path

    def call(
        self, method: str, path: str, body: Any = None, *, kind: str = "application/json"
    ) -> tuple[int, Any]:
        """Ask as an administrator; status and answer."""
        connection = HTTPSConnection("127.0.0.1", self.api_port, context=_trusting(), timeout=30)
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": kind}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text.decode(errors="replace")

    def create(self, path: str, item: dict[str, Any]) -> dict[str, Any]:
        """An object that is not there yet, by the path of its kind."""
        status, answer = self.call("POST", path, item)
        assert status in (200, 201), (path, answer)
        made: dict[str, Any] = answer
        return made

    def namespace(self, name: str, target: str) -> None:
        """A namespace in which alice has the rights of the documentation, for one target."""
        self.create("/api/v1/namespaces", {"metadata": {"name": name}})
        for role in documented_roles(target):
            self._bind(role, name)
        wait_for(
            lambda: self.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default")[0] == 200
        )

    def claim(self, name: str, namespace: str) -> None:
        """A claim that is bound, as pods need one to be placed."""
        shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = f"{namespace}-{name}"
        about = {
            **shared, "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/nowhere"},
            "claimRef": {"namespace": namespace, "name": name},
        }  # fmt: skip
        self.create("/api/v1/persistentvolumes", {"metadata": {"name": volume}, "spec": about})
        asked = {**shared, "volumeName": volume, "resources": {"requests": {"storage": "1Gi"}}}
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        self.create(path, {"metadata": {"name": name}, "spec": asked})
        wait_for(lambda: self.call("GET", f"{path}/{name}")[1]["status"]["phase"] == "Bound")

    def _bind(self, role: dict[str, Any], namespace: str) -> None:
        group = "/apis/rbac.authorization.k8s.io/v1"
        is_namespaced = role["kind"] == "Role"
        where = f"{group}/namespaces/{namespace}" if is_namespaced else group
        plural = "roles" if is_namespaced else "clusterroles"
        status, answer = self.call("POST", f"{where}/{plural}", role)
        assert status in (201, 409), answer
        name = role["metadata"]["name"]
        binding = {
            "metadata": {"name": name},
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io", "kind": role["kind"], "name": name
            },
            "subjects": [
                {"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}
            ],
        }  # fmt: skip
        status, answer = self.call("POST", f"{where}/{plural[:-1]}bindings", binding)
        assert status in (201, 409), answer

    def node(self, name: str, *, kind: str, offers: dict[str, str]) -> None:
        """A node that is ready and can allocate that."""
        labels = {"node.kubernetes.io/instance-type": kind, "kubernetes.io/arch": "amd64"}
        self.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "played",
            "lastHeartbeatTime": now, "lastTransitionTime": now,
        }  # fmt: skip
        change = {"status": {"capacity": offers, "allocatable": offers, "conditions": [ready]}}
        strategic = "application/strategic-merge-patch+json"
        status, answer = self.call("PATCH", f"/api/v1/nodes/{name}/status", change, kind=strategic)
        assert status == 200, answer
        wait_for(lambda: not self.call("GET", f"/api/v1/nodes/{name}")[1]["spec"].get("taints"))


def documented_roles(target: str) -> list[dict[str, Any]]:
    """The Role and the ClusterRole of docs/launch-kubernetes.md, for a target."""
    page = (Path(__file__).parents[3] / "docs/launch-kubernetes.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```yaml\n")[1:]]
    role, reader = (yaml.safe_load(block) for block in blocks if "kind: " in block)
    group, _, plural = {
        "jobset": ("jobset.x-k8s.io", "", "jobsets"),
        "trainjob": ("trainer.kubeflow.org", "", "trainjobs"),
        "pytorchjob": ("kubeflow.org", "", "pytorchjobs"),
    }[target]
    role["rules"][0] |= {"apiGroups": [group], "resources": [plural]}
    return [role, reader]


@contextmanager
def running_control_plane(folder: Path) -> Iterator[ControlPlane]:
    """The control plane with our kinds; all its state is in the folder."""
    programs = binaries()
    etcd, peer, api, manager, scheduler = _free_ports(5)
    made = ControlPlane(port=0, api_port=api, folder=folder)
    proxy = _proxy(made)
    try:
        _start_servers(made, programs, etcd=etcd, peer=peer, manager=manager, scheduler=scheduler)
        for kind in _KINDS:
            _define(made, *kind)
        yield made
    finally:
        proxy.shutdown()
        proxy.server_close()
        for process in reversed(made.processes):
            process.send_signal(signal.SIGTERM)
        for process in made.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _start_servers(
    made: ControlPlane, programs: Path, *, etcd: int, peer: int, manager: int, scheduler: int
) -> None:
    folder, here = made.folder, "http://127.0.0.1"
    program = shutil.which("etcd")
    assert program is not None
    _start(
        made, "etcd", program, f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync",
        f"--listen-client-urls={here}:{etcd}", f"--advertise-client-urls={here}:{etcd}",
        f"--listen-peer-urls={here}:{peer}", f"--initial-advertise-peer-urls={here}:{peer}",
        f"--initial-cluster=default={here}:{peer}",
    )  # fmt: skip
    (folder / "tokens.csv").write_text(
        f'{ADMIN},admin,1,"system:masters"\n{ALICE},alice,2\n'
    )  # fmt: skip
    key, public = folder / "sa.key", folder / "sa.pub"
    for words in (
        ("genrsa", "-out", str(key), "2048"),
        ("rsa", "-in", str(key), "-pubout", "-out", str(public)),
    ):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    _start(
        made, "apiserver", str(programs / "kube-apiserver"), f"--etcd-servers={here}:{etcd}",
        "--bind-address=127.0.0.1", f"--secure-port={made.api_port}",
        "--advertise-address=10.0.0.99", "--endpoint-reconciler-type=none",
        "--service-cluster-ip-range=10.0.0.0/24", f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=Node,RBAC",
        f"--service-account-key-file={public}", f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
    )  # fmt: skip
    wait_for(lambda: made.call("GET", "/readyz")[0] == 200)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "c", "cluster": {"server": f"https://127.0.0.1:{made.api_port}",
                                      "insecure-skip-tls-verify": True}}
        ],
        "users": [{"name": "u", "user": {"token": ADMIN}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }  # fmt: skip
    inside = folder / "inside.kubeconfig"
    inside.write_text(yaml.safe_dump(config))
    shared = (
        f"--kubeconfig={inside}", "--bind-address=127.0.0.1", "--port=0", "--leader-elect=false",
    )  # fmt: skip
    _start(
        made, "manager", str(programs / "kube-controller-manager"), *shared,
        f"--secure-port={manager}", f"--cert-dir={folder / 'manager'}",
        f"--service-account-private-key-file={key}", "--node-monitor-grace-period=24h",
    )  # fmt: skip
    _start(
        made, "scheduler", str(programs / "kube-scheduler"), *shared,
        f"--secure-port={scheduler}", f"--cert-dir={folder / 'scheduler'}",
    )  # fmt: skip
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_for(lambda: made.call("GET", account)[0] == 200)


def _start(made: ControlPlane, name: str, *argv: str) -> None:
    with (made.folder / f"{name}.log").open("wb") as log:
        made.processes.append(
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        )


def _define(
    made: ControlPlane, group: str, version: str, plural: str, kind: str, is_namespaced: bool
) -> None:
    """A kind whose objects may have any field."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version, "served": True, "storage": True,
        "schema": {"openAPIV3Schema": schema},
    }  # fmt: skip
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            # Without it no group that ends in k8s.io may be defined.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced" if is_namespaced else "Cluster",
            "names": {"plural": plural, "singular": plural[:-1], "kind": kind},
            "versions": [served],
        },
    }
    made.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    wait_for(lambda: made.call("GET", f"/apis/{group}/{version}/{plural}")[0] == 200)


def wait_for(is_so: Any, *, patience_s: float = _PATIENCE_S) -> None:
    """Ask until something is so.

    Raises:
        TimeoutError: It did not become so.
    """
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if is_so():
                return
        except (OSError, ssl.SSLError):
            pass
        time.sleep(0.1)
    raise TimeoutError("the control plane did not do what was waited for; its logs say why")


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in held]
    for each in held:
        each.close()
    return ports


def _trusting() -> ssl.SSLContext:
    """The API server's certificate is its own; it is on loopback."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _proxy(made: ControlPlane) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"plane": made})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    made.port = int(server.server_address[1])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


_TRAINJOB = {
    "components": {
        "schemas": {
            "TrainJob": {
                "properties": {"spec": {"properties": {"runtimePatches": {"type": "array"}}}},
                "x-kubernetes-group-version-kind": [{"kind": "TrainJob"}],
            }
        }
    }
}


class _Handler(BaseHTTPRequestHandler):
    plane: ControlPlane
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Tests need no access log."""

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else None
        if self.path.startswith("/openapi/v3/"):
            self._send(200, json.dumps(_TRAINJOB).encode(), "application/json")
            return
        left_out = ("host", "connection", "content-length")
        headers = {key: text for key, text in self.headers.items() if key.lower() not in left_out}
        asked = HTTPSConnection("127.0.0.1", self.plane.api_port, context=_trusting(), timeout=60)
        try:
            asked.request(self.command, self.path, body, headers)
            answer = asked.getresponse()
            content = answer.read()
            self._send(answer.status, content, answer.headers.get("Content-Type") or "text/plain")
        finally:
            asked.close()

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer
