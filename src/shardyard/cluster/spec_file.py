"""Read and check the description of a cluster: files and ``key=value``, merged as a recipe's.

Later ones win. ``OF_KIND`` has the settings that belong to only one kind; another kind rejects
them.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shardyard.cluster.api_access import access_errors
from shardyard.cluster.prices import fsx_usd_per_month
from shardyard.cluster.spec import (
    LARGEST_GROUP,
    MOST_USER_DATA_BYTES,
    STOP_MARGIN_S,
    ClusterSpec,
)
from shardyard.config.load import load_recipe
from shardyard.config.schema.recipe import Recipe
from shardyard.config.schema.reference import section_of
from shardyard.config.secrets import parse_references
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.file_faults import broken_link_on_path
from shardyard.hardware.catalogue import instance
from shardyard.io.yaml import read_yaml
from shardyard.launchers.kubernetes.prerequisites import eks_cluster

OF_KIND: dict[str, tuple[str, ...]] = {
    "eks": (
        "other_zone", "version", "access", "system", "nodes.efa", "storage.claim",
        "storage.namespace",
    ),
    "batch": ("nodes.user_data", "nodes.stop_s", "jobs"),
}  # fmt: skip
"""Kind -> settings, or sections of them, that no other kind reads."""

NEEDED: dict[str, tuple[str, ...]] = {"eks": ("other_zone",)}
"""Kind -> settings that it needs, and others do not."""

OF_A_STANDING_CLUSTER = ("other_zone", "version", "access", "system", "vpc.id")
"""Settings that ``adopt`` reads off the cluster."""

_CAPACITY = re.compile(r"on-demand|spot|(reservation|block):cr-[0-9a-f]{8,17}", re.ASCII)
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", re.ASCII)
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d", re.ASCII)
_SECRET = re.compile(r"arn:aws[a-z-]*:(secretsmanager|ssm):[A-Za-z0-9:/_+=.@-]+", re.ASCII)
_PARAMETER = re.compile(r"[A-Za-z0-9_./-]{1,1011}", re.ASCII)
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()/-]*)?", re.ASCII)


def read_cluster_spec(sources: Sequence[str], *, is_adopted: bool = False) -> ClusterSpec:
    """The cluster of files and ``key=value`` overrides, complete and possible.

    Args:
        sources: A recipe is one, too, as if it were named by ``recipe=``.
        is_adopted: Whether it is there, so that its network and version are not described.

    Raises:
        RequestError: A file cannot be read, or the recipe is wrong.
        RecipeError: Settings are wrong; all of them.
    """
    tree: dict[str, Any] = {}
    for source in sources:
        _merge(tree, _override(source) if _is_override(source) else _file(Path(source)))
    if is_adopted:
        tree = {**_cluster_of_context(tree), **tree}
    errors: list[Problem] = []
    known = _supported_settings(tree, errors)
    errors += _adoption_errors(known) if is_adopted else _missing_errors(known)
    errors += _kind_errors(known)
    try:
        description = ClusterSpec.model_validate(known)
    except ValidationError as error:
        errors += [_problem(detail, known) for detail in error.errors(include_url=False)]
    else:
        description = _with_recipe(description, errors)
        errors += _value_errors(description)
        errors += () if is_adopted else _network_errors(description)
    if errors:
        raise RecipeError(list(dict.fromkeys(errors)), "the cluster")
    return description


def legal_size_gib(size_gib: int) -> int:
    """The size that FSx would make of it (PERSISTENT_2): 1,200, or steps of 2,400 GiB."""
    return 1200 if size_gib <= 1200 else -(-size_gib // 2400) * 2400


def _is_override(source: str) -> bool:
    return bool(re.match(r"[a-z_]+(\.[a-z_]+)*=", source))


def _override(source: str) -> dict[str, Any]:
    name, _, text = source.partition("=")
    value: Any = read_yaml(text, source=f"override {name}", is_file=False)
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def _file(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        unread = (
            f" cannot be read: {why}. Give a YAML file that describes a cluster, or settings such "
            "as name=trainers; docs/verbs/cluster.md lists them."
        )
        raise RequestError(f"cluster file {path}{broken_link_on_path(path) or unread}") from error
    if not isinstance(content, dict):
        raise RequestError(
            f"cluster file {path} holds no settings. Write `name: trainers` and what else "
            "docs/verbs/cluster.md lists."
        )
    is_recipe = bool(content) and content.keys() <= Recipe.model_fields.keys()
    return {"recipe": str(path)} if is_recipe else content


def _cluster_of_context(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Name and region of the EKS cluster that the recipe's context is, where it says so."""
    recipe = tree.get("recipe")
    context = load_recipe(recipe).launch.kubernetes.context if isinstance(recipe, str) else None
    try:
        region, name = eks_cluster(context or "")
    except RequestError:
        return {}
    return {"name": name, "region": region}


