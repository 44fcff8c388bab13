"""What a launch by ssh asks of its hosts: their list, the job, and what a dry run shows. Pure but
for the hostfile, which is read.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardyard.config.schema.launch import Ssh
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.config.ssh_hosts import SshHost, hosts_of
from shardyard.errors import Problem, RecipeError
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.ssh.client import SshClient
from shardyard.launchers.ssh.node_job import SshJob
from shardyard.own_processes import ISOLATED, word

_SIDE_MODULE, _NODE_MODULE = "shardyard.node.side_job", "shardyard.node"


def machine_settings(recipe: Recipe) -> list[str]:
    """Return all listed hosts, and the fewest slots of them, unless the recipe says otherwise."""
    hosts, problems = hosts_of(recipe.launch.ssh)
    cluster = recipe.cluster
    if problems:
        return []
    given = cluster.model_fields_set
    found = [] if "nodes" in given else [f"cluster.nodes={len(hosts)}"]
    used = hosts if "nodes" not in given else hosts[: cluster.nodes]
    slots = [host.slots for host in used if host.slots is not None]
    is_open = "devices" not in given and not (cluster.instance or cluster.file)
    if is_open and used and len(slots) == len(used):
        found.append(f"cluster.devices={min(slots)}")
    return found


def checked_hosts(request: LaunchRequest) -> tuple[SshHost, ...]:
    """Return the listed hosts, at least as many as nodes.

    Raises:
        RecipeError: The list has problems, or too few hosts, or hosts with too few slots.
    """
    ssh = request.recipe.launch.ssh
    hosts, problems = hosts_of(ssh)
    setting = "launch.ssh.hosts" if ssh.hostfile is None else f"launch.ssh.hostfile={ssh.hostfile}"
    if not problems and len(hosts) < request.nodes:
        text = (
            f"={request.nodes}, but {setting} names {len(hosts)} host{'s' * (len(hosts) > 1)}: one "
            f"node runs on each. Set cluster.nodes={len(hosts)}, or add hosts."
        )
        problems.append(Problem("cluster.nodes", text))
    if request.side is None:
        for host in hosts[: request.nodes]:
            if host.slots is not None and host.slots < request.devices_per_node:
                text = (
                    f"={request.devices_per_node}, but {setting} says {host.text} "
                    f"slots={host.slots}. Set cluster.devices={host.slots}, or leave the host out."
                )
                problems.append(Problem("cluster.devices", text))
    if problems:
        raise RecipeError(problems)
    return hosts


def job_of(request: LaunchRequest, hosts: Sequence[SshHost]) -> SshJob:
    """Return the task of the hosts; its port and session are settled by the submission."""
    recipe, fewest = request.recipe, request.recipe.elastic.min_nodes
    side = [] if request.side is None else ["--side", request.side.to_text()]
    return SshJob(
        module=_NODE_MODULE if request.side is None else _SIDE_MODULE,
        words=["--run-dir", request.run_dir, *side],
        nodes=len(hosts),
        hosts=[host.text for host in hosts],
        rendezvous=f"{recipe.launch.ssh.rendezvous_host or hosts[0].name}:PORT",
        session="SESSION",
        env=request.environment,
        drain_timeout_s=recipe.elastic.drain_timeout_s,
        time_limit_s=request.time_limit_s,
        is_side=request.side is not None,
        outlives_nodes=request.side is None and fewest != "auto" and fewest < request.nodes,
    )


def content_of(job: SshJob, request: LaunchRequest) -> dict[str, Any]:
    """Return all that a submission needs, as plain values; no secret is among them."""
    recipe, ssh = request.recipe, request.recipe.launch.ssh
    return {
        **asdict(job),
        "run_dir": request.run_dir,
        "python": python_of(ssh),
        "config_file": ssh.config_file,
        "rendezvous_host": ssh.rendezvous_host,
        "rendezvous_port": ssh.rendezvous_port,
        "device": recipe.cluster.device,
        "devices": request.devices_per_node,
        "secrets": _kept_in_env(recipe),
    }


def python_of(ssh: Ssh) -> str:
    """Return the Python of the hosts."""
    return sys.executable if ssh.python == "auto" else ssh.python


def _kept_in_env(recipe: Recipe) -> dict[str, str]:
    """Secrets that are kept in the environment of this command -> their variables."""
    return {
        name: reference.name or name
        for name, reference in parse_references(recipe.secrets).items()
        if reference.kind == "env"
    }


def warnings(request: LaunchRequest, unused: Sequence[SshHost]) -> tuple[str, ...]:
    """Return warnings about settings that are allowed but may be regretted.

    Args:
        unused: Listed hosts on which no node runs.
    """
    found = []
    if request.side is not None:
        given = request.recipe.launch.side.model_fields_set
        names = ", ".join(f"launch.side.{name}" for name in sorted(given))
        found += [f"{names}: not used by ssh, where a side job has the whole host."] * bool(given)
    elif unused:
        names = ", ".join(host.text for host in unused)
        found.append(
            f"{names}: not used, as cluster.nodes={request.nodes}. To use all hosts, set "
            f"cluster.nodes={request.nodes + len(unused)}."
        )
    if request.recipe.launch.image is not None:
        found.append(
            f"launch.image={request.recipe.launch.image} is not used by ssh: the hosts run their "
            "own Python (launch.ssh.python)."
        )
    return tuple(found)


def script(
    job: SshJob, content: Mapping[str, Any], hosts: Sequence[SshHost], recipe_text: str
) -> str:
    """Return the script for a person: how hosts are asked, the commands, and their recipe."""
    client = SshClient(python=content["python"], config_file=content["config_file"])
    folder = f"{content['run_dir']}/logs/job-<k>"
    lines = [
        f"# JOB is the next {word(folder)}, PORT a free one of {word(hosts[0].name)}.",
        *(f"export {name}={word(value)}" for name, value in sorted(job.env.items())),
    ]
    program = [content["python"], *ISOLATED, job.module]
    for rank, host in enumerate(hosts):
        asked = " ".join(map(word, client.command(host)))
        node = " ".join(map(word, [*program, "JOB/recipe.yaml", *job.words, *job.place(rank)]))
        lines += [
            "",
            f"# node {rank} on {word(host.text)}: started by this, with a request on stdin",
            asked,
            f"# there, detached: {node} >> JOB/node-{rank}.log 2>&1",
        ]
    return "\n".join([*lines, "", "# JOB/recipe.yaml", recipe_text])
