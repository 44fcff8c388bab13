"""A small API server: the few REST paths that the launcher uses, on a real socket.

Kubernetes' own one cannot be had here. Objects live in a dictionary by path; nothing runs, so tests
say what pods there are and what they print. Refusals have the form of a real server's Status.
"""

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import yaml

from tests.launchers.kubernetes.exec_endpoint import Execs, answer_exec

TOKEN = "kubeconfig-token-51c0ffee"

KINDS = {
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
    "trainjobs": ("trainer.kubeflow.org/v1alpha1", "TrainJob"),
    "clustertrainingruntimes": ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"),
    "pytorchjobs": ("kubeflow.org/v1", "PyTorchJob"),
    "networkpolicies": ("networking.k8s.io/v1", "NetworkPolicy"),
    "podgroups": ("scheduling.volcano.sh/v1beta1", "PodGroup"),
    "localqueues": ("kueue.x-k8s.io/v1beta2", "LocalQueue"),
    "podmonitors": ("monitoring.coreos.com/v1", "PodMonitor"),
    "prometheusrules": ("monitoring.coreos.com/v1", "PrometheusRule"),
}
BUILT_IN = {
    "configmaps", "daemonsets", "deployments", "events", "namespaces", "nodes",
    "persistentvolumeclaims", "pods", "resourcequotas", "serviceaccounts", "jobs",
}  # fmt: skip


@dataclass
class Output:
    """What a pod prints; ``ended`` closes the stream of those who follow."""

    lines: list[str]
    ended: threading.Event = field(default_factory=threading.Event)


