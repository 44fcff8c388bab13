"""The sources that are known, each recognised by what is in a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardyard.importers.configs import (
    accelerate,
    deepspeed,
    fsdp,
    kubeflow,
    sagemaker,
    scripts,
    shell,
    torchtitan,
    trainer,
)
from shardyard.importers.configs.rules import Rows, SourceConfig
from shardyard.importers.configs.source_file import ConfigFile


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kind of configuration."""

    name: str
    recognised_by: str
    is_it: Callable[[ConfigFile], bool]
    rows: Rows
    implied: Callable[[SourceConfig], Mapping[str, Any]] = lambda _: {}
    """Defaults of the source for what a file leaves open; Shardyard's may differ."""
    decides: Callable[[SourceConfig], Mapping[str, Any]] = lambda _: {}
    """Values that it sets regardless of the Trainer's arguments."""
    notes: Callable[[SourceConfig], Mapping[str, str]] = lambda _: {}
    """Setting -> what is to be known of a value that no key says."""
    files: Callable[[SourceConfig], Mapping[str, str]] = lambda _: {}
    """Other files that a file names, by the path of the key that does."""
    fills_auto: Callable[[SourceConfig], bool] = lambda _: False
    """Whether it holds the arguments of the Trainer, which fill in DeepSpeed's ``auto``."""


def _has(*marks: str, at_least: int = 1) -> Callable[[ConfigFile], bool]:
    def is_it(file: ConfigFile) -> bool:
        return file.content is not None and len(set(marks) & set(file.content)) >= at_least

    return is_it


def _is_kind(kind: str, group: str) -> Callable[[ConfigFile], bool]:
    def is_it(file: ConfigFile) -> bool:
        content = file.content or {}
        version = str(content.get("apiVersion", ""))
        return content.get("kind") == kind and version.startswith(group)

    return is_it


def _is_torchtitan(file: ConfigFile) -> bool:
    content = file.content or {}
    tables = [name for name in content if isinstance(content[name], dict)]
    return len(torchtitan.MARKS & set(tables)) >= 2 and "training" in tables


def _is_fsdp(file: ConfigFile) -> bool:
    content = file.content or {}
    known = {name for name in fsdp.ROWS if "*" not in name}
    return bool(content) and set(content) <= known | {"xla_fsdp_settings"} and any(
        name.removeprefix("fsdp_")
        in ("transformer_layer_cls_to_wrap", "sharding_strategy", "reshard_after_forward",
            "backward_prefetch", "min_num_params", "auto_wrap_policy")
        for name in content
    )  # fmt: skip


def _named(*paths: str) -> Callable[[SourceConfig], Mapping[str, str]]:
    def files(config: SourceConfig) -> Mapping[str, str]:
        values = {path: config.get(path) for path in paths}
        return {path: value for path, value in values.items() if isinstance(value, str) and value}

    return files


SOURCES = (
    Source(
        name="PyTorchJob",
        recognised_by="kind: PyTorchJob of kubeflow.org/v1",
        is_it=_is_kind("PyTorchJob", "kubeflow.org/"),
        rows=kubeflow.PYTORCHJOB,
        implied=kubeflow.implied,
    ),
    Source(
        name="TrainJob",
        recognised_by="kind: TrainJob of trainer.kubeflow.org/v1alpha1",
        is_it=_is_kind("TrainJob", "trainer.kubeflow.org/"),
        rows=kubeflow.TRAINJOB,
        implied=kubeflow.implied,
    ),
    Source(
        name="accelerate YAML",
        recognised_by="distributed_type or compute_environment",
        is_it=_has(*accelerate.MARKS, at_least=2),
        rows=accelerate.ROWS,
        implied=accelerate.implied,
        files=_named("deepspeed_config.deepspeed_config_file"),
    ),
    Source(
        name="torchtitan TOML",
        recognised_by="[training] and one more of its tables",
        is_it=_is_torchtitan,
        rows=torchtitan.ROWS,
        implied=torchtitan.implied,
    ),
    Source(
        name="Trainer arguments",
        recognised_by="per_device_train_batch_size, num_train_epochs or the like",
        is_it=_has(*trainer.MARKS),
        rows=trainer.ROWS,
        implied=trainer.implied,
        notes=trainer.notes,
        files=_named("deepspeed", "fsdp_config"),
        fills_auto=lambda _: True,
    ),
    Source(
        name="DeepSpeed JSON",
        recognised_by="zero_optimization, train_batch_size or the like",
        is_it=_has(*deepspeed.MARKS),
        rows=deepspeed.ROWS,
        implied=deepspeed.implied,
        decides=deepspeed.decides,
        notes=lambda _: deepspeed.NOTES,
    ),
    Source(
        name="FSDP settings",
        recognised_by="fsdp_transformer_layer_cls_to_wrap, sharding strategy or the like",
        is_it=_is_fsdp,
        rows=fsdp.ROWS,
    ),
    Source(
        name="SageMaker SMP parameters",
        recognised_by="hybrid_shard_degree, pipeline_parallel_degree or the like",
        is_it=lambda file: any(sagemaker.MARKS & set(part) for part in _parts(file.content or {})),
        rows=sagemaker.ROWS,
    ),
    Source(
        name="torchrun line or sbatch script",
        recognised_by="#SBATCH, torchrun, accelerate launch or deepspeed",
        is_it=lambda file: file.content is None and shell.is_start(file.text),
        rows=scripts.ROWS,
        implied=scripts.implied,
        files=scripts.named_files,
        fills_auto=scripts.is_of_trainer,
    ),
)
"""In the order in which they are asked; the first that recognises a file has it."""


def _parts(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the mappings in which the parameters of SMP may be."""
    parts: list[Mapping[str, Any]] = [content]
    for path in (
        ("parameters",),
        ("smdistributed", "modelparallel", "parameters"),
        ("distribution", "smdistributed", "modelparallel", "parameters"),
    ):
        part: Any = content
        for key in path:
            part = part.get(key, {}) if isinstance(part, dict) else {}
        if isinstance(part, dict):
            parts.append(part)
    return parts


def source_of(file: ConfigFile) -> Source | None:
    """Return the source of a file; None: it is of no known source."""
    return next((source for source in SOURCES if source.is_it(file)), None)
