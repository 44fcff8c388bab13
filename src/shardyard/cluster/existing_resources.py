"""Parts added to an existing cluster; a part without our id is never touched."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from shardyard.cluster.clients import Act, World, account_of, kubectl_json, program
from shardyard.cluster.eksctl import GROUP, NAME_TAG, OWNER_TAG, tags_of
from shardyard.cluster.fsx import volume_name
from shardyard.cluster.part import ClusterPart, State, check_owner
from shardyard.cluster.resources import (
    WITHOUT_EKSCTLS_EFA_PLUGIN,
    Claim,
    FileSystem,
    NodeGroup,
    install_act,
    uninstall_act,
)
from shardyard.cluster.spec import AdoptedCluster, ClusterSpec
from shardyard.errors import AccessError
from shardyard.launchers.kubernetes.prerequisites import DEVICE_PLUGINS, FSX, Prerequisite
from shardyard.launchers.kubernetes.resources import EFA

_PAGE = "verbs/cluster#existing-clusters"

NVIDIA = "nvidia.com/gpu"
EFS_DRIVER = "efs.csi.aws.com"
_EFS_ADDON = "aws-efs-csi-driver"


def added_parts(spec: AdoptedCluster) -> Iterator[ClusterPart]:
    """Return the parts to add, in the order in which they are made."""
    return (part for part in all_added(spec) if part.kind in spec.adds)


def all_added(spec: ClusterSpec) -> list[ClusterPart]:
    """Each that may be added, in the order in which they are made: late what bills most."""
    driver: ClusterPart = FsxDriver() if spec.storage.kind == "fsx" else EfsDriver()
    return [driver, FileSystem(), AddedClaim(), GpuPlugin(), AddedNodes(GROUP), AddedEfaPlugin()]


class ExistingCluster(ClusterPart):
    """The cluster itself: asked about, never made and never removed."""

    kind = "control plane"

    def name(self, spec: ClusterSpec) -> str:
        return spec.name

    def text(self, spec: ClusterSpec, owner: str) -> str:  # noqa: ARG002
        return ""

    def make(self, world: World) -> None:
        raise AssertionError(f"{world.spec.name} was there before")

    def removal(self, world: World) -> list[Act]:
        raise AssertionError(f"{world.spec.name} was there before, and stays")

    def state(self, world: World) -> State:
        name = world.spec.name
        asked = f"eks describe-cluster {name}"
        answer = world.ask("eks", "describe_cluster", name=name)
        if answer is None:
            return State(word="absent", source=asked)
        assert isinstance(world.spec, AdoptedCluster)
        check_same_arn(str(answer["cluster"]["arn"]), world.spec)
        status = answer["cluster"]["status"]
        words = {"ACTIVE": "there", "UPDATING": "there", "CREATING": "coming", "DELETING": "going"}
        return State(word=words.get(status, "failed"), reason=str(status), source=asked)


def check_same_arn(arn: str, spec: AdoptedCluster) -> None:
    """Check that a cluster of the name in another account is not taken for this one.

    Raises:
        AccessError: It is another cluster.
    """
    if arn == spec.arn:
        return
    raise AccessError(
        f"{spec.name} in {spec.region} is {arn}, and {spec.arn} was adopted: these credentials are "
        f"of account {account_of(arn)}. No change was made. Use credentials of account "
        f"{account_of(spec.arn)}, and check with `aws sts get-caller-identity`.",
        page=_PAGE,
    )


class LabelledPart(ClusterPart):
    """Part that a program installs, and one object of which gets our id.

    Between the two, our process may end. Then the ledger says that it was begun where no part was.
    """

    is_inside = True

    @abstractmethod
    def part(self) -> Prerequisite:
        """The row of the product's own list."""

    @abstractmethod
    def object(self) -> tuple[str, ...]:
        """Kind and name of the object that tells whether it is there, and its namespace."""

    def name(self, spec: ClusterSpec) -> str:  # noqa: ARG002 - the same in all clusters
        return self.part().label

    def acts(self) -> list[Act]:
        """Return the calls that install it."""
        return [install_act(self.part())]

    def text(self, spec: ClusterSpec, owner: str) -> str:
        acts = [*self.acts(), self._mark(spec, owner)]
        return "".join(f"# {' '.join(act.argv)}\n" for act in acts)

    def make(self, world: World) -> None:
        for act in self.acts():
            act.do(world)
        self.finish_setup(world)

    def finish_setup(self, world: World) -> None:
        self._mark(world.spec, world.owner).do(world)

    def _mark(self, spec: ClusterSpec, owner: str) -> Act:
        labels = [f"{key}={value}" for key, value in tags_of(spec, owner).items()]
        return program("kubectl", "label", *self.object(), *labels)

    def state(self, world: World) -> State:
        asked = f"kubectl get {' '.join(self.object())}"
        found = kubectl_json(world, *self.object())
        if not found:
            return State(word="absent", source=asked)
        if not (_labels(found) == {} and _is_unconfirmed(self, world)):
            check_owner(" ".join(self.object()), _labels(found), world)
        going = "deletionTimestamp" in found["metadata"]
        return State(word="going" if going else "there", source=asked)

    def removal(self, world: World) -> list[Act]:  # noqa: ARG002
        return [uninstall_act(self.part())]


