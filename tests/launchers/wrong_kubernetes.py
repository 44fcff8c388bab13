"""Wrong situations on Kubernetes: the official client against a server on a real socket."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, exited
from tests.launchers.kubernetes.requests import IMAGE
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("kubernetes")
row = SITUATIONS.row

_ZONE = "topology.kubernetes.io/zone"
_IN_DEFAULT = "/api/v1/namespaces/default"
_RENTED = (
    "cluster.device=auto", "cluster.devices=auto", "cluster.instance=p5.48xlarge",
    "optim.global_batch=16",
)  # fmt: skip
_PYTORCHJOB = ("launch.kubernetes.target=pytorchjob", "elastic.min_nodes=1", "elastic.max_nodes=4")


class KubernetesDesk(Desk):
    """A laptop with a kubeconfig, and a cluster that has all that a run needs."""

    on = "kubernetes"
    recipe = (
        "model.preset=llama-tiny", "data.source=/data/text", "run.steps=10",
        "optim.global_batch=8", "cluster.device=cpu", "cluster.devices=2", "cluster.nodes=2",
        f"launch.image={IMAGE}", "launch.run_dir=/runs",
        "launch.volumes=[{path: /runs, claim: runs}, {path: /data, claim: data}]",
        "launch.kubernetes.context=test",
    )  # fmt: skip
    server: ApiServer
    kubeconfig: Path

    def connect(self, server: ApiServer, kubeconfig: Path) -> None:
        """Know the cluster, and fill it."""
        self.server, self.kubeconfig = server, kubeconfig
        self.environ.setenv("KUBECONFIG", str(kubeconfig))
        for name in ("n0", "n1"):
            self.add_node(name)
        for claim in ("runs", "data"):
            spec = {"accessModes": ["ReadWriteMany"], "volumeName": "pv"}
            server.add(f"{_IN_DEFAULT}/persistentvolumeclaims/{claim}", spec=spec)
        expression = {"key": _ZONE, "operator": "In", "values": ["a"]}
        terms = [{"matchExpressions": [expression]}]
        affinity = {"required": {"nodeSelectorTerms": terms}}
        server.add("/api/v1/persistentvolumes/pv", spec={"nodeAffinity": affinity})
        server.add(f"{_IN_DEFAULT}/serviceaccounts/default")

    def add_node(self, name: str, *, zone: str = "a", gpus: int = 8, efa: int = 32) -> None:
        """A p5.48xlarge."""
        labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", _ZONE: zone}
        allocatable = {
            "nvidia.com/gpu": str(gpus), "vpc.amazonaws.com/efa": str(efa),
            "cpu": "191450m", "memory": "1938410Mi", "hugepages-2Mi": "5120Mi",
        }  # fmt: skip
        self.server.add(
            f"/api/v1/nodes/{name}",
            metadata={"labels": labels},
            status={"allocatable": allocatable},
        )

    def outside(self) -> set[str]:
        """Objects that were posted, which the server has given a uid; pods are not ours."""
        found = self.server.objects.items()
        posted = [path for path, item in found if "uid" in item["metadata"]]
        return {path.rpartition("/")[2] for path in posted if "/pods/" not in path}

    def refused(self, code: int, words: str, *settings: str) -> int:
        """Launch where the API server refuses the job."""
        plural = "pytorchjobs" if settings else "jobsets"
        self.server.refusals["POST", f"/{plural}"] = (code, words)
        return self.launch(*settings)

    def all_refused(self, code: int, words: str) -> None:
        """The API server refuses whatever it is asked."""
        for method in ("GET", "POST", "PATCH", "DELETE"):
            self.server.refusals[method, ""] = (code, words)

    def take_down(self) -> None:
        """Nobody listens where the kubeconfig points to."""
        text = self.kubeconfig.read_text()
        self.kubeconfig.write_text(text.replace(f":{self.server.port}", ":9"))

    def end_job(self, exit_code: int, *, plural: str = "jobsets") -> None:
        """The job's pods end, and with them the job."""
        self.server.add_pod("p-0", job="first", rank=0, status=exited(exit_code), lines=["the end"])
        self.server.outputs["p-0"].ended.set()
        condition = {"type": "Failed", "status": "True", "message": "jobset failed"}
        self.server.only(plural)["status"] = {"conditions": [condition]}


