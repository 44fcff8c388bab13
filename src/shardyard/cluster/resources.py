"""Parts of a cluster, in the order in which they are made; removal is the other way round.

Each part has its creation, its state and its removal. The state comes from AWS and the cluster,
never from a program's output: eksctl and CloudFormation say "deleted" of what still exists.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from shardyard.cluster.clients import Act, World, account_of, kubectl_json, program
from shardyard.cluster.eksctl import (
    GROUP,
    NAME_TAG,
    OWNER_TAG,
    SYSTEM_GROUP,
    render_cluster,
    render_nodes,
    tags_of,
)
from shardyard.cluster.existing_spec import AdoptedCluster
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
from shardyard.cluster.fsx_exports import running_exports
from shardyard.cluster.orphans import details_of_network
from shardyard.cluster.spec import ClusterSpec
from shardyard.errors import AccessError, ShardyardError
from shardyard.launchers.kubernetes.objects import to_yaml
from shardyard.launchers.kubernetes.prerequisites import DEVICE_PLUGINS, FSX, Prerequisite
from shardyard.launchers.kubernetes.resources import EFA


@dataclass(frozen=True, kw_only=True)
class State:
    """State of a part."""

    word: str
    """``absent``, ``coming``, ``there``, ``going`` or ``failed``."""
    reason: str = ""
    """Reason of a failure."""
    source: str = ""
    """Service that was asked, and how."""


class NotOwnedError(AccessError):
    """Error for a resource with a part's name that was not made from here."""


class ClusterPart(ABC):
    """One part of a cluster."""

    kind: ClassVar[str]
    holds_data: ClassVar[bool] = False
    is_inside: ClassVar[bool] = False
    """Whether it is an object of Kubernetes, gone with the control plane."""
    goes_with_cluster: ClassVar[bool] = False
    """Whether only the removal of the control plane removes it."""

    @abstractmethod
    def name(self, spec: ClusterSpec) -> str:
        """Return the name in the ledger and in messages."""

    @abstractmethod
    def text(self, spec: ClusterSpec, owner: str) -> str:
        """Exactly what is sent, for ``--dry-run``."""

    @abstractmethod
    def make(self, world: World) -> None:
        """Begin it, and wait as long as its program does."""

    @abstractmethod
    def state(self, world: World) -> State:
        """Ask for the current state."""

    @abstractmethod
    def removal(self, world: World) -> list[Act]:
        """Return the calls that begin its removal, in order; none: the control plane takes it."""

    def remove(self, world: World) -> None:
        """Begin its removal."""
        for act in self.removal(world):
            act.do(world)

    def details(self, world: World) -> dict[str, str]:  # noqa: ARG002 - most have none
        """Return the details that the ledger keeps of it."""
        return {}

    def finish_setup(self, world: World) -> None:  # noqa: B027 - most parts are whole or not there
        """Finish what was interrupted behind what ``state`` sees."""

    def in_use_by(self, world: World) -> str:  # noqa: ARG002 - most by nothing
        """Return what the user has to end before it may be removed; empty: there is none."""
        return ""

    def unfinished(self, world: World) -> str:  # noqa: ARG002 - most do nothing by themselves
        """Return what ends by itself and is waited for before the removal; empty: there is none."""
        return ""


class Stack(ClusterPart):
    """A part that CloudFormation holds, made by eksctl or by us."""

    @abstractmethod
    def stack(self, spec: ClusterSpec) -> str:
        """Name of the stack."""

    def name(self, spec: ClusterSpec) -> str:
        return self.stack(spec)

    def create(self, world: World, template: dict[str, Any], **more: Any) -> None:
        """Have CloudFormation begin a stack of ours, tagged as made from here.

        Args:
            more: Of CreateStack, such as ``Parameters``.
        """
        spec = world.spec
        name, tags = self.stack(spec), tags_of(spec, world.owner)
        world.ask(
            "cloudformation",
            "create_stack",
            StackName=name,
            TemplateBody=as_json(template),
            Tags=[{"Key": key, "Value": value} for key, value in tags.items()],
            ClientRequestToken=f"shardyard-{world.owner}-{name.rpartition('-')[2]}",
            **more,
        )

    def deletion(self, spec: ClusterSpec) -> Act:
        """Return the call that has CloudFormation delete the stack."""
        params = {"StackName": self.stack(spec)}
        return Act(service="cloudformation", call="delete_stack", params=params)

    def state(self, world: World) -> State:
        name = self.stack(world.spec)
        asked = f"cloudformation describe-stacks {name}"
        answer = world.ask("cloudformation", "describe_stacks", StackName=name)
        if answer is None or not answer["Stacks"]:
            return State(word="absent", source=asked)
        stack = answer["Stacks"][0]
        status = str(stack["StackStatus"])
        if status == "DELETE_COMPLETE":
            return State(word="absent", source=asked)
        check_owner(name, {tag["Key"]: tag["Value"] for tag in stack.get("Tags", [])}, world)
        if status in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
            return State(word="there", source=asked)
        if status == "DELETE_IN_PROGRESS":
            return State(word="going", source=asked)
        if status == "CREATE_IN_PROGRESS":
            return State(word="coming", source=asked)
        why = f"{status}: {stack.get('StackStatusReason', 'no reason is given')}"
        return State(word="failed", reason=why, source=asked)

    def details(self, world: World) -> dict[str, str]:
        """The account: asked of another one, CloudFormation says that there is no such stack."""
        answer = world.ask("cloudformation", "describe_stacks", StackName=self.stack(world.spec))
        stacks = (answer or {}).get("Stacks") or [{}]
        account = account_of(str(stacks[0].get("StackId", "")))
        return {"account": account} if account else {}


