"""Controllers and a kubelet for the API server of tests: what stands there runs, in podman.

JobSets and plain Jobs, as far as ours use them: a pod for each index; a lost pod of a Job is made
again as often as `backoffLimit` says, a deleted object's pods are ended. `exec` goes into the pod.
"""

import base64
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, exited
from tests.launchers.kubernetes.pods import Podman, pod_of_job, pod_of_jobset

_POLL_S = 0.1
_PATIENCE_S = 600.0
_NAMESPACE = "/api/v1/namespaces/default"
_CONTAINER = "node"

Pod = dict[str, Any]


@dataclass
class _Job:
    """One JobSet or Job, and its pods."""

    item: dict[str, Any]
    pods: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    """Pod -> exit code, of those that have ended."""

    @property
    def name(self) -> str:
        return str(self.item["metadata"]["name"])

    @property
    def is_set(self) -> bool:
        return bool(self.item["kind"] == "JobSet")

    def next_pods(self) -> list[Pod]:
        """Pods that are to be made now: all of them, or one in the place of one that was lost."""
        if not self.is_set:
            lost = len(self.codes) == len(self.pods) and all(map(self._is_loss, self.pods))
            again = lost and len(self.pods) <= self.item["spec"]["backoffLimit"]
            return [pod_of_job(self.item, len(self.pods))] if again else []
        num_pods = self.item["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
        ranks = () if self.pods else range(num_pods)
        return [pod_of_jobset(self.item, rank, start=1) for rank in ranks]

    def _is_loss(self, pod: str) -> bool:
        (rule,) = self.item["spec"]["podFailurePolicy"]["rules"]
        return self.codes[pod] not in (0, *rule["onExitCodes"]["values"])

    def condition(self) -> dict[str, str] | None:
        """Once it is over: how it ended."""
        if not self.pods or len(self.codes) < len(self.pods) or self.next_pods():
            return None
        code = max(self.codes.values()) if self.is_set else self.codes[self.pods[-1]]
        done = "Completed" if self.is_set else "Complete"
        kind = "Failed" if code else done
        return {"type": kind, "status": "True", "message": f"exit code {code}"}


class PodCluster:
    """A cluster whose API is ``server`` and whose one machine is ``podman``."""

    def __init__(
        self, server: ApiServer, podman: Podman, *, with_files: Callable[[Pod], Pod]
    ) -> None:
        self.server, self.podman, self._with_files = server, podman, with_files
        self._jobs: dict[str, _Job] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controllers")
        server.execs.start = self._exec

    def add_secret(self, name: str, **values: str) -> None:
        """As `kubectl create secret generic` makes it."""
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.podman.run("secret", "create", name, "-", data=json.dumps(data).encode())
        self.server.add(f"{_NAMESPACE}/secrets/{name}", data=data)

    def __enter__(self) -> "PodCluster":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _exec(self, pod: str, container: str, words: list[str]) -> list[str]:
        environ = [f"{name}={value}" for name, value in self.podman.settings.items()]
        return ["env", *environ, "podman", "exec", f"{pod}-{container}", *words]

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            there = {
                path: item
                for path, item in list(self.server.objects.items())
                if "/jobsets/" in path or "/jobs/" in path
            }
            for path, item in there.items():
                job = self._jobs.setdefault(path, _Job(item))
                for pod in job.next_pods():
                    self._play(job, pod)
                if (condition := job.condition()) is not None:
                    item["status"] = {"conditions": [condition]}
            for path in self._jobs.keys() - there.keys():
                gone = self._jobs.pop(path)
                for name in gone.pods:
                    self.podman.delete(name)
                    self.server.objects.pop(f"{_NAMESPACE}/pods/{name}", None)

    def _play(self, job: _Job, pod: Pod) -> None:
        name = str(pod["metadata"]["name"])
        recipe = next(each for each in pod["spec"]["volumes"] if each["name"] == "recipe")
        config = self.server.objects[f"{_NAMESPACE}/configmaps/{recipe['configMap']['name']}"]
        played = {"apiVersion": "v1", "kind": "ConfigMap", **config}
        rank = int(pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index", 0))
        job.pods.append(name)
        self.podman.play(played, self._with_files(pod), domain=job.name if job.is_set else "")
        output = self.server.add_pod(name, job=job.name, rank=rank, status=RUNNING, lines=[])
        item = self.server.objects[f"{_NAMESPACE}/pods/{name}"]
        item["metadata"]["labels"] = pod["metadata"]["labels"]

        def follow() -> None:
            output.lines.extend(self.podman.follow(f"{name}-{_CONTAINER}"))
            try:
                code = self.podman.wait(f"{name}-{_CONTAINER}", timeout_s=_PATIENCE_S)
            except AssertionError:
                return  # deleted meanwhile: nobody asks how it ended
            item["status"] = exited(code)
            output.ended.set()
            job.codes[name] = code

        threading.Thread(target=follow, name=f"log of {name}", daemon=True).start()
