"""Parts of a ``kind: batch`` cluster without the file system: its network, and its queues."""

from shardyard.cluster.batch.queue import (
    close,
    close_acts,
    condition_of,
    jobs_of,
    network_location,
    queries_of,
)
from shardyard.cluster.batch.stack import environment_name, render_environment, stack_name
from shardyard.cluster.clients import Act, World
from shardyard.cluster.fsx import FileSystemOutputs, as_json, file_system_outputs
from shardyard.cluster.network import LATER, location_in_spec, network_stack_name, render_network
from shardyard.cluster.orphans import details_of_network
from shardyard.cluster.part import Stack, State, check_owner, stack_outputs
from shardyard.cluster.resources import FileSystem
from shardyard.cluster.spec import ClusterSpec


class Network(Stack):
    """A network of its own, where the description names none."""

    kind = "network"

    def stack(self, spec: ClusterSpec) -> str:
        return network_stack_name(spec)

    def text(self, spec: ClusterSpec, owner: str) -> str:
        return as_json(render_network(spec, owner))

    def make(self, world: World) -> None:
        zone = {"ParameterKey": "Zone", "ParameterValue": world.spec.zone}
        self.create(world, render_network(world.spec, world.owner), Parameters=[zone])

    def details(self, world: World) -> dict[str, str]:
        network = details_of_network(stack_outputs(world, self.stack(world.spec)))
        return {**super().details(world), **network}

    def removal(self, world: World) -> list[Act]:
        return [self.deletion(world.spec)]


class Environment(Stack):
    """Queues and compute environments of AWS Batch, with all that they need."""

    kind = "batch environment"

    def stack(self, spec: ClusterSpec) -> str:
        return stack_name(spec)

    def text(self, spec: ClusterSpec, owner: str) -> str:
        mount = "MOUNT-NAME" if spec.storage.kind == "fsx" else ""
        later = FileSystemOutputs(
            file_system="FILE-SYSTEM", mount_name=mount, group="FILE-SYSTEM-GROUP"
        )
        made = None if spec.storage.kind == "none" else later
        return as_json(render_environment(spec, owner, made, location_in_spec(spec) or LATER))

    def make(self, world: World) -> None:
        files, place = file_system_of(world), network_location(world)
        template = render_environment(world.spec, world.owner, files, place)
        self.create(world, template, Capabilities=["CAPABILITY_IAM"])

    def state(self, world: World) -> State:
        """The stack's, and once it is at rest that of environment and queue themselves."""
        stack, found = super().state(world), condition_of(world)
        for tags in found.tags:
            check_owner(f"queue or environment {environment_name(world.spec)}", tags, world)
        asked = f"{stack.source}; {queries_of(world)}"
        match stack.word, found.word:
            case ("there", "absent"):
                return State(word="failed", reason="queues and environments are gone", source=asked)
            case ("there", _) | ("absent", "absent" | "going"):
                return State(word=found.word, reason=found.reason, source=asked)
            case ("absent", _):
                why = "it is there without its stack; `aws batch delete-job-queue`, then "
                why += f"`delete-compute-environment` remove it. {found.reason}"
                return State(word="failed", reason=why, source=asked)
            case _:
                why = f"{stack.reason} {found.reason}".strip()
                return State(word=stack.word, reason=why, source=asked)

    def in_use_by(self, world: World) -> str:
        """Jobs that wait or run: their queue's end would be theirs."""
        jobs = jobs_of(world)
        if not jobs:
            return ""
        return (
            f"{len(jobs)} jobs are in its queues ({', '.join(jobs[:5])}). End them first "
            "(`shardyard cancel`, `shardyard teardown`), or ask their owners"
        )

    def removal(self, world: World) -> list[Act]:
        return [*close_acts(world.spec), self.deletion(world.spec)]

    def remove(self, world: World) -> None:
        close(world, self.in_use_by)  # each of its acts is waited for, and jobs are looked at again
        self.removal(world)[-1].do(world)


def file_system_of(world: World) -> FileSystemOutputs | None:
    """Read the file system from its stack; None: there is none."""
    if world.spec.storage.kind == "none":
        return None
    return file_system_outputs(stack_outputs(world, FileSystem().stack(world.spec)))
