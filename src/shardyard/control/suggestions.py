"""Suggest changes of a recipe: levers of memory and time, and techniques to split a model.

Each suggestion names the settings that it takes.

Which levers: those of torchtune's overview of memory optimisation (packing, compile,
chunked loss, activation checkpointing and offloading, low-precision optimizer states,
gradient accumulation, LoRA). Which techniques: those of SageMaker's model parallelism
library (sharded data parallelism with a hybrid degree, optimizer-state sharding, tensor and
expert parallelism, activation checkpointing and offloading). Pipelines, context parallelism
and 8-bit formats are added.

The planner predicts their effects; this module predicts none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardyard.config.fingerprint import may_change
from shardyard.config.formulas import LOSS_CHUNK
from shardyard.config.rules.check import load_checked_recipe
from shardyard.config.rules.layout import requested_zero
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import unit_of
from shardyard.control.past_runs import PastRuns
from shardyard.control.request import Request
from shardyard.control.what_if import Replanned, Replanner
from shardyard.errors import RecipeError, RequestError, ShardyardError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.machine import Machine
from shardyard.planner.plan import Plan, planned_cluster
from shardyard.planner.plan_diff import IN_USE, Advice, Change, PlanDiff, diff_plans
from shardyard.planner.ranks import RankPlacement
from shardyard.report.next_steps import Lever
from shardyard.report.run_data import RunRecord

LORA_RANK = 16
"""Rank that is tried where a recipe has no adapters."""

_DEGREES = (1, 2, 4, 8)
"""Degrees of an axis that are tried."""

_RECOMPUTE = {
    "none": "all activations are kept",
    "selective": "what is cheap is made again in the backward pass, matrix products are kept",
    "full": "of each block its input is kept, and the rest is made again in the backward pass",
}
_OFFLOAD = {
    "none": "no data waits in host memory",
    "activations": "activations wait in host memory for the backward pass",
    "optimizer": "the optimizer's averages wait in host memory for the update",
    "params": "weights, gradients and averages wait in host memory until they are needed",
}
_STRATEGIES = {
    "NO_SHARD": ("data parallel", "every device holds a whole copy of the model"),
    "ZERO_1": ("ZeRO-1", "the optimizer's state is split over the data ranks"),
    "ZERO_2": ("ZeRO-2", "the optimizer's state and gradients are split"),
    "FULL_SHARD": ("ZeRO-3", "parameters are split too, and gathered block by block"),
    "HYBRID_SHARD": ("hybrid", "ZeRO-3 inside a node, a whole copy on each node"),
}
_AXES = {
    "tp": ("tensor parallel", "each matrix is split, and the tokens between matrices"),
    "pp": ("pipeline", "blocks are dealt over stages, which hand micro-batches on"),
    "cp": ("context parallel", "each sample is split by its tokens"),
    "ep": ("expert parallel", "experts are dealt over ranks, tokens go to them and back"),
}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change that is to be planned."""

    name: str
    what: str
    """Description of what is then done, for any model."""
    choices: tuple[tuple[str, ...], ...] = ()
    """Settings, as overrides; of several the best one is reported."""
    needless: str = ""
    """Reason that there is no change to plan; else empty."""


def levers(requested: Recipe, resolved: Recipe) -> Iterator[Suggestion]:
    """Settings that trade memory against time, on the same devices in the same layout.

    Args:
        requested: The recipe with what it leaves open.
        resolved: What it came to.
    """
    yield from _packing(requested, resolved)
    compiled = resolved.model.compile is True
    yield _ask(
        "without compile" if compiled else "compile",
        "operators run one by one" if compiled else "each block is compiled by torch.compile",
        f"model.compile={str(not compiled).lower()}",
    )
    yield from _chunks(resolved)
    yield from recompute(resolved)
    yield from offload(requested, resolved)
    states = "bf16" if resolved.precision.optimizer_states == "fp32" else "fp32"
    what = f"its averages are held in {states} between steps"
    yield _ask(f"{states} optimizer state", what, f"precision.optimizer_states={states}")
    yield from _micro_batches(resolved)
    yield from lora(resolved)


