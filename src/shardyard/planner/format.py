"""A plan and the candidates of its search in words: as a page, a table or a comment shows them."""

from collections.abc import Callable

from shardyard.config.schema.recipe import Parallel
from shardyard.planner.error_bands import SHARE
from shardyard.planner.layouts import Candidate, Search
from shardyard.planner.plan import Plan, layout_name
from shardyard.planner.throughput import UNMEASURED, Range
from shardyard.units import format_bytes, format_count, format_flops, format_seconds, format_usd

Row = tuple[str, str, str]


def headline(plan: Plan) -> list[Row]:
    """Fits, how full, speed, MFU, time, price, failures: what, how much, why."""
    return [
        ("memory", plan.fits, f"{plan.fits_reason}; states {format_bytes(_states(plan))}"),
        _speed(plan),
        ("MFU", "-" if plan.mfu is None else f"{plan.mfu:.1%}", _mfu_reason(plan)),
        *_decoding(plan),
        ("time", _time(plan), _time_reason(plan)),
        *reference_rows(plan),
        *_epoch(plan),
        *phase_rows(plan),
        _price(plan),
        *_failures(plan),
        *_snapshots(plan),
        *_network(plan),
        *(("measured", "", source) for source in plan.measured),
    ]


def candidate_name(candidate: Candidate) -> str:
    """Layout, micro-batch and recompute mode in words."""
    recompute = "" if candidate.recompute == "none" else f", recompute {candidate.recompute}"
    more = "".join(f", {setting}" for setting in candidate.more)
    return f"{layout_name(candidate.layout)}, micro-batch {candidate.micro_batch}{recompute}{more}"


def fitting_words(search: Search) -> str:
    """Count the fitting layouts: as the recipe is, and with further settings if none fits."""
    if search.fitting:
        return f"{search.fitting:,} of {search.legal:,} legal layouts fit."
    none = f"None of {search.legal:,} legal layouts fits as the recipe is."
    if search.more_fitting:
        return (
            f"{none} With other settings of memory {search.more_fitting:,} of "
            f"{search.more_legal:,} do."
        )
    tried = " Nor does any with memory.offload." if search.more_legal else ""
    return f"{none}{tried}"


def settings_of(candidate: Candidate, requested: Parallel | None = None) -> list[str]:
    """The overrides, ``section.key=value``, that make a recipe use a candidate.

    Args:
        requested: What the recipe says of the axes, and is overridden.
    """
    layout = candidate.layout
    requested = requested or Parallel()
    settings = ["parallel.strategy=null"] if requested.strategy else []
    if requested.dp_replicate != "auto":
        settings.append(f"parallel.dp_replicate={layout.dp_replicate}")
    settings += [f"parallel.zero={layout.zero}", f"parallel.dp_shard={layout.dp_shard}"]
    for axis in ("cp", "tp", "pp", "ep"):
        degree = getattr(layout, axis)
        if degree > 1 or getattr(requested, axis) > 1:
            settings.append(f"parallel.{axis}={degree}")
    if layout.cp > 1 and requested.cp_exchange != "keys_values":
        settings.append("parallel.cp_exchange=keys_values")  # what the search looks at
    settings.append(f"optim.micro_batch={candidate.micro_batch}")
    settings.append(f"memory.recompute={candidate.recompute}")
    return [*settings, *candidate.more]


def _speed(plan: Plan) -> Row:
    rate = plan.speed.tokens_per_s
    if rate is None:
        return ("speed", "-", plan.speed.reason)
    each = f"{rate / plan.layout.world_size:,.0f} a device"
    if plan.tokens_per_s_band is not None:
        each += f"; {band_words(plan.tokens_per_s_band, format_count)}"
    if plan.speed.band is not None:
        each += f", {plan.speed.band.basis()}"
    if plan.speed.unmeasured:
        each += f"; {unmeasured_words(plan.speed.unmeasured)}"
    return ("speed", f"{format_count(rate)}{mark_of(plan)} {plan.units}/s", each)


def band_words(band: Range, form: Callable[[float], str]) -> str:
    """``80 %: 20.1 k to 24.9 k``, each end as ``form`` writes it."""
    return f"{SHARE * 100:.0f} %: {range_words(band, form)}"


def range_words(band: Range, form: Callable[[float], str]) -> str:
    """``20.1 k to 24.9 k``."""
    low, high = map(form, band)
    return f"{low} to {high}"


def unmeasured_words(reason: str) -> str:
    """The footnote of what is marked: ``* not measured: ...``."""
    return f"{UNMEASURED} not measured: {reason}"


def mark_of(plan: Plan) -> str:
    """Mark a plan's speed, time and price as unmeasured; empty if the products were timed."""
    return UNMEASURED if plan.speed.unmeasured else ""


def spare_words(spares: int) -> str:
    """``with 2 spare nodes``; empty: none."""
    return f"with {spares} spare node{'s' * (spares > 1)}" if spares else ""


