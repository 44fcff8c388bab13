"""Several files are one job: what they say together, and where they contradict each other.

Nodes, devices and processes, micro-batch, accumulation and batch have to fit; a value on the
command line wins over all files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from shardyard.config.optimizers import readers_of
from shardyard.errors import Problem
from shardyard.hardware.catalogue import instance, instance_names
from shardyard.importers.configs.rules import QUANTITIES, Outcome, OutcomeKind, none, values_agree

_MODELS = {"model.preset", "model.hub", "model.path", "model.module"}
_ONE_OF = (
    {"run.steps", "run.epochs", "run.tokens", "run.samples"},
    {"optim.warmup_steps", "optim.warmup_share", "optim.warmup_epochs"},
    {"parallel.zero", "parallel.dp_shard", "parallel.dp_replicate", "parallel.strategy"},
    {"precision.compute", "bf16", "fp16"},
    {"task.eval_every_steps", "task.eval_every_epochs"},
)
"""Groups of settings: a source's default counts only if no setting of its group is given."""


WITH_ANY_ARGUMENTS = "it does so with any arguments of the Trainer"
"""End of the origin of a default that the Trainer's arguments do not change."""


@dataclass(frozen=True, kw_only=True)
class SettingClaim:
    """A value of a setting or quantity, and who says so."""

    name: str
    value: Any
    origin: str
    is_explicit: bool = True
    """By a key; else it is what the source does without one."""
    of_accelerate: bool = False
    has_note: bool = False
    """Written down though it is our default too: something is to be known of it."""

    def __str__(self) -> str:
        return f"{self.value} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class Implied:
    """Defaults of one file's source."""

    origin: str
    values: Mapping[str, Any]
    fills_auto: bool = False
    """Whether it is the Trainer, whose arguments fill in ``auto``."""
    decides: Mapping[str, Any] = field(default_factory=dict)
    """Values that it sets regardless of the Trainer's arguments."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Setting -> what is to be known of its value, as that versions differ."""

    def describe_origin(self, name: str, words: str) -> str:
        """Return the origin of a value, and its note."""
        note = self.notes.get(name)
        return f"{self.origin}: {words}" + (f" ({note})" if note else "")


@dataclass
class CombinedConfig:
    """Combined settings of all files."""

    overrides: Mapping[str, Any]
    """Settings of the command line, by their dotted names."""
    claims: dict[str, SettingClaim] = field(default_factory=dict)
    """Settings and quantities, one claim each."""
    errors: list[Problem] = field(default_factory=list)

    def number(self, name: str) -> int | None:
        """A whole number that is known, from the command line or a file."""
        value = self.overrides.get(name)
        if value is None:
            claim = self.claims.get(name)
            value = None if claim is None else claim.value
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def set(self, name: str, value: Any, *names: str) -> None:
        """A setting that follows from others."""
        known = [self.claims[each].origin for each in names if each in self.claims]
        origin = "; ".join(dict.fromkeys(known)) or "given on the command line"
        if name not in self.overrides:
            self.claims[name] = SettingClaim(name=name, value=value, origin=origin)

    def add_error(self, name: str, text: str) -> None:
        """Something that does not fit together."""
        self.errors.append(Problem(name, text))


def combine(
    outcomes: Sequence[Outcome], implied: Sequence[Implied], overrides: Mapping[str, Any]
) -> CombinedConfig:
    """The job of all outcomes; settings of the command line are left to it."""
    job = CombinedConfig(overrides=overrides)
    said = _collect_claims(outcomes, overrides)
    _prefer_trainer_precision(said, implied)
    for name, claims in said.items():
        job.claims[name] = claims[0]
        others = [claim for claim in claims[1:] if not values_agree(claim.value, claims[0].value)]
        if others:
            told = " and ".join(map(str, dict.fromkeys(map(str, [claims[0], *others]))))
            text = f"the files contradict each other: {told}. Fix one"
            job.add_error(name, text + (f", or give {name}=..." if name not in QUANTITIES else "."))
    for source in implied:
        _decide(job, source)
    for source in sorted(implied, key=lambda each: not each.fills_auto):
        _add_implied(job, source)
    _size(job)
    _batch(job)
    _precision(job)
    _offload(job)
    _sharding(job)
    return job


def resolve_rejected(
    outcomes: Iterable[Outcome], implied: Sequence[Implied], overrides: Mapping[str, Any]
) -> list[Outcome]:
    """Refusals that the command line settles, or an ``auto`` that another file fills in."""
    has_trainer = any(source.fills_auto for source in implied)
    return [
        _resolve_outcome(outcome, set(overrides), has_trainer=has_trainer) for outcome in outcomes
    ]


def _resolve_outcome(outcome: Outcome, overrides: set[str], *, has_trainer: bool) -> Outcome:
    verdict = outcome.result
    if verdict.kind is not OutcomeKind.REFUSED or not verdict.settings:
        return outcome
    names = set(verdict.settings)
    by_another = overrides & _MODELS if names <= _MODELS else set()  # each of them says the model
    if names <= overrides or by_another:
        told = ", ".join(sorted(by_another or names))
        return replace(outcome, result=none(f"{told} of the command line"))
    if verdict.is_open and has_trainer:
        words = f"auto: {', '.join(verdict.settings)} as the Trainer's arguments say"
        return replace(
            outcome, result=replace(verdict, kind=OutcomeKind.MAPPED, words=words, settings={})
        )
    return outcome


