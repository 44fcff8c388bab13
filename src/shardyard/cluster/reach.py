"""How kubectl and helm reach a cluster: by a kubeconfig of this very cluster, or not at all.

A kubeconfig of another cluster would show no pods where some run, and change what is not ours. So
before each program EKS is asked where the cluster answers, and the file has to say the same.
"""

from typing import Any

from shardyard.cluster.world import World
from shardyard.errors import AccessError, RequestError, ShardyardError
from shardyard.io.files import parse_json
from shardyard.io.yaml import read_yaml
from shardyard.log import say

_NOT_ANSWERING = ("CREATING", "DELETING")


def kubectl_json(world: World, *words: str) -> dict[str, Any] | None:
    """What kubectl gets; None: there is nothing of the kind and name, or no cluster.

    Raises:
        RequestError: The kubeconfig names another cluster.
    """
    cluster = cluster_that_answers(world)
    if cluster is None:
        return None
    text = _run(world, cluster, ("kubectl", "get", *words, "--ignore-not-found", "-o", "json"))
    found: dict[str, Any] | None = parse_json(text) if text.strip() else None
    return found


def in_cluster(world: World, argv: tuple[str, ...]) -> str:
    """What kubectl or helm prints, run against this cluster and no other.

    Raises:
        RequestError: The kubeconfig names another cluster.
        ShardyardError: There is no cluster, or the program failed.
    """
    given = world.given
    cluster = cluster_that_answers(world)
    if cluster is None:
        raise ShardyardError(
            f"there is no cluster {given.name} in {given.region} that answers, says EKS, so "
            f"`{argv[0]}` was not run. Look with `shardyard cluster show {given.name}`."
        )
    return _run(world, cluster, argv)


def _run(world: World, cluster: dict[str, Any], argv: tuple[str, ...]) -> str:
    given = world.given
    if not world.kubeconfig.exists():
        say(f"{world.kubeconfig} is not there; it is written anew")
        world.run(
            ["eksctl", "utils", "write-kubeconfig", "--cluster", given.name,
             "--region", given.region, "--kubeconfig", str(world.kubeconfig)]
        )  # fmt: skip
    _refuse_other_cluster(world, cluster)
    return world.run([*argv, "--kubeconfig", str(world.kubeconfig)])


def cluster_that_answers(world: World) -> dict[str, Any] | None:
    """What EKS says of the cluster of this name; None: there is none, or it does not answer yet."""
    answer = world.ask("eks", "describe_cluster", name=world.given.name)
    if answer is None or answer["cluster"]["status"] in _NOT_ANSWERING:
        return None
    cluster: dict[str, Any] = answer["cluster"]
    return cluster if cluster.get("endpoint") else None


def _refuse_other_cluster(world: World, cluster: dict[str, Any]) -> None:
    named, wanted = _server(world), str(cluster["endpoint"])
    if named.rstrip("/").lower() == wanted.rstrip("/").lower():
        return
    account = account_of(str(cluster.get("arn", "")))
    raise RequestError(
        f"{world.kubeconfig} names {named or 'no cluster'}, and {world.given.name} of account "
        f"{account} in {world.given.region} answers at {wanted}: the file is another cluster's, or "
        "of one that is gone. Nothing was asked or changed there. Move the file away and run the "
        "same command again, which writes it anew."
    )


def _server(world: World) -> str:
    """The server that the file's current context names; empty: none."""
    try:
        config = _kubeconfig(world)
        contexts = {one["name"]: one["context"] for one in config["contexts"]}
        clusters = {one["name"]: one["cluster"] for one in config["clusters"]}
        server = clusters[contexts[config["current-context"]]["cluster"]]["server"]
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return ""
    return str(server)


def context_of(world: World) -> str:
    """The current context of the cluster's kubeconfig; empty: there is none."""
    try:
        return str(_kubeconfig(world)["current-context"])
    except (OSError, ValueError, KeyError, TypeError, RequestError):
        return ""


def _kubeconfig(world: World) -> Any:
    text = world.kubeconfig.read_text(encoding="utf-8")
    return read_yaml(text, source=str(world.kubeconfig))


def account_of(arn: str) -> str:
    """The account that an ARN names; empty: none."""
    parts = arn.split(":")
    return parts[4] if len(parts) > 5 else ""


def refuse_other_account(world: World) -> None:
    """That nobody takes "it is not in my account" for "it is gone".

    Raises:
        AccessError: The credentials are another account's than those it was made with.
    """
    made = {entry.details["account"] for entry in world.ledger.all() if "account" in entry.details}
    if not made:
        return
    answer = world.ask("sts", "get_caller_identity") or {}
    account = str(answer.get("Account", ""))
    if made == {account}:
        return
    raise AccessError(
        f"{world.given.name} was made in account {', '.join(sorted(made))}, says "
        f"{world.ledger.path}, and these credentials are of account {account}, where nothing of it "
        "would be found. Nothing was done. Take the credentials of that account (AWS_PROFILE), "
        "and check with `aws sts get-caller-identity`."
    )