def _labels(item: dict[str, Any]) -> dict[str, str]:
    """Return our labels on an object."""
    labels = item["metadata"].get("labels") or {}
    return {key: labels[key] for key in (NAME_TAG, OWNER_TAG) if key in labels}


def _is_unconfirmed(part: ClusterPart, world: World) -> bool:
    """Whether it was begun, and not seen whole: it was not there before."""
    name = part.name(world.spec)
    live = {(entry.kind, entry.name): entry for entry in world.ledger.live()}
    entry = live.get((part.kind, name))
    return entry is not None and not entry.is_confirmed


class FsxDriver(LabelledPart):
    """Driver with which pods mount FSx for Lustre."""

    kind = "storage driver"

    def part(self) -> Prerequisite:
        return FSX

    def object(self) -> tuple[str, ...]:
        return ("csidriver", FSX.provides)


class GpuPlugin(LabelledPart):
    """Plugin that offers a node's GPUs to pods.

    eksctl's own is turned off, as it leaves no trace by which it could be removed again.
    """

    kind = "GPU device plugin"

    def part(self) -> Prerequisite:
        return DEVICE_PLUGINS[NVIDIA]

    def object(self) -> tuple[str, ...]:
        return ("daemonset", "nvidia-device-plugin-daemonset", "--namespace", "kube-system")


class AddedEfaPlugin(LabelledPart):
    """Plugin that offers a node's EFA interfaces to pods, in place of eksctl's own for a group."""

    kind = "EFA device plugin"

    def part(self) -> Prerequisite:
        return DEVICE_PLUGINS[EFA]

    def object(self) -> tuple[str, ...]:
        return ("daemonset", "aws-efa-k8s-device-plugin", "--namespace", "kube-system")

    def acts(self) -> list[Act]:
        return [WITHOUT_EKSCTLS_EFA_PLUGIN, *super().acts()]


class EfsDriver(ClusterPart):
    """EKS's add-on, with no rights in AWS: a volume that is there is mounted without."""

    kind = "storage driver"
    is_inside = True

    def name(self, spec: ClusterSpec) -> str:  # noqa: ARG002
        return _EFS_ADDON

    def _making(self, spec: ClusterSpec, owner: str) -> Act:
        params = {
            "clusterName": spec.name, "addonName": _EFS_ADDON, "tags": tags_of(spec, owner),
        }  # fmt: skip
        return Act(service="eks", call="create_addon", params=params)

    def text(self, spec: ClusterSpec, owner: str) -> str:
        tags = ",".join(f"{key}={value}" for key, value in tags_of(spec, owner).items())
        return (
            f"# aws eks create-addon --region {spec.region} --cluster-name {spec.name} "
            f"--addon-name {_EFS_ADDON} --tags {tags}\n"
        )

    def make(self, world: World) -> None:
        self._making(world.spec, world.owner).do(world)

    def state(self, world: World) -> State:
        name = world.spec.name
        asked = f"eks describe-addon {name} {_EFS_ADDON}"
        answer = world.ask("eks", "describe_addon", clusterName=name, addonName=_EFS_ADDON)
        if answer is None:
            return State(word="absent", source=asked)
        addon = answer["addon"]
        check_owner(f"add-on {_EFS_ADDON}", addon.get("tags") or {}, world)
        words = {"ACTIVE": "there", "CREATING": "coming", "UPDATING": "coming", "DELETING": "going"}
        word = words.get(addon["status"], "failed")
        return State(word=word, reason=str(addon["status"]), source=asked)

    def removal(self, world: World) -> list[Act]:
        params = {"clusterName": world.spec.name, "addonName": _EFS_ADDON}
        return [Act(service="eks", call="delete_addon", params=params)]


class AddedClaim(Claim):
    """The claim; one of this name, or a volume of its name, that others made is not touched."""

    def state(self, world: World) -> State:
        storage = world.spec.storage
        volume = volume_name(world.spec)
        place = ("--namespace", storage.namespace)
        found = {
            f"claim {self.name(world.spec)}": kubectl_json(
                world, "persistentvolumeclaim", storage.claim, *place
            ),
            f"volume {volume}": kubectl_json(world, "persistentvolume", volume),
        }
        for what, one in found.items():
            if one:
                check_owner(what, _labels(one), world)
        return super().state(world)


class AddedNodes(NodeGroup):
    """A group of nodes of eksctl's, in a cluster that it may not have made."""

    def _create(self, file: str) -> tuple[str, ...]:
        return (*super()._create(file), "--install-nvidia-plugin=false")

    def removal(self, world: World) -> list[Act]:
        spec = world.spec
        assert isinstance(spec, AdoptedCluster)
        if ExistingCluster().state(world).word == "absent":  # its owner removed it under us
            return [self.deletion(spec)]
        # eksctl brought its EFA plugin with the group; it stays where there was one before.
        is_ours = AddedEfaPlugin.kind in spec.adds
        return [*([WITHOUT_EKSCTLS_EFA_PLUGIN] if is_ours else []), *super().removal(world)]