def _collect_claims(
    outcomes: Iterable[Outcome], overrides: Mapping[str, Any]
) -> dict[str, list[SettingClaim]]:
    """Setting or quantity -> who says what; without what the command line says."""
    claims: dict[str, list[SettingClaim]] = {}
    for outcome in sorted(outcomes, key=lambda each: each.source == "accelerate YAML"):
        if outcome.result.kind not in (OutcomeKind.MAPPED, OutcomeKind.DEFAULT):
            continue
        for name, value in outcome.result.settings.items():
            if name not in overrides:
                claim = SettingClaim(
                    name=name, value=value, origin=_origin(outcome),
                    of_accelerate=outcome.source == "accelerate YAML"
                    or outcome.entry.path.startswith("accelerate."),
                )  # fmt: skip
                if _is_overridden(outcome, claims.get(name, [])):
                    continue
                claims.setdefault(name, []).append(claim)
    return claims


def _origin(outcome: Outcome) -> str:
    words = outcome.result.words if outcome.result.kind is OutcomeKind.MAPPED else ""
    return f"{outcome.location}; {words}" if words else outcome.location


def _prefer_trainer_precision(
    claims: dict[str, list[SettingClaim]], implied: Sequence[Implied]
) -> None:
    """Its precision wins over accelerate's, where it asks for one; else accelerate's stays."""
    if not any(source.fills_auto for source in implied):
        return
    names = [name for name in ("bf16", "fp16") if name in claims]
    asks = any(c.value and not c.of_accelerate for name in names for c in claims[name])
    for name in names:
        wins = [claim for claim in claims[name] if claim.of_accelerate != asks]
        if wins or asks:
            claims[name] = wins
        if not claims[name]:
            del claims[name]


def _is_overridden(outcome: Outcome, claims: Sequence[SettingClaim]) -> bool:
    """Whether the line of ``accelerate launch`` wins over accelerate's file, as it does there."""
    by_line = any(": accelerate." in claim.origin for claim in claims)
    return outcome.source == "accelerate YAML" and by_line


def _decide(job: CombinedConfig, source: Implied) -> None:
    for name, value in source.decides.items():
        said = job.claims.get(name)
        if name not in job.overrides and (said is None or not said.of_accelerate):
            origin = source.describe_origin(name, WITH_ANY_ARGUMENTS)
            job.claims[name] = SettingClaim(
                name=name, value=value, origin=origin, has_note=name in source.notes
            )


def _add_implied(job: CombinedConfig, source: Implied) -> None:
    known = set(job.claims) | set(job.overrides)
    said = {name for name, claim in job.claims.items() if claim.is_explicit} | set(job.overrides)
    for name, value in source.values.items():
        group = next((group for group in _ONE_OF if name in group), {name})
        if name in known or group & said or not _is_read(job, name):
            continue
        origin = source.describe_origin(name, "its default")
        job.claims[name] = SettingClaim(
            name=name, value=value, origin=origin, is_explicit=False, has_note=name in source.notes
        )


def _is_read(job: CombinedConfig, name: str) -> bool:
    """Whether the optimizer that the job has by now reads a default of another source's."""
    readers = readers_of(name.removeprefix("optim."))
    claim = job.claims.get("optim.name")
    return not readers or claim is None or claim.value in readers