def techniques(requested: Recipe, resolved: Recipe) -> Iterator[Suggestion]:
    """Ways to split the model and the work, and what is combined with them.

    Args:
        requested: The recipe with what it leaves open.
        resolved: What it came to.
    """
    for strategy, (name, what) in _STRATEGIES.items():
        yield Suggestion(name=name, what=what, choices=((*_on_strategy(requested, strategy),),))
    for axis, (name, what) in _AXES.items():
        now = getattr(resolved.parallel, axis)
        others = [degree for degree in _DEGREES if degree != now]
        yield Suggestion(
            name=f"{name} {now} is used; other degrees" if now > 1 else name,
            what=what,
            choices=tuple(_with_degree(requested, resolved, axis, degree) for degree in others),
        )
    yield from recompute(resolved)
    yield from offload(requested, resolved)
    yield from lora(resolved)
    if resolved.precision.compute == "fp8":
        yield _ask("bf16", "matrix products in 16 bits", "precision.compute=bf16")
    else:
        yield _ask("fp8", "matrix products in 8 bits", "precision.compute=fp8")


def recompute(resolved: Recipe) -> Iterator[Suggestion]:
    """Other modes of recompute than the recipe's."""
    for mode, what in _RECOMPUTE.items():
        if mode != resolved.memory.recompute:
            yield _ask(f"recompute {mode}", what, f"memory.recompute={mode}")


def offload(requested: Recipe, resolved: Recipe) -> Iterator[Suggestion]:
    """Yield what else could wait in host memory."""
    is_open = requested_zero(requested.parallel) is None and resolved.parallel.zero == 3
    for kind, what in _OFFLOAD.items():
        if kind == resolved.memory.offload:
            continue
        # what lies on the host is gathered block by block, and the recipe has to say so
        zero = ("parallel.zero=3",) if kind == "params" and is_open else ()
        yield _ask(f"offload {kind}", what, f"memory.offload={kind}", *zero)


def lora(resolved: Recipe) -> Iterator[Suggestion]:
    """Adapters, or the whole model again."""
    if resolved.model.lora.rank is None:
        what = "small adapters are trained in place of the model"
        yield _ask(f"LoRA, rank {LORA_RANK}", what, f"model.lora.rank={LORA_RANK}")
    else:
        yield _ask("without LoRA", "the whole model is trained", "model.lora.rank=null")


def _ask(name: str, what: str, *settings: str) -> Suggestion:
    return Suggestion(name=name, what=what, choices=(settings,))


def _packing(requested: Recipe, resolved: Recipe) -> Iterator[Suggestion]:
    if unit_of(resolved.task.name) == "image":
        return
    if resolved.data.pack == "stream":
        yield Suggestion(
            name="packing",
            what="several texts share a sample",
            needless="it is on: samples are windows of running text (data.pack=stream), and no "
            "token is padding",
        )
        what = "samples are whole documents, each for itself; what they leave free is padding"
        # their room is needed when data is prepared
        length = (
            () if requested.data.seq_len != "auto" else (f"data.seq_len={resolved.data.seq_len}",)
        )
        yield _ask("pack whole documents", what, "data.pack=whole", *length)
        return
    yield Suggestion(
        name="packing",
        what="several texts share a sample",
        needless="it is on: as many whole documents as fit share a sample (data.pack=whole); what "
        "they leave free is known once the data is prepared",
    )
    yield _ask("pack running text", "samples are windows of running text", "data.pack=stream")


def _chunks(resolved: Recipe) -> Iterator[Suggestion]:
    if unit_of(resolved.task.name) == "image":
        return
    if isinstance(resolved.memory.loss_chunk, int):
        what = "the logits of all tokens exist at once"
        yield _ask("whole loss", what, "memory.loss_chunk=none")
    else:
        what = f"the logits of {LOSS_CHUNK:,} tokens exist at once"
        yield _ask("chunked loss", what, f"memory.loss_chunk={LOSS_CHUNK}")


