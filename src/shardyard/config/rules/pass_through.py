"""Rules for what is passed on to a scheduler as it is: labels, annotations, patches and tags."""

import re
from collections.abc import Iterable, Mapping

from shardyard.config.schema.launch import AwsBatch, Kubernetes, Patch
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import show
from shardyard.errors import Problem

_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)"
_NAME = re.compile(rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_VALUE}", re.ASCII)
_OPTIONAL_VALUE = re.compile(rf"{_VALUE}?", re.ASCII)
"""Names and values of labels. Source: kubernetes.io, Labels and Selectors."""
_MOST_ANNOTATION_BYTES = 128 * 1024
"""Half of what an object may have (256 KiB); controllers write some of their own."""

_OURS = re.compile(
    r"(shardyard|(jobset|batch|training|trainer)[a-z0-9.-]*)/.*|job-name|controller-uid"
    r"|app\.kubernetes\.io/(name|instance|managed-by)|scheduling\.k8s\.io/group-name"
    r"|karpenter\.sh/do-not-disrupt|cluster-autoscaler\.kubernetes\.io/safe-to-evict"
)
"""Names that Shardyard or the controller of a job sets."""
_INSTEAD = {
    "kueue.x-k8s.io/queue-name": "launch.kubernetes.queue",
    "kueue.x-k8s.io/podset-preferred-topology": "launch.kubernetes.topology",
    "kueue.x-k8s.io/podset-required-topology": "launch.kubernetes.topology",
}
"""Name of a label or an annotation -> the setting that sets it."""

_AWS_TAG = re.compile(r"[\w .:/=+@-]{1,128}")
_AWS_VALUE = re.compile(r"[\w .:/=+@-]{0,256}")
"""Tags. Source: AWS Batch User Guide, Tag restrictions."""
_MOST_AWS_TAGS = 30
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}", re.ASCII)
_OPERATIONS = ("add", "remove", "replace", "test")


def check_pass_through(recipe: Recipe) -> Iterable[Problem]:
    """Everything that a scheduler would reject, or that belongs to Shardyard."""
    kubernetes = recipe.launch.kubernetes
    for setting in ("labels", "annotations"):
        yield from _notes(setting, getattr(kubernetes, setting))
    for name in recipe.run.tags.keys() & kubernetes.labels.keys():
        text = f"has {name}, which is also a tag in run.tags. Keep one of them."
        yield Problem("launch.kubernetes.labels", text)
    for number, patch in enumerate(kubernetes.patches):
        yield from _patch(f"launch.kubernetes.patches[{number}]", patch, kubernetes)
    yield from _batch(recipe.launch.aws_batch, recipe.run.tags)


def _notes(setting: str, notes: Mapping[str, str]) -> Iterable[Problem]:
    path = f"launch.kubernetes.{setting}"
    for name, value in notes.items():
        if name in _INSTEAD:
            yield Problem(path, f"has {name}. Set {_INSTEAD[name]} instead.")
        elif _OURS.fullmatch(name):
            text = f"has {show(name)}, which Shardyard or the job's controller sets. Leave it out."
            yield Problem(path, text)
        elif not _NAME.fullmatch(name) or (
            setting == "labels" and not _OPTIONAL_VALUE.fullmatch(value)
        ):
            text = (
                f"has {show(name)}: {show(value)}, which Kubernetes rejects. Names, and values of "
                "labels, have at most 63 letters, digits and inner hyphens, dots and underscores; "
                "a name may have a prefix and a slash before it, such as example.com/team."
            )
            yield Problem(path, text)
    size = sum(len(f"{name}{value}".encode(errors="replace")) for name, value in notes.items())
    if size > _MOST_ANNOTATION_BYTES:
        text = f"has {size:,} bytes. Use at most {_MOST_ANNOTATION_BYTES:,}."
        yield Problem(path, text)


def _patch(path: str, patch: Patch, kubernetes: Kubernetes) -> Iterable[Problem]:
    kinds = {"jobset": "JobSet", "trainjob": "TrainJob", "pytorchjob": "PyTorchJob"}
    wanted = kinds[kubernetes.target]
    if patch.kind in kinds.values() and patch.kind != wanted:
        text = f"={patch.kind}, but launch.kubernetes.target={kubernetes.target} creates a {wanted}"
        yield Problem(f"{path}.kind", f"{text}. Use kind: {wanted}.")
    if patch.kind == "PodGroup" and kubernetes.scheduler != "volcano":
        text = "=PodGroup, which only launch.kubernetes.scheduler=volcano creates. Leave it out."
        yield Problem(f"{path}.kind", text)
    if (patch.merge is None) == (not patch.operations):
        text = "has both merge and operations" if patch.operations else "changes nothing"
        example = "merge: {spec: {hostNetwork: true}}"
        yield Problem(path, f"{text}. Give one of merge and operations, such as {example}.")
    if patch.merge is not None and any(name.startswith("$") for name in _keys(patch.merge)):
        text = "has a directive of strategic merges ($patch, $retainKeys), which is not supported."
        yield Problem(f"{path}.merge", f"{text} Use operations.")
    for place, operation in enumerate(patch.operations):
        yield from _operation(f"{path}.operations[{place}]", operation)


def _operation(path: str, operation: Mapping[str, object]) -> Iterable[Problem]:
    kind, at = operation.get("op"), operation.get("path")
    wanted = {"op", "path"} if kind == "remove" else {"op", "path", "value"}
    is_path = isinstance(at, str) and at.startswith("/")
    if kind not in _OPERATIONS or not is_path or operation.keys() != wanted:
        yield Problem(
            path,
            f"cannot be applied: {show(dict(operation))}. Write {{op: OP, path: /spec/FIELD, "
            f"value: VALUE}}; OP is {', '.join(_OPERATIONS)}; remove has no value.",
        )


def _keys(tree: object) -> Iterable[str]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield str(key)
            yield from _keys(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _keys(value)


def _batch(aws_batch: AwsBatch, run_tags: Mapping[str, str]) -> Iterable[Problem]:
    path, tags = "launch.aws_batch.tags", aws_batch.tags
    if len(tags) > _MOST_AWS_TAGS:
        yield Problem(path, f"has {len(tags)} tags. Use at most {_MOST_AWS_TAGS}.")
    for name, value in tags.items():
        if name.lower().startswith(("aws:", "shardyard")) or name in run_tags:
            owner = "run.tags sets" if name in run_tags else "AWS or Shardyard sets"
            yield Problem(path, f"has {show(name)}, which {owner}. Leave it out.")
        elif not _AWS_TAG.fullmatch(name) or not _AWS_VALUE.fullmatch(value):
            text = (
                f"has {show(name)}: {show(value)}, which AWS rejects. Use letters, digits, blanks "
                "and . : / = + @ - _, at most 128 characters in a name and 256 in a value."
            )
            yield Problem(path, text)
    share = aws_batch.share_identifier
    if share is not None and not _SHARE.fullmatch(share):
        text = f"={show(share)} cannot be a share identifier. Use up to 255 letters and digits."
        yield Problem("launch.aws_batch.share_identifier", text)
