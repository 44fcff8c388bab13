"""The API server through the official client: plain values in and out.

The context is always named, the kubeconfig is read and never written.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shardyard.errors import AccessError, RequestError
from shardyard.io.files import parse_json
from shardyard.launchers.kubernetes.exec import (
    SILENCE_S,
    HandshakeError,
    LostConnectionError,
    open_exec,
    stdout_of,
)
from shardyard.launchers.kubernetes.prerequisites import install_hint
from shardyard.launchers.kubernetes.refusals import (
    RBAC_PAGE,
    ApiUncertainError,
    ExistsError,
    ForbiddenError,
    NodeSilentError,
    NoSuchObjectError,
    api_error,
    size_error,
)

INSTALL_HINT = (
    "Kubernetes is reached through its Python client, which is not installed. "
    "Install it: pip install 'shardyard[kubernetes]'"
)

Object = dict[str, Any]

# Seconds to connect, and seconds without a byte of the answer.
_TIMEOUT_S = (5, 60)
_LOG_TIMEOUT_S = (5, None)
"""A training may be silent for long; the API server ends the stream when the container ends."""
_METADATA = "application/json;as={};g=meta.k8s.io;v=v1"
"""Media type that requests only the metadata."""
_MOST_LOGS = 512
"""Connections kept at once: one a followed pod."""

PLURALS = {
    "ConfigMap": ("v1", "configmaps", True),
    "Job": ("batch/v1", "jobs", True),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", "jobsets", True),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs", True),
    "ClusterTrainingRuntime": ("trainer.kubeflow.org/v1alpha1", "clustertrainingruntimes", False),
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs", True),
    "LocalQueue": ("kueue.x-k8s.io/v1beta2", "localqueues", True),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies", True),
    "PodGroup": ("scheduling.volcano.sh/v1beta1", "podgroups", True),
    "PersistentVolumeClaim": ("v1", "persistentvolumeclaims", True),
    "PersistentVolume": ("v1", "persistentvolumes", False),
    "ResourceQuota": ("v1", "resourcequotas", True),
    "ServiceAccount": ("v1", "serviceaccounts", True),
    "Secret": ("v1", "secrets", True),
    "Service": ("v1", "services", True),
    "Deployment": ("apps/v1", "deployments", True),
    "DaemonSet": ("apps/v1", "daemonsets", True),
    "CSIDriver": ("storage.k8s.io/v1", "csidrivers", False),
    "StorageClass": ("storage.k8s.io/v1", "storageclasses", False),
    "PodMonitor": ("monitoring.coreos.com/v1", "podmonitors", True),
    "PrometheusRule": ("monitoring.coreos.com/v1", "prometheusrules", True),
}
"""Kind: API version, plural, whether it is in a namespace."""
_ALWAYS_SERVED = ("v1", "batch/v1", "apps/v1", "storage.k8s.io/v1", "networking.k8s.io/v1")
"""API versions of every cluster."""


class Api:
    """One cluster, one namespace."""

    def __init__(self, context: str | None, namespace: str, kubeconfig: Path | None = None) -> None:
        """Read the kubeconfig.

        Raises:
            RequestError: No context is given, or the kubeconfig has none of this name.
        """
        self.context, self.namespace = context, namespace
        self._client = _client(context, kubeconfig)

    def create(self, item: Object) -> Object:
        """Create an object; the server rejects unknown fields instead of dropping them.

        Raises:
            ExistsError: There is one of this name.
            RequestError: It is rejected, such as for its size.
        """
        kind = item["kind"]
        query = {"fieldValidation": "Strict"}
        try:
            created: Object = self._json("POST", self._path(kind), kind, body=item, query=query)
        except (RequestError, ApiUncertainError) as error:
            if (too_large := size_error(error, item)) is not None:
                raise too_large from error
            raise
        return created

    def get(self, kind: str, name: str) -> Object | None:
        """One object; None: there is none."""
        try:
            item: Object = self._json("GET", self._path(kind, name), kind)
        except NoSuchObjectError:
            return None
        return item

    def in_namespace(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind in the namespace, or those with these labels."""
        query = {"labelSelector": selector} if selector else {}
        return self._items(self._path(kind), kind, query=query)

    def annotations(self, kind: str, selector: str) -> dict[str, dict[str, str]]:
        """Name -> annotations, of objects with these labels; what they hold is not sent."""
        query, accept = {"labelSelector": selector}, _METADATA.format("PartialObjectMetadataList")
        found = self._items(self._path(kind), kind, query=query, accept=accept)
        metas = [item["metadata"] for item in found]
        return {meta["name"]: meta.get("annotations") or {} for meta in metas}

    def everywhere(self, kind: str) -> list[Object]:
        """All objects of a kind, of all namespaces."""
        return self._items(self._path(kind, namespace=None), kind)

    def patch(self, kind: str, name: str, change: Object, *, uid: str) -> bool:
        """Merge a change into the object of a uid; False: there is none of the name.

        Raises:
            ShardyardError: There is another one of the name, whose uid cannot be changed.
        """
        # The uid is a precondition: the server answers 409 for another object of this name.
        body = {**change, "metadata": {**change.get("metadata", {}), "uid": uid}}
        try:
            self._json("PATCH", self._path(kind, name), kind, body=body)
        except NoSuchObjectError:
            return False
        return True

    def delete(self, kind: str, name: str, *, uid: str) -> bool:
        """Delete the object of a uid with all that depends on it, which gets its grace.

        Returns:
            False: there is none, or another one of the name.
        """
        body = {
            # Foreground: the object stays until its pods are gone, and `status` sees them drain.
            "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Foreground",
            "preconditions": {"uid": uid},
        }  # fmt: skip
        try:
            self._json("DELETE", self._path(kind, name), kind, body=body)
        except (NoSuchObjectError, ExistsError):  # the latter: 409, the precondition failed
            return False
        return True

    def serves(self, kind: str) -> bool:
        """Whether the API server knows a kind in the version that is rendered."""
        version, plural, _ = PLURALS[kind]
        return self._serves(version, plural)

    def _serves(self, version: str, plural: str) -> bool:
        """Whether discovery lists a resource; every user who is logged in may read discovery."""
        try:
            found = self._get(f"/{'api' if version == 'v1' else 'apis'}/{version}")
        except NoSuchObjectError:
            return False
        return any(each["name"] == plural for each in found.get("resources", []))

    def versions_of(self, kind: str) -> list[str]:
        """API versions in which the cluster serves the group of a kind; none: not at all."""
        group = PLURALS[kind][0].partition("/")[0]
        try:
            found = self._get(f"/apis/{group}")
        except NoSuchObjectError:
            return []
        return [str(version["groupVersion"]) for version in found.get("versions", [])]

    def kubernetes_version(self) -> tuple[int, int]:
        """Major and minor version of the API server."""
        found = self._json("GET", "/version", "version")
        minor = str(found["minor"]).rstrip("+")  # EKS writes 33+
        return int(found["major"]), int(minor)

    def has_namespace(self) -> bool:
        """Whether the namespace is there."""
        try:
            self._call("GET", f"/api/v1/namespaces/{quote(self.namespace)}")
        except NoSuchObjectError:
            return False
        return True

    def user(self) -> str | None:
        """Return the user of these credentials; None: the API server does not say (before 1.28).

        Raises:
            AccessError: There are none: the API server takes the request as anonymous.
        """
        kind, version = "SelfSubjectReview", "authentication.k8s.io/v1"
        if not self._serves(version, "selfsubjectreviews"):
            return None
        body = {"apiVersion": version, "kind": kind}
        try:
            found = self._json("POST", f"/apis/{version}/selfsubjectreviews", kind, body=body)
        except ForbiddenError as error:
            if error.is_anonymous:
                raise
            return None  # narrowed rights do not keep anybody from training
        except RequestError:
            return None
        name = found.get("status", {}).get("userInfo", {}).get("username")
        return None if name is None else str(name)

    def fields_of_spec(self, kind: str) -> set[str]:
        """Fields of a kind's spec, as the API server documents them; empty where it does not."""
        version, _, _ = PLURALS[kind]
        try:
            document = self._json("GET", f"/openapi/v3/apis/{version}", kind)
        except RequestError:
            return set()
        for schema in document["components"]["schemas"].values():
            kinds = schema.get("x-kubernetes-group-version-kind", [])
            if any(entry["kind"] == kind for entry in kinds):
                return set(schema["properties"]["spec"]["properties"])
        return set()

    def pods(self, selector: str) -> list[Object]:
        """Pods of the namespace with these labels."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/pods"
        return self._items(path, "Pod", query={"labelSelector": selector})

    def warnings_about(self, uid: str) -> list[str]:
        """Return controllers' warnings about an object, the newest last; empty: none are known.

        Events are kept for an hour, and a role may lack the right to list them.
        """
        path = f"/api/v1/namespaces/{quote(self.namespace)}/events"
        query = {"fieldSelector": f"involvedObject.uid={uid},type=Warning"}
        try:
            found = self._items(path, "Event", query=query)
        except ForbiddenError:
            return []
        # Events of the newer API have eventTime alone.
        found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime", "")))
        return [str(event.get("message", "")) for event in found]

    def nodes(self, selector: str = "") -> list[Object]:
        """Nodes of the cluster with these labels."""
        query = {"labelSelector": selector} if selector else {}
        return self._items("/api/v1/nodes", "Node", query=query)

    def has_secret(self, name: str) -> bool:
        """Return whether there is a Secret; only its metadata is requested, never its values."""
        path = f"/api/v1/namespaces/{quote(self.namespace)}/secrets/{quote(name)}"
        accept = _METADATA.format("PartialObjectMetadata")
        try:
            self._call("GET", path, accept=accept)
        except NoSuchObjectError:
            return False
        return True

    def may(self, verb: str, resource: str, *, group: str = "", everywhere: bool = False) -> bool:
        """Whether these credentials may do something in the namespace, or in the whole cluster."""
        name, _, subresource = resource.partition("/")
        attributes = {
            "verb": verb, "group": group, "resource": name, "subresource": subresource,
            **({} if everywhere else {"namespace": self.namespace}),
        }  # fmt: skip
        kind = "SelfSubjectAccessReview"
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": kind,
            "spec": {"resourceAttributes": attributes},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self._json("POST", path, kind, body=body)["status"]["allowed"])

    def log(self, pod: str, *, container: str, follow: bool) -> Iterator[bytes]:
        """Yield the output of a container so far, in pieces, and later output if ``follow``.

        Raises:
            NodeSilentError: The API server does not reach the pod's node.
        """
        path = f"/api/v1/namespaces/{quote(self.namespace)}/pods/{quote(pod)}/log"
        query = {"container": container, "follow": "true" if follow else "false"}
        try:
            response = self._call("GET", path, query=query, timeout_s=_LOG_TIMEOUT_S)
        except NoSuchObjectError as error:
            if error.name in ("", pod):  # gone since it was listed
                return
            # The 404 is of the node. An empty log would read as if the pod had printed nothing.
            raise self._node_silent(pod, f"node {error.name} is not there") from error
        except ApiUncertainError as error:
            if error.status is None:
                raise
            # The API server has answered, so it is the kubelet that it does not reach.
            raise self._node_silent(pod, error.words) from error
        try:
            yield from response.stream(2**16)
        except _transport_errors():
            return  # the node or the pod is gone; `follow_logs` looks again
        finally:
            response.close()

    def _node_silent(self, pod: str, words: str) -> NodeSilentError:
        return NodeSilentError(
            f"context {self.context!r}, namespace {self.namespace!r}: the log of pod {pod} cannot "
            f"be read, as the API server does not reach the kubelet of its node ({words}). Look at "
            f"the node: kubectl --context {self.context} get nodes"
        )

    def exec(
        self,
        pod: str,
        *,
        container: str,
        command: Sequence[str],
        silence_s: float = SILENCE_S,
    ) -> Iterator[bytes]:
        """Run a command in a container; yields its stdout, in pieces.

        Args:
            command: Program and arguments; no shell reads them.
            silence_s: Time without a byte until a ping checks the connection.

        Raises:
            LostConnectionError: The pod is gone, or the connection broke before the end.
            CommandError: The command failed.
            AccessError: These credentials may not.
        """
        path = f"/api/v1/namespaces/{quote(self.namespace)}/pods/{quote(pod)}/exec"
        where = f"context {self.context!r}, namespace {self.namespace!r}, pod {pod}"
        try:
            connection = open_exec(self._client, path, container=container, command=command)
        except HandshakeError as error:
            if error.status == 403:
                raise AccessError(
                    f"{where}: {error.words}. Files of a pod are read through pods/exec, and your "
                    "role lacks that right. Have an administrator grant get and create on "
                    "pods/exec; docs/launch-kubernetes.md lists all that is needed.",
                    page=RBAC_PAGE,
                ) from error
            if error.status == 401:
                raise AccessError(
                    f"{where}: the API server does not accept your credentials. Log in again, "
                    f"then see that kubectl --context {self.context} auth whoami answers.",
                    page=RBAC_PAGE,
                ) from error
            raise LostConnectionError(f"{where}: {error.words}") from error
        yield from stdout_of(connection, silence_s=silence_s)

    def _path(self, kind: str, name: str = "", *, namespace: str | None = "own") -> str:
        version, plural, is_namespaced = PLURALS[kind]
        parts = ["", "api" if version == "v1" else "apis", *version.split("/")]
        if is_namespaced and namespace is not None:
            parts += ["namespaces", quote(self.namespace)]
        return "/".join([*parts, plural, *([quote(name)] if name else [])])

    def _get(self, path: str) -> Any:
        """Return the parsed answer of discovery and similar requests."""
        return _parsed(self._call("GET", path))

    def _items(
        self, path: str, kind: str, *, query: Object | None = None, accept: str = "application/json"
    ) -> list[Object]:
        """The objects of a list; an empty one comes without items from some servers."""
        items: list[Object] = self._json("GET", path, kind, query=query, accept=accept).get(
            "items", []
        )
        return items

    def _json(
        self,
        method: str,
        path: str,
        kind: str,
        *,
        query: Object | None = None,
        body: Any = None,
        accept: str = "application/json",
    ) -> Any:
        try:
            response = self._call(method, path, query=query, body=body, accept=accept)
        except ForbiddenError as error:
            # Rights are looked at before anything else: 403 also answers for what is not served.
            version, _, _ = PLURALS.get(kind, ("v1", "", True))
            if version not in _ALWAYS_SERVED and not self.serves(kind):
                raise self._not_served(kind) from error
            raise
        except NoSuchObjectError as error:
            if error.is_kind_unknown:
                raise self._not_served(kind) from error
            if f'namespaces "{self.namespace}"' in str(error):
                raise RequestError(
                    f"launch.kubernetes.namespace={self.namespace!r} is not in context "
                    f"{self.context!r}. Objects are created in a namespace that exists. Create it: "
                    f"kubectl --context {self.context} create namespace {self.namespace}"
                ) from error
            raise
        return _parsed(response)

    def _not_served(self, kind: str) -> RequestError:
        return RequestError(
            f"context {self.context!r}: the cluster does not serve {kind} "
            f"({PLURALS.get(kind, ('v1',))[0]}). {install_hint(kind, self.context)}"
        )

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Object | None = None,
        body: Any = None,
        accept: str = "application/json",
        timeout_s: tuple[int, int | None] = _TIMEOUT_S,
    ) -> Any:
        from kubernetes.client.exceptions import ApiException

        # Custom resources take no strategic merge patch.
        content = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            return self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": accept, "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
                # Left unread: logs are streamed, and JSON is parsed within our own limits.
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=timeout_s,
            )
        except ApiException as error:
            raise api_error(error, context=self.context, namespace=self.namespace) from error
        except _transport_errors() as error:
            raise ApiUncertainError(
                f"context {self.context!r}: the API server does not answer "
                f"({self._client.configuration.host}; {_cause(error)}). Check the network, the VPN "
                "and that the cluster still exists, then try again."
            ) from error


def _parsed(response: Any) -> Any:
    """The answer without nulls: for Kubernetes a field that is null is a field that is absent."""
    return _without_nulls(parse_json(response.data))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _client(context: str | None, kubeconfig: Path | None) -> Any:
    try:
        from kubernetes import client, config
        from kubernetes.config.config_exception import ConfigException
    except ImportError as error:
        raise RequestError(INSTALL_HINT) from error
    file = str(kubeconfig) if kubeconfig else os.environ.get("KUBECONFIG") or None
    if context is None:
        raise RequestError(
            "launch.kubernetes.context is not given. The kubeconfig's current context is never "
            "assumed: a run in the wrong cluster costs money. Take one that kubectl config "
            f"get-contexts shows{_list_contexts(file)}."
        )
    settings = client.Configuration()
    settings.retries = 0  # a cluster that is down is reported at once
    settings.connection_pool_maxsize = _MOST_LOGS
    try:
        # persist_config would write renewed tokens into the kubeconfig
        return config.new_client_from_config(
            config_file=file, context=context, persist_config=False, client_configuration=settings
        )
    except (ConfigException, OSError, ValueError, KeyError, TypeError) as error:
        where = file or "~/.kube/config"
        if not Path(where).expanduser().exists():
            why = f"no kubeconfig {where}"
        elif known := _list_contexts(file):
            why = f"kubeconfig {where} has no such context, or not all of it{known}"
        else:
            why = f"kubeconfig {where} cannot be read ({_first_line(error)})"
        raise RequestError(
            f"launch.kubernetes.context={context!r} cannot be used: {why}. Correct the name, set "
            "KUBECONFIG, or add the cluster (EKS: aws eks update-kubeconfig)."
        ) from error


def _list_contexts(file: str | None) -> str:
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, _ = config.list_kube_config_contexts(config_file=file)
    except (ConfigException, OSError, ValueError, KeyError, TypeError):
        return ""
    return f"; it has {', '.join(str(entry['name']) for entry in contexts)}"


def _transport_errors() -> tuple[type[Exception], ...]:
    from urllib3.exceptions import HTTPError

    return (HTTPError, ConnectionError, TimeoutError)


def _cause(error: Exception) -> str:
    cause = getattr(error, "reason", None) or error
    return _first_line(cause).rpartition("object at")[2].partition(">: ")[2] or _first_line(cause)


def _first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