class ApiServer:
    """State of the server, which tests read and change."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.namespaces = {"default", "team"}
        self.served = set(KINDS)
        self.other_versions: dict[str, str] = {}
        """API group -> the one version in which it is served instead of ours."""
        self.reviews = ["selfsubjectreviews", "tokenreviews"]
        """Resources of authentication.k8s.io/v1; the first came with 1.28."""
        self.version = {"major": "1", "minor": "33+"}
        self.trainjob_fields = ["runtimeRef", "trainer", "runtimePatches"]
        self.outputs: dict[str, Output] = {}
        self.refusals: dict[tuple[str, str], tuple[int, str]] = {}
        """(method, end of the path) -> what is answered instead."""
        self.missing: dict[str, str] = {}
        """End of a path -> name of what is answered to be missing."""
        self.execs = Execs()
        self.forbidden: set[str] = set()
        """Resources of which an access review says no."""
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.queries: list[str] = []
        self.port = 0

    def names(self, plural: str) -> list[str]:
        """Objects of a kind."""
        return [path.rpartition("/")[2] for path in self.objects if f"/{plural}/" in path]

    def only(self, plural: str) -> dict[str, Any]:
        """The one object of a kind."""
        (found,) = [item for path, item in self.objects.items() if f"/{plural}/" in path]
        return found

    def add(self, path: str, **content: Any) -> None:
        """Any object, by its path."""
        meta = content.pop("metadata", {})
        name = path.rpartition("/")[2]
        self.objects[path] = {"metadata": {"name": name, **meta}, **content}

    def add_pod(
        self, name: str, *, job: str, rank: int, status: dict[str, Any], lines: list[str]
    ) -> Output:
        """A pod as JobSet makes it, and what it prints."""
        self.objects[f"/api/v1/namespaces/default/pods/{name}"] = {
            "metadata": {
                "name": name,
                "uid": f"uid-of-{name}",
                "creationTimestamp": f"2026-01-01T00:00:{len(self.objects):02}Z",
                "labels": {
                    "jobset.sigs.k8s.io/jobset-name": job,
                    "batch.kubernetes.io/job-completion-index": str(rank),
                },
            },
            "status": status,
        }
        self.outputs[name] = Output(lines)
        return self.outputs[name]


RUNNING: dict[str, Any] = {
    "phase": "Running",
    "containerStatuses": [{"name": "node", "restartCount": 0, "state": {"running": {}}}],
}


def exited(code: int, at: str = "2026-01-01T00:10:00Z") -> dict[str, Any]:
    """Status of a pod whose container has ended."""
    end = {"exitCode": code, "finishedAt": at}
    phase = "Succeeded" if code == 0 else "Failed"
    return {
        "phase": phase,
        "containerStatuses": [{"name": "node", "restartCount": 0, "state": {"terminated": end}}],
    }


@contextmanager
def running_server(folder: Path) -> Iterator[tuple[ApiServer, Path]]:
    """The server on a free port, and a kubeconfig whose context ``test`` names it."""
    state = ApiServer()
    handler = type("Handler", (_Handler,), {"state": state})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state, write_kubeconfig(folder, state.port)
    finally:
        for output in state.outputs.values():
            output.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(folder: Path, port: int) -> Path:
    """A kubeconfig with the contexts ``test`` and ``production``."""
    path = folder / "kubeconfig"
    address = f"http://127.0.0.1:{port}"
    contexts = [
        {"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("test", "production")
    ]
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "production",
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "users": [{"name": "u", "user": {"token": TOKEN}}],
        "contexts": contexts,
    }
    path.write_text(yaml.safe_dump(content))
    return path


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who follows a log and hangs up is no error; its traceback would be in others' output."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    state: ApiServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else head and body of an answer are 40 ms apart

    def log_message(self, *_: object) -> None:
        """Tests need no access log."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        state = self.state
        state.requests.append((method, url.path))
        state.tokens.add(self.headers.get("Authorization"))
        state.queries.append(url.query)
        for (refused, end), (code, message) in state.refusals.items():
            if refused == method and url.path.endswith(end):
                self._status(code, message)
                return
        for end, name in state.missing.items():
            if url.path.endswith(end):
                self._status(404, f'pods "{name}" not found', name=name)
                return
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path.endswith("/exec"):
            self._exec(url.path, url.query)
        elif url.path.endswith("/log"):
            self._log(url.path.split("/")[-2], query)
        elif url.path.startswith("/openapi/"):
            self._openapi()
        elif url.path == "/version":
            self._json(200, state.version)
        elif re.fullmatch(r"/apis/[^/]+", url.path):
            self._group(url.path.removeprefix("/apis/"))
        elif re.fullmatch(r"/apis/[^/]+/[^/]+", url.path):
            self._discovery(url.path.removeprefix("/apis/"))
        else:
            self._object(method, url.path, query, body)

    def _object(self, method: str, path: str, query: dict[str, str], body: Any) -> None:
        objects = self.state.objects
        plural = next((part for part in path.split("/") if part in KINDS), None)
        namespace = re.search(r"/namespaces/([^/]+)/", path)
        if plural is not None and not self._serves(plural):
            self._send(404, b"404 page not found\n", "text/plain")
        elif path.endswith("/selfsubjectreviews"):
            self._json(201, {"status": {"userInfo": {"username": "alice"}}})
        elif path.startswith("/api/v1/namespaces/") and path.count("/") == 4:
            name = path.rpartition("/")[2]
            if name in self.state.namespaces:
                self._json(200, {"metadata": {"name": name}})
            else:
                self._status(404, f'namespaces "{name}" not found', name=name)
        elif path.endswith("/selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            names = {asked["resource"], f"{asked['resource']}/{asked.get('subresource')}"}
            self._json(201, {"status": {"allowed": not names & self.state.forbidden}})
        elif method == "POST":
            self._create(path, body, namespace.group(1) if namespace else None)
        elif path in objects and method == "GET":
            self._json(200, objects[path])
        elif path in objects and _is_of_another_uid(objects[path], body):
            self._status(409, "Precondition failed: UID in precondition", name="x")
        elif path in objects and method == "PATCH":
            _merge(objects[path], body)
            self._json(200, objects[path])
        elif path in objects and method == "DELETE":
            self._json(200, objects.pop(path))
        elif method == "GET" and path.split("/")[-1] in {*KINDS, *BUILT_IN}:
            found = self._matching(path, query.get("labelSelector", ""))
            # An empty list of metadata is null in the answer of a real one, which is no list.
            is_metadata = "PartialObjectMetadataList" in self.headers.get("Accept", "")
            self._json(200, {"items": found or (None if is_metadata else [])})
        else:
            name = path.split("/")[-1]
            self._status(404, f'{path.split("/")[-2]} "{name}" not found', name=name)

    def _create(self, path: str, body: Any, namespace: str | None) -> None:
        name = body["metadata"]["name"]
        if namespace is not None and namespace not in self.state.namespaces:
            self._status(404, f'namespaces "{namespace}" not found', name=namespace)
        elif f"{path}/{name}" in self.state.objects:
            self._status(409, f'{path.split("/")[-1]} "{name}" already exists', name=name)
        else:
            body["metadata"]["uid"] = str(uuid4())
            self.state.objects[f"{path}/{name}"] = body
            self._json(201, body)

    def _matching(self, path: str, selector: str) -> list[dict[str, Any]]:
        wanted = _wanted(selector)
        plural = path.split("/")[-1]
        found = []
        for where, item in self.state.objects.items():
            is_kind = where.startswith(f"{path}/") or (
                "/namespaces/" not in path and f"/{plural}/" in where
            )
            labels = item["metadata"].get("labels", {})
            if is_kind and all(labels.get(label) in values for label, values in wanted.items()):
                found.append(item)
        return found

    def _serves(self, plural: str) -> bool:
        group = KINDS[plural][0].partition("/")[0]
        return plural in self.state.served and group not in self.state.other_versions

    def _group(self, group: str) -> None:
        ours = [v for n, (v, _) in KINDS.items() if v.startswith(f"{group}/") and self._serves(n)]
        other = self.state.other_versions.get(group)
        versions = [f"{group}/{other}"] if other else ours[:1]
        if versions:
            self._json(200, {"versions": [{"groupVersion": version} for version in versions]})
        else:
            self._send(404, b"404 page not found\n", "text/plain")

    def _discovery(self, version: str) -> None:
        if version == "authentication.k8s.io/v1":
            self._json(200, {"resources": [{"name": name} for name in self.state.reviews]})
            return
        names = [n for n, (v, _) in KINDS.items() if v == version and self._serves(n)]
        if not names:
            self._send(404, b"404 page not found\n", "text/plain")
            return
        self._json(200, {"resources": [{"name": n, "kind": KINDS[n][1]} for n in names]})

    def _openapi(self) -> None:
        fields = {name: {"type": "object"} for name in self.state.trainjob_fields}
        schema = {
            "properties": {"spec": {"properties": fields}},
            "x-kubernetes-group-version-kind": [{"kind": "TrainJob"}],
        }
        self._json(200, {"components": {"schemas": {"TrainJob": schema}}})

    def _exec(self, path: str, query: str) -> None:
        pod = self.state.objects.get(path.removesuffix("/exec"))
        name = path.split("/")[-2]
        if pod is None:
            self._status(404, f'pods "{name}" not found', name=name)
        else:
            answer_exec(self, name, query, self.state.execs)

    def _log(self, pod: str, query: dict[str, str]) -> None:
        output = self.state.outputs.get(pod)
        if output is None:
            self._status(404, f'pods "{pod}" not found', name=pod)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = 0
        while True:
            is_last = query["follow"] == "false" or output.ended.is_set()
            for line in output.lines[sent:]:
                data = line.encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                sent += 1
            if is_last:
                break
            output.ended.wait(0.01)
        self.wfile.write(b"0\r\n\r\n")

    def _status(self, code: int, message: str, *, name: str | None = None) -> None:
        details = {"name": name} if name else {}
        status = {"kind": "Status", "code": code, "message": message, "details": details}
        self._json(code, status)

    def _json(self, code: int, body: Any) -> None:
        self._send(code, json.dumps(body).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _wanted(selector: str) -> dict[str, set[str]]:
    """``a=b,c in (d,e)`` as the values that each label may have."""
    found: dict[str, set[str]] = {}
    for part in re.split(r",(?![^(]*\))", selector) if selector else []:
        label, _, values = part.replace(" in ", "=").partition("=")
        found[label] = set(values.strip("()").split(","))
    return found


def _is_of_another_uid(item: dict[str, Any], body: Any) -> bool:
    """Whether a DELETE's precondition fails, or a PATCH would change what cannot be changed."""
    wanted = [(body or {}).get(key, {}).get("uid") for key in ("preconditions", "metadata")]
    return any(uid not in (None, item["metadata"].get("uid")) for uid in wanted)


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    """RFC 7386."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value
