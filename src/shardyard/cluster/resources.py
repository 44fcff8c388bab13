"""Parts of an EKS cluster, and the file system of every kind of cluster with its exports."""

from dataclasses import dataclass
from typing import Any, Literal

from shardyard.cluster.batch.queue import default_group, network_location
from shardyard.cluster.clients import Act, World, kubectl_json, program
from shardyard.cluster.eksctl import (
    GROUP,
    render_cluster,
    render_nodes,
)
from shardyard.cluster.fsx import (
    FileSystemOutputs,
    as_json,
    claim_objects,
    clients_of,
    file_system_outputs,
    render_root_job,
    render_stack,
    stack_name,
    volume_name,
)
from shardyard.cluster.orphans import details_of_network, listed_of
from shardyard.cluster.part import ClusterPart, Stack, State, check_owner, stack_outputs
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.errors import ShardyardError
from shardyard.launchers.kubernetes.objects import to_yaml
from shardyard.launchers.kubernetes.prerequisites import DEVICE_PLUGINS, FSX, Prerequisite
from shardyard.launchers.kubernetes.resources import EFA
from shardyard.log import warn


class ControlPlane(Stack):
    """EKS's control plane, its network and its add-ons."""

    kind = "control plane"

    def stack(self, spec: ClusterSpec) -> str:
        return f"eksctl-{spec.name}-cluster"

    def text(self, spec: ClusterSpec, owner: str) -> str:
        return "# eksctl create cluster -f cluster.yaml --without-nodegroup\n" + to_yaml(
            (render_cluster(spec, owner),)
        )

    def make(self, world: World) -> None:
        file = _write(world, "cluster.yaml", to_yaml((render_cluster(world.spec, world.owner),)))
        world.run(
            ["eksctl", "create", "cluster", "-f", file, "--without-nodegroup",
             "--kubeconfig", str(world.kubeconfig)]
        )  # fmt: skip

    def finish_setup(self, world: World) -> None:
        spec = world.spec
        file = _write(world, "cluster.yaml", to_yaml((render_cluster(spec, world.owner),)))
        world.run(["eksctl", "utils", "associate-iam-oidc-provider", "-f", file, "--approve"])
        world.run(["eksctl", "create", "addon", "-f", file])
        world.run(
            ["eksctl", "utils", "write-kubeconfig", "--cluster", spec.name,
             "--region", spec.region, "--kubeconfig", str(world.kubeconfig)]
        )  # fmt: skip

    def details(self, world: World) -> dict[str, str]:
        network = details_of_network(stack_outputs(world, self.stack(world.spec)))
        return {**super().details(world), **network}

    def state(self, world: World) -> State:
        stack, spec = super().state(world), world.spec
        if stack.word != "absent":
            return stack
        # The stack may be gone and the control plane not: eksctl does not wait for it.
        answer = world.ask("eks", "describe_cluster", name=spec.name)
        asked = f"{stack.source}; eks describe-cluster {spec.name}"
        if answer is None:
            return State(word="absent", source=asked)
        check_owner(f"cluster {spec.name}", answer["cluster"].get("tags", {}), world)
        word = "going" if answer["cluster"]["status"] == "DELETING" else "failed"
        return State(word=word, reason="it is there without its stack", source=asked)

    def removal(self, world: World) -> list[Act]:
        spec = world.spec
        return [
            program(
                "eksctl", "delete", "cluster", "--name", spec.name, "--region", spec.region,
                "--wait", "--disable-nodegroup-eviction",
            )
        ]  # fmt: skip


@dataclass(frozen=True)
class NodeGroup(Stack):
    """Nodes of one kind."""

    group: str
    """``system`` or ``accelerators``."""

    @property
    def kind(self) -> str:  # type: ignore[override]
        return f"{self.group} nodes"

    def stack(self, spec: ClusterSpec) -> str:
        return f"eksctl-{spec.name}-nodegroup-{self.group}"

    def _rendered(self, spec: ClusterSpec, owner: str) -> dict[str, Any]:
        return render_nodes(spec, owner) if self.group == GROUP else render_cluster(spec, owner)

    def text(self, spec: ClusterSpec, owner: str) -> str:
        command = f"# {' '.join(self._create(f'{self.group}.yaml'))}\n"
        # The system group stands in the file of the control plane already.
        return command + (to_yaml((self._rendered(spec, owner),)) if self.group == GROUP else "")

    def make(self, world: World) -> None:
        text = to_yaml((self._rendered(world.spec, world.owner),))
        file = _write(world, f"{self.group}.yaml", text)
        world.run([*self._create(file)])

    def _create(self, file: str) -> tuple[str, ...]:
        return ("eksctl", "create", "nodegroup", "-f", file, "--include", self.group)

    def removal(self, world: World) -> list[Act]:
        spec = world.spec
        return [
            program(
                "eksctl", "delete", "nodegroup", "--cluster", spec.name, "--region", spec.region,
                "--name", self.group, "--wait", "--drain=false",
            )
        ]  # fmt: skip