def _micro_batches(resolved: Recipe) -> Iterator[Suggestion]:
    size = resolved.optim.micro_batch
    assert isinstance(size, int)  # a plan needs it
    if size > 1:
        what = "half the samples in a pass, and twice the passes (gradient accumulation)"
        yield _ask(f"micro-batch {size // 2}", what, f"optim.micro_batch={size // 2}")
    what = "twice the samples in a pass, and half the passes"
    yield _ask(f"micro-batch {2 * size}", what, f"optim.micro_batch={2 * size}")


def _on_strategy(requested: Recipe, strategy: str) -> Iterator[str]:
    """A strategy by its name in place of what a recipe says of the data axes."""
    yield f"parallel.strategy={strategy}"
    for name in ("zero", "dp_replicate", "dp_shard"):
        if getattr(requested.parallel, name) != "auto":
            yield f"parallel.{name}=auto"


def _with_degree(requested: Recipe, resolved: Recipe, axis: str, degree: int) -> tuple[str, ...]:
    """An axis with another degree; the data axes give or take its ranks."""
    setting = f"parallel.{axis}={degree}"
    axes, now = requested.parallel, resolved.parallel
    if axis == "ep" or axes.dp_shard == "auto":
        return (setting,)
    assert isinstance(now.dp_shard, int) and isinstance(now.dp_replicate, int)
    ranks = now.dp_shard * now.dp_replicate * getattr(now, axis) // degree
    fits = ranks and ranks % now.dp_shard == 0
    if fits and axes.dp_replicate == "auto":
        return (setting,)
    return (setting, "parallel.dp_shard=auto")


# Advice: what each lever and each technique would do to the memory, time and price of a recipe.
#
# The planner is the only one who predicts: a change is the recipe with other settings, planned as
# `shardyard plan` would (``control/what_if.py``). Which changes: ``control/suggestions.py``; the
# difference in words: ``planner/plan_diff.py``; what runs of before measured:
# ``control/past_runs.py``.


def advise(
    replanner: Replanner,
    now: Plan,
    *,
    cluster: ClusterHardware | None,
    past: PastRuns,
    ranks: RankPlacement,
) -> Advice:
    """Plan every lever and technique of a recipe.

    Args:
        now: Its plan.
        cluster: Its machines; None: no accelerator, or none that is known.
        past: Runs that may have measured some of them.
    """
    asked, settled = replanner.requested, replanner.resolved

    def changed(asks: Iterable[Suggestion]) -> tuple[Change, ...]:
        return tuple(_change(ask, replanner, now, cluster=cluster, past=past) for ask in asks)

    return Advice(
        now=now,
        measured=past.of(settled),
        levers=changed(levers(asked, settled)),
        techniques=changed(techniques(asked, settled)),
        ranks=ranks,
    )


def _change(
    ask: Suggestion,
    replanner: Replanner,
    now: Plan,
    *,
    cluster: ClusterHardware | None,
    past: PastRuns,
) -> Change:
    planned, refusals = _planned(ask, replanner)
    refused = ask.needless or (refusals[0] if refusals else "")
    best = min(planned, key=_rank) if planned else None
    if best is not None and now.step_s is not None and best.plan.step_s is None:
        refused = best.plan.speed.reason
        best = None
    if best is None:
        first = ask.choices[0] if ask.choices else ()
        return Change(
            name=ask.name, what=ask.what, settings=first, plan=None, rejection_reason=refused,
            effect=None, measured=None,
        )  # fmt: skip
    return Change(
        name=ask.name,
        what=ask.what,
        settings=best.settings,
        plan=best.plan,
        rejection_reason="",
        effect=PlanDiff(verdict=IN_USE, why=())
        if _resolved_settings(best.recipe) == _resolved_settings(replanner.resolved)
        else diff_plans(now, best.plan, cluster),
        measured=past.of(best.recipe),
    )


def _resolved_settings(recipe: Recipe) -> dict[str, Any]:
    """Return what a settled recipe says, whether its layout has a name there or not."""
    said = recipe.model_dump()
    del said["parallel"]["strategy"]
    return said


