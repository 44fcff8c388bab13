"""One part of a cluster: its creation, its state and its removal.

The state comes from AWS and the cluster, never from a program's output: eksctl and
CloudFormation say "deleted" of what still exists.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from shardyard.cluster.clients import Act, World, account_of
from shardyard.cluster.eksctl import (
    NAME_TAG,
    OWNER_TAG,
    tags_of,
)
from shardyard.cluster.fsx import (
    as_json,
)
from shardyard.cluster.spec import ClusterSpec
from shardyard.errors import AccessError, ShardyardError


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
        NotOwnedError: Its tags are another's, or none.
    """
    if tags.get(NAME_TAG) == world.spec.name and tags.get(OWNER_TAG) == world.owner:
        return
    raise NotOwnedError(
        f"{name} in {world.spec.region} exists and was not made from {world.folder}: its tag "
        f"{OWNER_TAG} is {tags.get(OWNER_TAG, 'missing')}, not {world.owner}. It was not changed. "
        "Give your cluster another name, work in the folder that made it, or remove it if it is "
        "no longer needed."
    )


def stack_outputs(world: World, stack: str) -> dict[str, str]:
    """Return the outputs of a stack.

    Raises:
        ShardyardError: There is no such stack.
    """
    answer = world.ask("cloudformation", "describe_stacks", StackName=stack)
    if answer is None:
        raise ShardyardError(
            f"stack {stack} is missing in {world.spec.region}, although it was created: somebody "
            "deleted it. Delete the cluster with `shardyard cluster delete` and create it again."
        )
    outputs = answer["Stacks"][0].get("Outputs", [])
    return {output["OutputKey"]: output["OutputValue"] for output in outputs}