class Driver(ClusterPart):
    """Driver with which pods mount FSx for Lustre; EFS's is one of the control plane's add-ons."""

    kind = "storage driver"
    is_inside = True
    goes_with_cluster = True

    def name(self, spec: ClusterSpec) -> str:  # noqa: ARG002 - the same in all clusters
        return FSX.label

    def text(self, spec: ClusterSpec, owner: str) -> str:  # noqa: ARG002
        return f"# {' '.join(install_act(FSX).argv)}\n"

    def make(self, world: World) -> None:
        install_act(FSX).do(world)

    def state(self, world: World) -> State:
        found = kubectl_json(world, "csidriver", FSX.provides)
        asked = f"kubectl get csidriver {FSX.provides}"
        return State(word="there" if found else "absent", source=asked)

    def removal(self, world: World) -> list[Act]:  # noqa: ARG002
        return []


class EfaPlugin(ClusterPart):
    """Plugin that offers a node's EFA interfaces to pods, in a version that knows all types."""

    kind = "EFA device plugin"
    is_inside = True
    goes_with_cluster = True

    def name(self, spec: ClusterSpec) -> str:  # noqa: ARG002
        return DEVICE_PLUGINS[EFA].label

    def text(self, spec: ClusterSpec, owner: str) -> str:  # noqa: ARG002
        return f"# {' '.join(install_act(DEVICE_PLUGINS[EFA]).argv)}\n"

    def make(self, world: World) -> None:
        # eksctl's own one, where it was put, is older and lacks types; two of them fight.
        WITHOUT_EKSCTLS_EFA_PLUGIN.do(world)
        install_act(DEVICE_PLUGINS[EFA]).do(world)

    def state(self, world: World) -> State:
        asked = "kubectl get daemonset aws-efa-k8s-device-plugin -n kube-system"
        found = kubectl_json(
            world, "daemonset", "aws-efa-k8s-device-plugin", "--namespace", "kube-system"
        )
        return State(word="there" if found else "absent", source=asked)

    def removal(self, world: World) -> list[Act]:  # noqa: ARG002
        return []


def install_act(part: Prerequisite) -> Act:
    """Return the call that installs a part of the product's list into a kubeconfig's cluster."""
    return _without_context(part, "install")


def uninstall_act(part: Prerequisite) -> Act:
    """Return the call that removes it; safe to repeat."""
    return _without_context(part, "remove")


def _without_context(part: Prerequisite, what: Literal["install", "remove"]) -> Act:
    assert part.release is not None
    argv = part.release.install("-") if what == "install" else part.release.remove("-")
    context = next(word for word in ("--context", "--kube-context") if word in argv)
    return program(*argv[: argv.index(context)])


WITHOUT_EKSCTLS_EFA_PLUGIN = program(
    "kubectl", "delete", "daemonset", "aws-efa-k8s-device-plugin-daemonset",
    "--namespace", "kube-system", "--ignore-not-found",
)  # fmt: skip


class FileSystem(Stack):
    """FSx for Lustre or EFS, with the group that lets nodes in."""

    kind = "file system"
    holds_data = True

    def stack(self, spec: ClusterSpec) -> str:
        return stack_name(spec)

    def text(self, spec: ClusterSpec, owner: str) -> str:
        return as_json(render_stack(spec, owner))

    def make(self, world: World) -> None:
        parameters = [
            {"ParameterKey": key, "ParameterValue": value}
            for key, value in _network_of(world).items()
        ]
        self.create(world, render_stack(world.spec, world.owner), Parameters=parameters)

    def unfinished(self, world: World) -> str:
        return running_exports(world) if world.spec.storage.kind == "fsx" else ""

    def removal(self, world: World) -> list[Act]:
        return [self.deletion(world.spec)]


def _network_of(world: World) -> dict[str, str]:
    """The parameters of the file system's stack: where it lies, and who may reach it."""
    spec = world.spec
    if spec.kind == "batch":
        place = network_location(world)
        found = {"Vpc": place.vpc, "Subnet": place.subnet}
        groups = {client: default_group(world)["GroupId"] for client in clients_of(spec)}
        return found | groups
    if isinstance(spec, AdoptedCluster):
        return {
            "Vpc": str(spec.vpc.id),
            "Subnet": spec.vpc.subnets[spec.zone],
            "NodeGroup": spec.node_group,
        }
    outputs = stack_outputs(world, ControlPlane().stack(spec))
    return {
        "Vpc": outputs["VPC"],
        "Subnet": spec.vpc.subnets.get(spec.zone) or _subnet_in(world, outputs),
        "NodeGroup": outputs["ClusterSecurityGroupId"],
        "SharedNodeGroup": outputs["SharedNodeSecurityGroup"],
    }