def _size(job: CombinedConfig) -> None:
    """Nodes, devices of each, processes of all."""
    nodes, devices = job.number("cluster.nodes"), job.number("cluster.devices")
    processes = job.number("processes")
    if processes is None:
        return
    if devices is None and _of_instance(job) is not None and nodes is not None:
        devices = _of_instance(job)
    match nodes, devices:
        case int(), int() if nodes * devices != processes:
            told = [job.claims[name] for name in ("cluster.nodes", "cluster.devices", "processes")
                    if name in job.claims]  # fmt: skip
            job.add_error(
                "cluster.devices",
                f"{nodes} nodes of {devices} devices have {nodes * devices} processes, but "
                f"{processes} are requested: {'; '.join(map(str, told))}. Fix one of them, or "
                "give cluster.nodes=... and cluster.devices=...",
            )
        case None, int() if processes % devices == 0:
            job.set("cluster.nodes", processes // devices, "processes", "cluster.devices")
        case int(), None if processes % nodes == 0:
            job.set("cluster.devices", processes // nodes, "processes", "cluster.nodes")
        case None, None:
            job.set("cluster.devices", processes, "processes")
        case int(), int():
            pass
        case _:
            job.add_error(
                "cluster.nodes",
                f"{processes} processes ({job.claims['processes'].origin}) are not a whole number "
                f"for each of {nodes or devices}. Give cluster.nodes=... and cluster.devices=...",
            )


def _of_instance(job: CombinedConfig) -> int | None:
    claim = job.claims.get("cluster.instance")
    name = job.overrides.get("cluster.instance", None if claim is None else claim.value)
    return instance(name).count if name in instance_names() else None


def data_ranks(job: CombinedConfig) -> int | None:
    """Ranks that read samples of their own; None: not known."""
    nodes = job.number("cluster.nodes") or 1
    devices = job.number("cluster.devices") or _of_instance(job)
    if devices is None:
        return None
    others = prod(job.number(f"parallel.{axis}") or 1 for axis in ("tp", "cp", "pp"))
    return nodes * devices // others if nodes * devices % others == 0 else None


def _batch(job: CombinedConfig) -> None:
    """Micro-batch x accumulation x data ranks is the batch of a step."""
    if {"optim.global_batch", "optim.batch_per_device"} & set(job.overrides):
        return
    micro, whole = job.number("optim.micro_batch"), job.number("optim.global_batch")
    steps, ranks = job.number("accumulation_steps"), data_ranks(job)
    if whole is not None:
        _check_batch(job, whole, micro, steps, ranks)
    elif micro is None:
        return
    elif ranks is not None:
        job.set(
            "optim.global_batch", micro * (steps or 1) * ranks,
            "optim.micro_batch", "accumulation_steps", "cluster.devices", "cluster.nodes",
        )  # fmt: skip
    elif any((job.number(f"parallel.{axis}") or 1) > 1 for axis in ("tp", "cp", "pp")):
        job.add_error(
            "cluster.devices",
            f"is not said, and {micro} samples of each data rank are a batch only with it. Give "
            "cluster.devices=... or optim.global_batch=...",
        )
    else:
        job.set(
            "optim.batch_per_device", micro * (steps or 1),
            "optim.micro_batch", "accumulation_steps",
        )  # fmt: skip


def _check_batch(
    job: CombinedConfig, whole: int, micro: int | None, steps: int | None, ranks: int | None
) -> None:
    if micro is None and steps is not None and ranks is not None and whole % (steps * ranks) == 0:
        job.set("optim.micro_batch", whole // steps // ranks, "accumulation_steps")
        return
    if micro is None:
        return
    known = {"optim.micro_batch": micro, "accumulation_steps": steps, "data ranks": ranks}
    parts = {name: value for name, value in known.items() if value is not None}
    product = prod(parts.values())
    is_whole = len(parts) == len(known)
    if (product != whole) if is_whole else whole % product:
        words = " x ".join(f"{value} {QUANTITIES.get(name, name)}" for name, value in parts.items())
        origins = [job.claims[name].origin for name in ("optim.global_batch", *parts)
                   if name in job.claims]  # fmt: skip
        job.add_error(
            "optim.global_batch",
            f"={whole} is not {'' if is_whole else 'a multiple of '}{words} ({product}): "
            f"{'; '.join(dict.fromkeys(origins))}. Fix one of them, or give "
            "optim.global_batch=... and optim.micro_batch=...",
        )


def _precision(job: CombinedConfig) -> None:
    is_bf16, is_fp16 = (job.claims.get(name) for name in ("bf16", "fp16"))
    if "precision.compute" in job.overrides or (is_bf16 is None and is_fp16 is None):
        return
    on = [claim for claim in (is_bf16, is_fp16) if claim is not None and claim.value]
    if len(on) == 2:
        job.add_error(
            "precision.compute",
            f"bf16 and fp16 are both requested: {on[0]} and {on[1]}. Fix one, or give "
            "precision.compute=...",
        )
    asked = on[0].name if on else "fp32"
    said = job.claims.get("precision.compute")
    if said is None:
        job.set("precision.compute", asked, *(claim.name for claim in on or _precision_claims(job)))
    elif on and said.is_explicit and said.value != asked:
        job.add_error("precision.compute", f"{said} and {on[0]} contradict each other. Fix one.")


def _precision_claims(job: CombinedConfig) -> list[SettingClaim]:
    return [job.claims[name] for name in ("bf16", "fp16") if name in job.claims]


def _offload(job: CombinedConfig) -> None:
    for name, value in (("offload_params", "params"), ("offload_optimizer", "optimizer")):
        claim = job.claims.get(name)
        if claim is not None and claim.value:
            if "memory.offload" in job.claims:
                job.add_error(
                    "memory.offload", f"{job.claims['memory.offload']} and {claim}: keep one."
                )
            job.set("memory.offload", value, name)
            return


def _sharding(job: CombinedConfig) -> None:
    """Copies on each device, and parameters split over all, are asked by different keys."""
    zero, shard = job.claims.get("parallel.zero"), job.claims.get("parallel.dp_shard")
    if zero is None or shard is None or not (zero.is_explicit and shard.is_explicit):
        return
    if shard.value == 1 and zero.origin.partition(":")[0] != shard.origin.partition(":")[0]:
        job.add_error(
            "parallel.zero",
            f"the files contradict each other: ZeRO {zero}, and a whole copy on each device "
            f"({shard.origin}). Fix one, or give parallel.zero=... and parallel.dp_shard=...",
        )