def _merge(into: dict[str, Any], tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def settings() -> dict[str, Any]:
    """Dotted name -> setting, as the help and the messages show it."""
    return {
        setting.name.removeprefix("cluster."): setting
        for setting in section_of("cluster", ClusterSpec).settings
    }


def _supported_settings(
    tree: Mapping[str, Any], errors: list[Problem], at: str = ""
) -> dict[str, Any]:
    """The part of a tree whose names there are; what is unknown becomes a problem."""
    import difflib

    names, found = list(settings()), {}
    for key, value in tree.items():
        path = f"{at}{key}"
        inside = [name for name in names if name.startswith(f"{path}.")]
        if path in names:
            found[key] = value
        elif inside and isinstance(value, dict):
            found[key] = _supported_settings(value, errors, f"{path}.")
        elif inside:
            errors.append(
                Problem(path, f"={value} must have settings inside. Write `{inside[0]}=...`.")
            )
        else:
            near = difflib.get_close_matches(path, names, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
            errors.append(Problem(path, f"unknown setting of a cluster. {hint}"))
    return found


def _kind_errors(tree: Mapping[str, Any]) -> list[Problem]:
    """Settings that the kind does not read."""
    kind, found = tree.get("kind", "eks"), []
    for other, names in OF_KIND.items() if kind in OF_KIND else ():
        for name in names if other != kind else ():
            if _value(tree, name) is not None:
                text = f"belongs to kind={other}, and this is kind={kind}. Leave it out."
                found.append(Problem(name, text))
    return found


def _missing_errors(tree: Mapping[str, Any]) -> list[Problem]:
    """Settings that the kind needs."""
    found = []
    for name in NEEDED.get(tree.get("kind", "eks"), ()):
        if _value(tree, name) is None:
            text = f"is missing: {settings()[name].sentence} Give it in a file, or as {name}=..."
            found.append(Problem(name, text))
    return found


def _adoption_errors(tree: Mapping[str, Any]) -> list[Problem]:
    """Settings that say how a cluster is made, of one that is there."""
    found = []
    if tree.get("kind", "eks") != "eks":
        text = f"={tree['kind']}: only an EKS cluster is adopted. Leave it out, or use `create`."
        found.append(Problem("kind", text))
    for name in OF_A_STANDING_CLUSTER:
        if _value(tree, name) is not None:
            text = "is read off the cluster, which is there. Leave it out."
            found.append(Problem(name, text))
    return found


def _value(tree: Mapping[str, Any], name: str) -> Any:
    """Return a tree's value at a dotted name; None: there is none."""
    value: Any = tree
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _problem(detail: Any, tree: Mapping[str, Any]) -> Problem:
    parts = [str(part) for part in detail["loc"]]
    known = settings()
    path = next(
        name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known
    )
    setting, value = known[path], tree
    for part in path.split("."):
        if part not in value:
            text = f"is missing: {setting.sentence} Give it in a file, or as {path}=..."
            return Problem(path, text)
        value = value[part]
    return Problem(path, f"={value} is not {setting.accepts}. ({setting.sentence})")


def _with_recipe(spec: ClusterSpec, errors: list[Problem]) -> ClusterSpec:
    """Fill in from the recipe what the description leaves out."""
    recipe = load_recipe(spec.recipe or ())
    if spec.kind == "batch":
        spec = _with_jobs(spec, recipe)
    nodes, cluster = spec.nodes, recipe.cluster
    if spec.recipe is not None:
        nodes = nodes.model_copy(
            update={
                "instance": nodes.instance or cluster.instance,
                "max": nodes.max or max(cluster.nodes, nodes.count),
                "capacity": nodes.capacity or cluster.capacity,
            }
        )
    if nodes.instance is None:
        text = "is missing, and no recipe says it. Name an EC2 type, such as p5.48xlarge."
        errors.append(Problem("nodes.instance", text))
        return spec
    try:
        instance(nodes.instance)
    except RequestError as error:
        text = str(error).partition(" ")[2]
        errors.append(Problem("nodes.instance", f"={nodes.instance} {text}"))
        return spec.model_copy(update={"nodes": nodes.model_copy(update={"instance": None})})
    whole = {"max": nodes.max or LARGEST_GROUP, "capacity": nodes.capacity or "on-demand"}
    nodes = nodes.model_copy(update=whole)
    return spec.model_copy(update={"nodes": nodes})


def _with_jobs(spec: ClusterSpec, recipe: Recipe) -> ClusterSpec:
    """Add what containers of this recipe need: time to drain, and its secrets."""
    stop_s = spec.nodes.stop_s or int(recipe.elastic.drain_timeout_s) + STOP_MARGIN_S
    secrets = spec.jobs.secrets
    if secrets is None:
        found = parse_references(recipe.secrets).items()
        places = [(one.kind, one.name or name) for name, one in found]
        # The name of a secret is refused by `launch`, which says what to write.
        secrets = tuple(
            place
            for kind, place in places
            if kind == "ssm" or (kind == "aws-sm" and place.startswith("arn:"))
        )
    return spec.model_copy(
        update={
            "nodes": spec.nodes.model_copy(update={"stop_s": stop_s}),
            "jobs": spec.jobs.model_copy(update={"secrets": secrets}),
        }
    )


def _value_errors(spec: ClusterSpec) -> list[Problem]:
    return [
        *_name_errors(spec), *_node_errors(spec), *_storage_errors(spec),
        *access_errors(spec.access),
        *(_batch_errors(spec) if spec.kind == "batch" else ()),
    ]  # fmt: skip


def _name_errors(spec: ClusterSpec) -> list[Problem]:
    found = []
    if not _NAME.fullmatch(spec.name):
        text = (
            f"={spec.name} cannot be a cluster's name. It becomes part of the names of stacks and "
            "roles: use at most 40 lower-case letters, digits and hyphens, a letter first."
        )
        found.append(Problem("name", text))
    if not _REGION.fullmatch(spec.region):
        text = f"={spec.region} is not an AWS region. Write it as us-east-1."
        found.append(Problem("region", text))
    for key, zone in zip(("zone", "other_zone"), spec.zones, strict=False):
        if not re.fullmatch(re.escape(spec.region) + r"[a-z]", zone):
            text = f"={zone} is not a zone of {spec.region}. Write it as {spec.region}a."
            found.append(Problem(key, text))
    if spec.zone == spec.other_zone:
        text = (
            f"={spec.other_zone} is zone, too. The control plane of EKS needs subnets in two "
            "zones. Name another."
        )
        found.append(Problem("other_zone", text))
    return found


def _network_errors(spec: ClusterSpec) -> list[Problem]:
    vpc = spec.vpc
    if vpc.id is None and vpc.subnets:
        text = "are given and vpc.id is not. Give both, or neither for a new network."
        return [Problem("vpc.subnets", text)]
    if vpc.id is None:
        return []
    found = []
    if not re.fullmatch(r"vpc-[0-9a-f]{8,17}", vpc.id):
        found.append(
            Problem("vpc.id", f"={vpc.id} is not a VPC. Write it as vpc-0123456789abcdef0.")
        )
    wanted = set(spec.zones)
    if vpc.subnets.keys() != wanted:
        text = (
            f"names {', '.join(sorted(vpc.subnets)) or 'no zone'}. Give one private subnet of each "
            f"of {', '.join(sorted(wanted))}: {{{spec.zone}: subnet-...}}."
        )
        found.append(Problem("vpc.subnets", text))
    for subnet in vpc.subnets.values():
        if not re.fullmatch(r"subnet-[0-9a-f]{8,17}", subnet):
            text = f"={subnet} is not a subnet. Write it as subnet-0123456789abcdef0."
            found.append(Problem("vpc.subnets", text))
    return found


WITHOUT_DRIVERS = ("p3", "g3", "dl1")
"""Families for which EKS's own AL2023 images are not known to have drivers: Volta and Gaudi 1."""


def _node_errors(spec: ClusterSpec) -> list[Problem]:
    nodes, found = spec.nodes, []
    if not _CAPACITY.fullmatch(nodes.capacity or "on-demand"):
        text = (
            f"={nodes.capacity} is not a capacity. Use on-demand, spot, reservation:cr-... or "
            "block:cr-.... The EC2 console shows the id of a reservation, which begins with cr-."
        )
        found.append(Problem("nodes.capacity", text))
    if nodes.max is not None and nodes.count > nodes.max:
        text = f"={nodes.count} is more than nodes.max={nodes.max}. Lower it, or raise nodes.max."
        found.append(Problem("nodes.count", text))
    if nodes.ami is not None and not re.fullmatch(r"ami-[0-9a-f]{8,17}", nodes.ami):
        found.append(
            Problem("nodes.ami", f"={nodes.ami} is not an image. Write it as ami-0123abcd.")
        )
    if nodes.instance is None:
        return found
    if nodes.efa is True and not spec.instance.efa_count:
        text = f"=true but {nodes.instance} has no Elastic Fabric Adapter. Leave it out."
        found.append(Problem("nodes.efa", text))
    if nodes.instance.partition(".")[0] in WITHOUT_DRIVERS and nodes.ami is None:
        text = (
            f"is missing: AWS's own Amazon Linux 2023 images have no drivers for "
            f"{spec.instance.accelerator.name}. Give an image that has them"
            + (", one of ECS." if spec.kind == "batch" else f"{_nvidia_image(spec)}.")
        )
        found.append(Problem("nodes.ami", text))
    return found


def _nvidia_image(spec: ClusterSpec) -> str:
    """Say how to find EKS's image for NVIDIA, for Volta; empty: it is not for these devices.

    It has both kernel modules of NVIDIA and takes one by the instance type. Source: maintainers of
    awslabs/amazon-eks-ami in its issue 2095, and in aws/amazon-ecs-ami, pull request 370.
    """
    if spec.instance.accelerator.device != "cuda":
        return ""
    name = f"{spec.version}/amazon-linux-2023/x86_64/nvidia/recommended/image_id"
    return (
        ", such as the one for NVIDIA that EKS publishes: nodes.ami=$(aws ssm get-parameter --name "
        f"/aws/service/eks/optimized-ami/{name} --region {spec.region} --query Parameter.Value "
        "--output text)"
    )


def _storage_errors(spec: ClusterSpec) -> list[Problem]:
    storage, found = spec.storage, []
    if storage.bucket is not None and storage.kind != "fsx":
        text = f"={storage.bucket} is read only with storage.kind=fsx. Leave it out, or use fsx."
        found.append(Problem("storage.bucket", text))
    elif storage.bucket is not None and not _BUCKET.fullmatch(storage.bucket):
        text = f"={storage.bucket} is not a bucket. Write it as s3://my-bucket/prefix."
        found.append(Problem("storage.bucket", text))
    legal = legal_size_gib(storage.size_gib)
    if storage.kind == "fsx" and storage.size_gib != legal:
        usd = fsx_usd_per_month(legal, storage.mb_per_s_per_tib)
        price = "" if usd is None else f", ${usd:,.0f} a month"
        text = (
            f"={storage.size_gib} is not a size of FSx for Lustre, which would make it {legal} and "
            f"bill that{price}. Give {legal}, or the step below."
        )
        found.append(Problem("storage.size_gib", text))
    for key in ("claim", "namespace"):
        name = getattr(storage, key)
        if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
            text = (
                f"={name} is not a valid name in Kubernetes. Use lower-case letters, digits and "
                "hyphens."
            )
            found.append(Problem(f"storage.{key}", text))
    return found


def _batch_errors(spec: ClusterSpec) -> list[Problem]:
    """Find what AWS Batch cannot do for a job of several nodes, or would silently do wrong."""
    nodes, found = spec.nodes, []
    if nodes.capacity == "spot":
        text = (
            "=spot: Batch runs no multi-node job on Spot instances. Use on-demand, a reservation "
            "or a capacity block."
        )
        found.append(Problem("nodes.capacity", text))
    if nodes.instance is not None and spec.instance.accelerator.device not in ("cuda", "hpu"):
        name = spec.instance.accelerator.name
        text = f"={nodes.instance}: a run on {name} can be planned, not trained yet. Name another."
        found.append(Problem("nodes.instance", text))
    script = nodes.user_data
    if script is not None and not script.startswith(("#!", "#cloud-config\n")):
        text = (
            "begins with neither #! nor a line #cloud-config, by which instances know how to run "
            "it. Begin a script with #!/bin/sh."
        )
        found.append(Problem("nodes.user_data", text))
    if script is not None and len(script.encode()) > MOST_USER_DATA_BYTES:
        text = (
            f"has {len(script.encode()):,} bytes, and EC2 takes {MOST_USER_DATA_BYTES:,} in "
            "addition to ours. Let it download long parts, for example from S3."
        )
        found.append(Problem("nodes.user_data", text))
    bucket = spec.jobs.bucket
    if bucket is not None and not _BUCKET.fullmatch(bucket):
        text = f"={bucket} is not a bucket. Write it as s3://my-bucket/prefix."
        found.append(Problem("jobs.bucket", text))
    for secret in spec.jobs.secrets or ():
        if not (_SECRET if secret.startswith("arn:") else _PARAMETER).fullmatch(secret):
            text = (
                f"has {secret}, which is neither the ARN of a secret nor the name of an SSM "
                "parameter. `aws secretsmanager describe-secret --secret-id NAME` prints the ARN."
            )
            found.append(Problem("jobs.secrets", text))
    return found