def check_owner(name: str, tags: dict[str, str], world: World) -> None:
    """Check that a resource was made from here, as no other is touched.

    Raises:
        ForeignError: Its tags are another's, or none.
    """
    if tags.get(NAME_TAG) == world.spec.name and tags.get(OWNER_TAG) == world.owner:
        return
    raise NotOwnedError(
        f"{name} in {world.spec.region} is there and was not made from {world.folder}: its tag "
        f"{OWNER_TAG} is {tags.get(OWNER_TAG, 'missing')}, not {world.owner}. Nothing of it is "
        "touched. Give your cluster another name, work in the folder that made it, or remove it "
        "where nobody needs it."
    )


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
        from shardyard.cluster.batch.queue import (
            default_group,
            network_location,
        )  # they read stacks of here

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


def parts_of(spec: ClusterSpec) -> list[ClusterPart]:
    """The parts of a cluster, in the order in which they are made."""
    return list(_parts(spec))


def _parts(spec: ClusterSpec) -> Iterator[ClusterPart]:
    if spec.kind == "batch":
        yield from _parts_of_batch(spec)
        return
    if isinstance(spec, AdoptedCluster):
        from shardyard.cluster.existing_resources import added_parts  # it is made of parts of here

        yield from added_parts(spec)
        return
    yield ControlPlane()
    yield NodeGroup(SYSTEM_GROUP)
    if spec.storage.kind == "fsx":
        yield Driver()
    if spec.storage.kind != "none":
        yield FileSystem()
        yield Claim()
    yield NodeGroup(GROUP)  # late: they bill
    if spec.has_efa:
        yield EfaPlugin()  # behind the group, with which eksctl puts its own there


def plane_of(spec: ClusterSpec) -> ClusterPart:
    """Return the control plane of all other parts, made by us or there before."""
    if isinstance(spec, AdoptedCluster):
        from shardyard.cluster.existing_resources import (
            ExistingCluster,  # it is made of parts of here
        )

        return ExistingCluster()
    return ControlPlane()


def every_part(spec: ClusterSpec) -> list[ClusterPart]:
    """Each part that such a cluster may ever have had, in the order in which they are made."""
    if isinstance(spec, AdoptedCluster):
        from shardyard.cluster.existing_resources import all_added  # it is made of parts of here

        return all_added(spec)
    from shardyard.cluster.batch.environment import Environment, Network  # made of parts of here

    return [Network(), ControlPlane(), NodeGroup(SYSTEM_GROUP), Driver(), FileSystem(), Claim(),
            Environment(), NodeGroup(GROUP), EfaPlugin()]  # fmt: skip


def _parts_of_batch(spec: ClusterSpec) -> Iterator[ClusterPart]:
    from shardyard.cluster.batch.environment import Environment, Network  # made of parts of here

    if spec.vpc.id is None:
        yield Network()
    if spec.storage.kind != "none":
        yield FileSystem()
    yield Environment()  # behind what its instances mount


def stack_outputs(world: World, stack: str) -> dict[str, str]:
    """Return the outputs of a stack.

    Raises:
        ShardyardError: There is no such stack.
    """
    answer = world.ask("cloudformation", "describe_stacks", StackName=stack)
    if answer is None:
        raise ShardyardError(
            f"stack {stack} is not in {world.spec.region}, though it was made. Somebody removed "
            "it. Delete the cluster with `shardyard cluster delete` and make it anew."
        )
    outputs = answer["Stacks"][0].get("Outputs", [])
    return {output["OutputKey"]: output["OutputValue"] for output in outputs}


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
        "Delete the cluster with `shardyard cluster delete` and make it anew."
    )


def _write(world: World, name: str, text: str) -> str:
    path = world.folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