def _decoding(plan: Plan) -> list[Row]:
    found = plan.decoding
    if found is None:
        return []
    needed = f"{found.needed:,} cores a node would keep the devices busy"
    if found.is_bound:
        slower = f"the devices take {format_count(found.trained_per_s)} and wait"
        rate = f"{format_count(found.decoded_per_s)} images/s"
        return [("decoding", rate, f"{slower}; {needed}; {found.reason}")]
    return [("decoding", "keeps up", f"{needed}; {found.reason}")]


def _epoch(plan: Plan) -> list[Row]:
    rate = plan.speed.tokens_per_s
    if plan.unit != "image" or rate is None:
        return []
    if plan.epoch_s is not None:
        return [("epoch", format_seconds(plan.epoch_s), f"{plan.epoch_samples:,} images")]
    words = "for each million images; how many there are is known once the data is prepared"
    return [("epoch", format_seconds(1e6 / rate), words)]


def extras_words(plan: Plan) -> str:
    """Say what the time of a run has in addition to its steps."""
    return f"with start,{' reference pass,' if plan.reference_s else ''} saves and failures"


def reference_rows(plan: Plan) -> list[Row]:
    """Return the row of the pass before the first step, if there is one."""
    if not plan.reference_s:
        return []
    return [("reference pass", format_seconds(plan.reference_s), plan.reference_reason)]


def _mfu_reason(plan: Plan) -> str:
    peak = plan.peak.flops_per_s
    if peak is None:
        return plan.peak.source
    if plan.unit == "image":
        return f"of {format_flops(peak)}/s, {format_flops(plan.flops_per_token['full'])} an image"
    return f"of {format_flops(peak)}/s, attention counted in full"


def _time(plan: Plan) -> str:
    if plan.wall_s is not None:
        return format_seconds(plan.wall_s)
    return "-" if plan.step_s is None else f"{format_seconds(plan.step_s)} a step"


def _time_reason(plan: Plan) -> str:
    if plan.steps is None:
        return "length known once the data is prepared"
    length = f"{plan.steps:,} steps"
    if plan.phases:
        length = f"{length} in {len(plan.phases)} phases"
        return f"{length}, {extras_words(plan)}" if plan.wall_s else length
    if plan.step_s is None:
        return length
    each = f"{length} of {format_seconds(plan.step_s)}"
    if not plan.advances:
        return f"{each}: no end"
    words = f"{each}, {extras_words(plan)}"
    band = plan.wall_s_band
    return words if band is None else f"{words}; {band_words(band, format_seconds)}"


def phase_rows(plan: Plan) -> list[Row]:
    """One for each phase: what it takes."""
    rows = []
    for number, phase in enumerate(plan.phases, 1):
        length = "length not known yet" if phase.steps is None else f"{phase.steps:,} steps"
        price = "" if phase.usd is None else f", {format_usd(phase.usd)}"
        words = f"{length} of {phase.samples_words()}"
        rows.append((f"phase {number}", _time(phase), f"{words}{price}"))
    return rows


def _price(plan: Plan) -> Row:
    per_hour, per_million = plan.price.usd_per_hour, plan.usd_per_million_tokens
    if per_hour is None:
        return ("price", "-", plan.price.source)
    parts = [f"{format_usd(per_hour)} an hour"]
    if plan.usd is not None and plan.spare_nodes:
        more = per_hour / plan.nodes * plan.spare_nodes
        parts.append(f"{spare_words(plan.spare_nodes)} {format_usd(more)} more")
    if per_million is not None:
        parts.append(f"{format_usd(per_million)} per million {plan.units}")
    parts.append(plan.price.source)
    if plan.usd_band is not None:
        parts.append(band_words(plan.usd_band, format_usd))
    total = "-" if plan.usd is None else format_usd(plan.usd)
    return ("price", total, "; ".join(parts))


def _failures(plan: Plan) -> list[Row]:
    outlook = plan.failures
    if outlook is None:
        return [("failures", "-", plan.failures_reason)] if plan.steps and plan.time else []
    mtbf = outlook.mtbf
    words = (
        f"one every {format_seconds(mtbf.seconds)} ({format_seconds(mtbf.low_s)} to "
        f"{format_seconds(mtbf.high_s)}); {outlook.ettr:.1%} of the time trains; best saved every "
        f"{outlook.best_interval_steps:,} steps"
    )
    return [("failures", f"{outlook.expected_failures:.2g}", words)]


def _snapshots(plan: Plan) -> list[Row]:
    """Return the rows of snapshots, of an elastic run only."""
    if not plan.snapshots_reason:
        return []
    if not plan.snapshot_bytes:
        return [("snapshots", "none", plan.snapshots_reason)]
    outlook = plan.failures
    every = None if outlook is None else outlook.snapshot_interval_steps
    often = "" if every is None else f"every {every:,} steps; "
    why = f"of a node's host memory; {often}{plan.snapshots_reason}"
    return [("snapshots", format_bytes(plan.snapshot_bytes), why)]


def _network(plan: Plan) -> list[Row]:
    link, _, why = plan.network.partition(": ")
    return [("network", link, why)] if link else []


def _states(plan: Plan) -> int:
    return sum(plan.memory_term(name) for name in ("parameters", "gradients", "optimizer"))
