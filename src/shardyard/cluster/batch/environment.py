"""The parts of a cluster of ``kind: batch`` beside the file system: its network, and its queues."""

from shardyard.cluster.batch.queue import (
    asked_of,
    close,
    closing,
    condition_of,
    jobs_of,
    place_of,
)
from shardyard.cluster.batch.stack import environment_name, render_environment, stack_name
from shardyard.cluster.clients import Act, World
from shardyard.cluster.fsx import Made, as_json, made_of
from shardyard.cluster.network import LATER, network_stack_name, place_named, render_network
from shardyard.cluster.orphans import details_of_network
from shardyard.cluster.resources import FileSystem, Stack, State, refuse_foreign, stack_outputs
from shardyard.cluster.spec import Description


class Network(Stack):
    """A network of its own, where the description names none."""

    kind = "network"

    def stack(self, given: Description) -> str:
        return network_stack_name(given)

    def text(self, given: Description, owner: str) -> str:
        return as_json(render_network(given, owner))

    def make(self, world: World) -> None:
        zone = {"ParameterKey": "Zone", "ParameterValue": world.given.zone}
        self.create(world, render_network(world.given, world.owner), Parameters=[zone])

    def details(self, world: World) -> dict[str, str]:
        network = details_of_network(stack_outputs(world, self.stack(world.given)))
        return {**super().details(world), **network}

    def removal(self, world: World) -> list[Act]:
        return [self.deletion(world.given)]


class Environment(Stack):
    """Queues and compute environments of AWS Batch, with all that they need."""

    kind = "batch environment"

    def stack(self, given: Description) -> str:
        return stack_name(given)

    def text(self, given: Description, owner: str) -> str:
        mount = "MOUNT-NAME" if given.storage.kind == "fsx" else ""
        later = Made(file_system="FILE-SYSTEM", mount_name=mount, group="FILE-SYSTEM-GROUP")
        made = None if given.storage.kind == "none" else later
        return as_json(render_environment(given, owner, made, place_named(given) or LATER))

    def make(self, world: World) -> None:
        files, place = file_system_of(world), place_of(world)
        template = render_environment(world.given, world.owner, files, place)
        self.create(world, template, Capabilities=["CAPABILITY_IAM"])

    def state(self, world: World) -> State:
        """The stack's, and once it is at rest that of environment and queue themselves."""
        stack, found = super().state(world), condition_of(world)
        for tags in found.tags:
            refuse_foreign(f"queue or environment {environment_name(world.given)}", tags, world)
        asked = f"{stack.asked}; {asked_of(world)}"
        match stack.word, found.word:
            case ("there", "absent"):
                return State(word="failed", why="queues and environments are gone", asked=asked)
            case ("there", _) | ("absent", "absent" | "going"):
                return State(word=found.word, why=found.why, asked=asked)
            case ("absent", _):
                why = "it is there without its stack; `aws batch delete-job-queue`, then "
                why += f"`delete-compute-environment` remove it. {found.why}"
                return State(word="failed", why=why, asked=asked)
            case _:
                why = f"{stack.why} {found.why}".strip()
                return State(word=stack.word, why=why, asked=asked)

    def held_by(self, world: World) -> str:
        """Jobs that wait or run: their queue's end would be theirs."""
        jobs = jobs_of(world)
        if not jobs:
            return ""
        return (
            f"{len(jobs)} jobs are in its queues ({', '.join(jobs[:5])}). End them first "
            "(`shardyard cancel`, `shardyard teardown`), or ask their owners"
        )

    def removal(self, world: World) -> list[Act]:
        return [*closing(world.given), self.deletion(world.given)]

    def remove(self, world: World) -> None:
        close(world, self.held_by)  # each of its acts is waited for, and jobs are looked at again
        self.removal(world)[-1].do(world)


def file_system_of(world: World) -> Made | None:
    """What the file system's stack says; None: there is none."""
    if world.given.storage.kind == "none":
        return None
    return made_of(stack_outputs(world, FileSystem().stack(world.given)))