def _planned(ask: Suggestion, replanner: Replanner) -> tuple[list[Replanned], list[str]]:
    """Each choice that can be planned, and why the others cannot."""
    found, refusals = [], []
    for settings in ask.choices:
        try:
            found.append(replanner.plan(settings))
        except RequestError as error:
            refusals.append(_reason(error))
    return found, refusals


def _reason(error: RequestError) -> str:
    """A refusal on one line."""
    if isinstance(error, RecipeError):
        return " ".join(map(str, error.problems))
    return " ".join(str(error).split())


_FITS = ("fits", "unknown", "tight", "does not fit")


def _rank(candidate: Replanned) -> tuple[int, float, float]:
    """Return a sort key: what fits first, then the fastest; of what does not fit, the smallest."""
    plan = candidate.plan
    if plan.fits == "does not fit":
        return _FITS.index(plan.fits), plan.device_bytes, 0.0
    return _FITS.index(plan.fits), plan.step_s or 0.0, plan.device_bytes


# The levers of a run that has been measured, for its report.

_MOST_LEVERS = 3
_LEAST_GAIN = 0.02
"""Share of the step time; a smaller predicted gain is within the error of the plan."""


def levers_of_run(record: RunRecord, step_time_s: float) -> tuple[Lever, ...]:
    """Return the three best levers of a run, by the plan; none if it cannot be planned.

    A lever keeps the batch and what is learned, fits into memory, and makes a step at least 2 %
    faster. The predicted step time is scaled by the measured one.

    Args:
        step_time_s: Measured step time.
    """
    try:
        advice = _advice_on(record)
    except (ShardyardError, TypeError, ValueError):  # files of another version, an unknown model
        return ()
    if advice is None or advice.now.step_s is None:
        return ()
    found: dict[tuple[str, ...], Lever] = {}
    for change in (*advice.levers, *advice.techniques):
        plan = change.plan
        if plan is None or plan.step_s is None or plan.fits not in ("fits", "unknown"):
            continue
        ratio = plan.step_s / advice.now.step_s
        if ratio > 1 - _LEAST_GAIN or not all(map(may_change, _names(change.settings))):
            continue
        found[tuple(sorted(change.settings))] = Lever(
            name=change.name, what=change.what, settings=change.settings,
            step_time_s=step_time_s * ratio, gain=1 - ratio, device_bytes=plan.device_bytes,
            note=change.note,
        )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda lever: -lever.gain)[:_MOST_LEVERS])


def _names(settings: Iterable[str]) -> list[str]:
    return [setting.partition("=")[0] for setting in settings]


def _advice_on(record: RunRecord) -> Advice | None:
    """Plan the recipe of the attempt with most steps again, with each lever and technique.

    None: its files are missing, it has phases, or no speed is predicted for its machine.

    Raises:
        ShardyardError: It cannot be planned.
        TypeError, ValueError: Its manifest is of another version.
    """
    attempt = record.main_attempt
    if attempt is None or attempt.resolved is None or attempt.plan is None:
        return None
    resolved = attempt.resolved
    if resolved.phases or attempt.plan.step_s is None:
        return None
    content = attempt.manifest.get("machine")
    machine = Machine(**content) if isinstance(content, dict) else None
    asked = load_checked_recipe(
        [record.run.attempt_recipe(attempt.number)], [], to_train=False, of_run=True
    )
    request = Request(
        recipe=asked, as_written=asked, name=record.run.run_id, model_dir=None,
        shape=resolved.shape, network=resolved.network,
    )  # fmt: skip
    replanner = Replanner(request, resolved.recipe, phase=0, machine=machine, calibration=None)
    now = replanner.plan(()).plan
    devices = now.layout.world_size // now.nodes
    return advise(
        replanner,
        now,
        cluster=planned_cluster(resolved.recipe, machine, devices_per_node=devices),
        past=PastRuns(record.run.path / "none"),
        ranks=RankPlacement(layout=now.layout, devices_per_node=devices),
    )