@row(
    "context not given", 2, says="launch.kubernetes.context: is not given", do="it has test, produ"
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.context=null")


@row(
    "unknown context and another problem",
    2,
    says="launch.image: is not set, and kubernetes runs containers",
    do="launch.kubernetes.context='tset' cannot be used",
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.context=tset", "launch.image=null")


@row(
    "no rights and another problem",
    2,
    says="you may not create configmaps, get configmaps",
    do="launch.image: is not set, and kubernetes runs containers",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.forbidden = {"configmaps"}
    return desk.launch("launch.image=null")


@row("unknown context", 2, says="launch.kubernetes.context='tset'", do="it has test, production")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.context=tset")


@row("no kubeconfig", 2, says="cannot be used: no kubeconfig", do="aws eks update-kubeconfig")
def _(desk: KubernetesDesk) -> int:
    desk.environ.setenv("KUBECONFIG", str(desk.folder / "none"))
    return desk.launch()


@row("API server down", 3, says="the API server does not answer", do="Check the network, the VPN")
def _(desk: KubernetesDesk) -> int:
    desk.take_down()
    return desk.launch()


@row("credentials expired", 4, says="does not accept your credentials", do="aws sso login")
def _(desk: KubernetesDesk) -> int:
    desk.all_refused(401, "Unauthorized")
    return desk.launch()


@row("no right to create the job", 4, says='User "u" cannot create', do="Have an administrator")
def _(desk: KubernetesDesk) -> int:
    return desk.refused(403, 'jobsets is forbidden: User "u" cannot create resource "jobsets"')


@row("quota of the namespace used up", 3, says="exceeded quota: gpus", do="Wait for other jobs")
def _(desk: KubernetesDesk) -> int:
    return desk.refused(403, 'jobsets "first" is forbidden: exceeded quota: gpus')


@row(
    "admission webhook denies it",
    2,
    says='admission webhook "policy.example" denied the request: no owner label',
    do="Change what the policy names",
)
def _(desk: KubernetesDesk) -> int:
    words = 'admission webhook "policy.example" denied the request: no owner label'
    return desk.refused(403, words)


@row("object that the API server calls invalid", 2, says="(422)", do="launch --dry-run prints")
def _(desk: KubernetesDesk) -> int:
    return desk.refused(422, 'JobSet "first" is invalid: spec: Forbidden')


@row("API server throttles", 3, says="answered 429", do="Try again in a minute")
def _(desk: KubernetesDesk) -> int:
    return desk.refused(429, "too many requests")


@row("answer lost while it is created", 3, says="answered 504", do="`shardyard teardown")
def _(desk: KubernetesDesk) -> int:
    return desk.refused(504, "gateway timeout")


@row(
    "submission died between intent and confirmation",
    0,
    says="removed: ConfigMap",
    do="all objects of run first are removed",
)
def _(desk: KubernetesDesk) -> int:
    desk.refused(504, "gateway timeout")
    desk.server.refusals.clear()
    assert desk.steer("status") == 2
    return desk.steer("teardown", "--yes")


@row(
    "job of that name is somebody's",
    2,
    says="JobSet first exists already",
    do="give another run.id",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.add("/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/first")
    return desk.launch()


@row("controller absent", 2, says="does not serve JobSet", do="doctor RECIPE --on kubernetes --ins")
def _(desk: KubernetesDesk) -> int:
    desk.server.served = set()
    return desk.launch()


@row(
    "controller of another version",
    2,
    says="serves JobSet as jobset.x-k8s.io/v1",
    do="Ask the cluster's administrator to replace it",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.other_versions["jobset.x-k8s.io"] = "v1"
    return desk.launch()


@row(
    "TrainJob with fields of another version",
    2,
    says="has neither runtimePatches",
    do="Ask the cluster's administrator to replace it: helm upgrade",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.trainjob_fields = ["runtimeRef", "trainer"]
    return desk.launch("launch.kubernetes.target=trainjob")


@row(
    "runtime of a TrainJob that is there with other content",
    2,
    says="is there with other content",
    do="Give launch.kubernetes.runtime another name",
)
def _(desk: KubernetesDesk) -> int:
    trainjob = "launch.kubernetes.target=trainjob"
    desk.launched(trainjob)
    return desk.launch(trainjob, "launch.kubernetes.max_restarts=9", "run.id=second")


@row(
    "no right to create a runtime",
    4,
    says="and you may not create it",
    do="have an administrator apply it once",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.refusals["POST", "/clustertrainingruntimes"] = (403, "forbidden")
    return desk.launch("launch.kubernetes.target=trainjob")


@row("namespace missing", 2, says="launch.kubernetes.namespace='lost'", do="create namespace lost")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.namespace=lost")


@row("image not given", 2, says="launch.image: is not set", do="`shardyard image build`")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.image=null")


@row("image by tag", 0, says="warning: launch.image=a/b:c is a tag", do="Give it by digest")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.image=a/b:c", "--dry-run")


@row("folder of the node as a volume", 2, says="is a folder of the node", do="Use a claim")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.volumes=[{path: /runs, host: /mnt}, {path: /data, claim: data}]")


@row("run folder on no volume", 2, says="is on none of launch.volumes", do="Mount a claim")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.run_dir=/elsewhere")


@row(
    "secret where no pod can read it",
    2,
    says="cannot read HF_TOKEN from your shell",
    do="k8s:",
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("secrets.HF_TOKEN=env")


@row(
    "variable of the scheduler overwritten",
    2,
    says="launch.env.MASTER_ADDR: is set by",
    do="Remove",
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.env={MASTER_ADDR: here}")


@row("range of nodes on a JobSet", 2, says="elastic.min_nodes=1", do="target=pytorchjob")
def _(desk: KubernetesDesk) -> int:
    return desk.launch("elastic.min_nodes=1", "elastic.max_nodes=4")


@row("autoscaler on CPU use (elasticPolicy.metrics)", 2, says="metrics", do="max_restarts")
def _(desk: KubernetesDesk) -> int:
    return desk.launch(*_PYTORCHJOB, "launch.kubernetes.metrics=[cpu]")


@row("name too long", 2, says="is too long for a JobSet of 2 nodes", do="Use at most 48 characters")
def _(desk: KubernetesDesk) -> int:
    return desk.launch(f"run.id={'n' * 60}")


@row(
    "name that no object can have", 2, says="queue='Team_A' is not a name", do="as kubectl shows it"
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.queue=Team_A")


@row("more EFA interfaces than there are", 2, says="launch.kubernetes.efa=99", do="Use at most 32")
def _(desk: KubernetesDesk) -> int:
    return desk.launch(*_RENTED, "launch.kubernetes.efa=99")


@row("run launched twice", 2, says="as kubernetes job", do="continue it with `shardyard resume")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    return desk.launch()


@row("cancelled twice", 0, says="is over already: cancelled", do="")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    assert desk.steer("cancel") == 0
    return desk.steer("cancel")


@row("cancelled after the end", 0, says="is over already: failed", do="")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    desk.end_job(2)
    return desk.steer("cancel")


@row("more nodes than the range has", 2, says="launched for 1 to 4 nodes", do="elastic.max_nodes=9")
def _(desk: KubernetesDesk) -> int:
    desk.launched(*_PYTORCHJOB)
    return desk.steer("scale", "9")


@row(
    "scaled after the end", 2, says="is over (failed), so it cannot be scaled", do="continues with"
)
def _(desk: KubernetesDesk) -> int:
    desk.launched(*_PYTORCHJOB)
    desk.end_job(2, plural="pytorchjobs")
    return desk.steer("scale", "3")


@row(
    "job deleted behind our back", 1, says="gone", do="continues from the newest durable checkpoint"
)
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    del desk.server.objects["/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/first"]
    return desk.steer("watch")


@row("run that drained", 143, says="(exit code 143)", do="continues from the newest durable")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    desk.end_job(143)
    return desk.steer("watch")


@row("Ctrl-C while it is watched", 130, says="watching ended, the job continues", do="stops it")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    desk.server.add_pod("p-0", job="first", rank=0, status=RUNNING, lines=["step 1"])

    def interrupt() -> None:
        while not any(path.endswith("/log") for _, path in desk.server.requests):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    return desk.steer("watch")


@row("teardown twice", 0, says="all objects of run first are removed", do="stays")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    assert desk.steer("teardown", "--yes", "--force") == 0
    return desk.steer("teardown", "--yes")


@row("teardown with the API server down", 3, says="does not answer", do="try again")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    desk.take_down()
    return desk.steer("teardown", "--yes", "--force")


@row("teardown without the right", 4, says="cannot delete", do="Have an administrator")
def _(desk: KubernetesDesk) -> int:
    desk.launched()
    refusal = 'jobsets "first" is forbidden: User "u" cannot delete'
    desk.server.refusals["DELETE", "/first"] = (403, refusal)
    return desk.steer("teardown", "--yes", "--force")


def _finding(
    what: str, *, says: str, do: str, change: Any, settings: tuple[str, ...] = _RENTED
) -> None:
    """A row in which the doctor finds a problem before anything is launched."""

    def happen(desk: KubernetesDesk) -> int:
        change(desk)
        code = desk.doctor(*settings)
        assert not any(
            method == "POST" and "review" not in path for method, path in desk.server.requests
        )
        return code

    row(what, 1, says=says, do=do)(happen)


def _remove(path: str) -> Any:
    return lambda desk: desk.server.objects.pop(path)


def _nodes(**changes: Any) -> Any:
    return lambda desk: [desk.add_node(name, **changes) for name in ("n0", "n1")]


def _quota(desk: KubernetesDesk) -> None:
    hard = {"requests.nvidia.com/gpu": "8"}
    desk.server.add(f"{_IN_DEFAULT}/resourcequotas/team", spec={"hard": hard})


_finding(
    "claim missing",
    says="has no such claim",
    do="correct launch.volumes",
    change=_remove(f"{_IN_DEFAULT}/persistentvolumeclaims/runs"),
)
_finding(
    "claim in another zone than the nodes",
    says="its volume is in a, and the nodes are in b",
    do="in the same zone",
    change=_nodes(zone="b"),
)
_finding(
    "device plugin missing",
    says="a node offers 0, and a pod asks for 8",
    do="static/nvidia-device-plugin.yml",
    change=_nodes(gpus=0),
)
_finding(
    "EFA interfaces not offered",
    says="a node offers 4, and a pod asks for 32",
    do="helm upgrade --install aws-efa-k8s-device-plugin",
    change=_nodes(efa=4),
)
_finding(
    "quota too small",
    says="quota team: the run asks 16 of requests.nvidia.com/gpu; 8 are allowed",
    do="have the quota raised",
    change=_quota,
)
_finding(
    "secret missing",
    says="has no Secret hf",
    do="create secret generic hf",
    change=lambda _: None,
    settings=(*_RENTED, "secrets.HF_TOKEN=k8s:hf/token"),
)
_finding(
    "queue missing",
    says="has no such local queue",
    do="get localqueues lists them",
    change=lambda _: None,
    settings=(*_RENTED, "launch.kubernetes.queue=team"),
)
_finding(
    "Kubernetes too old",
    says="the API server is of 1.27",
    do="Have the cluster upgraded",
    change=lambda desk: desk.server.version.update(minor="27"),
)
_finding(
    "pull secret missing",
    says="pulls images with Secret registry",
    do="create secret docker-registry registry",
    change=lambda desk: desk.server.add(
        f"{_IN_DEFAULT}/serviceaccounts/default", imagePullSecrets=[{"name": "registry"}]
    ),
)


@row(
    "Volcano for a TrainJob",
    2,
    says="launch.kubernetes.scheduler=volcano is not built for launch.kubernetes.target=trainjob",
    do="Use target jobset or pytorchjob, or Kueue",
)
def _(desk: KubernetesDesk) -> int:
    return desk.launch("launch.kubernetes.target=trainjob", "launch.kubernetes.scheduler=volcano")


@row(
    "Volcano that the cluster lacks",
    1,
    says="the cluster serves no PodGroup: Volcano is missing",
    do="Install it as its vendor says",
)
def _(desk: KubernetesDesk) -> int:
    desk.server.served.discard("podgroups")
    return desk.doctor("launch.kubernetes.scheduler=volcano")