class Claim(ClusterPart):
    """The claim that recipes name in launch.volumes."""

    kind = "claim"
    is_inside = True

    def name(self, spec: ClusterSpec) -> str:
        return f"{spec.storage.namespace}/{spec.storage.claim}"

    def text(self, spec: ClusterSpec, owner: str) -> str:
        made = FileSystemOutputs(
            file_system="FILE-SYSTEM", mount_name="MOUNT-NAME", access_point="ACCESS-POINT"
        )
        return to_yaml(claim_objects(spec, made, owner))

    def make(self, world: World) -> None:
        outputs = stack_outputs(world, stack_name(world.spec))
        jobs = _root_jobs(world.spec, world.owner)
        text = to_yaml(claim_objects(world.spec, file_system_outputs(outputs), world.owner))
        program("kubectl", "apply", "-f", _write(world, "claim.yaml", text)).do(world)
        for job in jobs:  # other pods come after it
            program(
                "kubectl", "wait", f"job/{job['metadata']['name']}", "--for=condition=complete",
                "--namespace", world.spec.storage.namespace, "--timeout=600s",
            ).do(world)  # fmt: skip

    def state(self, world: World) -> State:
        storage = world.spec.storage
        found = kubectl_json(
            world, "persistentvolumeclaim", storage.claim, "--namespace", storage.namespace
        )
        asked = f"kubectl get pvc {storage.claim} -n {storage.namespace}"
        if not found:
            return State(word="absent", source=asked)
        going = "deletionTimestamp" in found["metadata"]
        return State(word="going" if going else "there", source=asked)

    def removal(self, world: World) -> list[Act]:
        storage = world.spec.storage
        return [
            program(
                "kubectl", "delete", f"persistentvolumeclaim/{storage.claim}",
                f"persistentvolume/{volume_name(world.spec)}",
                *(f"job/{job['metadata']['name']}" for job in _root_jobs(world.spec, world.owner)),
                "--namespace", storage.namespace, "--ignore-not-found", "--wait=false",
            )
        ]  # fmt: skip


def _root_jobs(spec: ClusterSpec, owner: str) -> tuple[dict[str, Any], ...]:
    return (render_root_job(spec, owner),) if spec.storage.kind == "fsx" else ()


def _subnet_in(world: World, outputs: dict[str, str]) -> str:
    """The private subnet of the accelerators' zone."""
    answer = world.ask(
        "ec2", "describe_subnets", SubnetIds=outputs["SubnetsPrivate"].split(",")
    ) or {"Subnets": []}
    for subnet in answer["Subnets"]:
        if subnet["AvailabilityZone"] == world.spec.zone:
            return str(subnet["SubnetId"])
    raise ShardyardError(
        f"the cluster's network has no private subnet in {world.spec.zone}. Somebody changed it. "
        "Delete the cluster with `shardyard cluster delete` and create it again."
    )


def _write(world: World, name: str, text: str) -> str:
    path = world.folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


_RUNNING = frozenset({"PENDING", "EXECUTING", "CANCELING"})
"""States of a data repository task that is not over; tasks end with the file system.

Source: FSx, DataRepositoryTask.
"""


def running_exports(world: World) -> str:
    """Describe export tasks that are not over; empty: none.

    A failed one is reported and not waited for: what it was to write stays where it is.

    Raises:
        ShardyardError: FSx does not list them.
    """
    systems = {str(one["FileSystemId"]) for one in listed_of(world, "FSx file system")}
    if not systems:
        return ""
    asked = ("fsx", "describe_data_repository_tasks", "DataRepositoryTasks")
    tasks = [
        task
        for task in world.listed(*asked)
        if task["FileSystemId"] in systems and task["Type"] == "EXPORT_TO_REPOSITORY"
    ]
    running = [f"{task['TaskId']} is {task['Lifecycle']}" for task in tasks if _is_running(task)]
    if not running:
        _warn_failed(tasks)
    return f"exports into its bucket: {', '.join(running)}" if running else ""


def _is_running(task: dict[str, Any]) -> bool:
    return task["Lifecycle"] in _RUNNING


def _warn_failed(tasks: list[dict[str, Any]]) -> None:
    """Warn if the newest task of a file system failed."""
    latest: dict[str, dict[str, Any]] = {}
    for task in tasks:
        known = latest.get(task["FileSystemId"])
        if known is None or task["CreationTime"] > known["CreationTime"]:
            latest[task["FileSystemId"]] = task
    for task in latest.values():
        if task["Lifecycle"] == "FAILED":
            why = task.get("FailureDetails", {}).get("Message", "FSx gives no reason")
            warn(
                f"the last export of {task['FileSystemId']}, {task['TaskId']}, failed: {why}. What "
                "it was to write into the bucket goes with the file system"
            )
