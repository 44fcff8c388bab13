"""Forecast of one size by the plan, and the range of the terms that the plan cannot know.

A plan takes the network between nodes as it is sold, and slow ranks as the best published
runs had them. Both are known to be worse at times, and no recipe says when. So each
forecast is given with the step at its best (no wait for transfers between nodes) and at its
worst, term by term. Forecasts are never fitted to the runs that they are compared with.
"""

import math
from dataclasses import replace

from shardyard.errors import RequestError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import ALONE
from shardyard.planner.dispatch import Work, estimate_of
from shardyard.planner.plan import Plan, layout_name
from shardyard.planner.step_time import NAMES
from shardyard.report.study.rows import Forecast, OpenTerm, SeriesRow, Settings

SLOW_RANKS_PER_DOUBLING = 0.017
"""Share of a step lost with each doubling of the nodes where ranks wait for each other most.

The step of MPT-7b grew by 10.1 % over the six doublings from 8 to 512 H100, all of it
counted as waiting. It is the one published table here that keeps its configuration from a
single node on (benchmarks/groundtruth/scaling). It is no bound: some lose more. A plan
takes ``SLOWER_PER_DOUBLING``.
"""

_WAITS = NAMES["wait_s"][0]


def row_of(plan: Plan, work: Work | None, cluster: ClusterHardware | None) -> SeriesRow:
    """The row of a size that is planned, with its settings, memory and price.

    Args:
        work: The step that the plan is of; None: its speed is not asked for.
        cluster: None: no accelerators are known, and no speed is predicted.
    """
    devices = plan.layout.world_size
    return SeriesRow(
        nodes=plan.nodes,
        accelerators=devices,
        origin="predicted",
        note="" if plan.speed.tokens_per_s is not None else f"no speed: {plan.speed.reason}",
        forecast=_forecast(plan, work, cluster),
        settings=settings_of(plan),
        memory_bytes=plan.device_bytes,
        mfu=plan.mfu,
        usd_per_hour=plan.price.usd_per_hour,
        unmeasured=plan.speed.unmeasured,
        tight=plan.fits_reason if plan.fits == "tight" else "",
        epoch_samples=plan.epoch_samples,
    )


def settings_of(plan: Plan) -> Settings:
    """Return the settings of a plan that must not change between sizes."""
    layout = plan.layout
    ranks = layout.data_ranks
    name = layout_name(layout).partition(" (")[0]  # without the number of copies and ranks
    return Settings(
        micro_batch=plan.micro_batch,
        accumulation=max(1, math.ceil(plan.samples_per_step / (ranks * plan.micro_batch))),
        layout=name,
        is_one_rank=ranks * layout.cp == 1,
        recompute=plan.recompute,
        global_batch=plan.samples_per_step,
    )


def _forecast(plan: Plan, work: Work | None, cluster: ClusterHardware | None) -> Forecast | None:
    step_s = plan.step_s
    if work is None or step_s is None or plan.speed.tokens_per_s is None:
        return None
    open_terms, best_s, worst_s = _range(plan, work, cluster, step_s)
    return Forecast(
        samples_per_step=plan.samples_per_step,
        step_s=step_s,
        best_s=best_s,
        worst_s=worst_s,
        open_terms=open_terms,
        tokens_per_sample=plan.seq_len if plan.unit == "token" else None,
        mfu=plan.mfu,
        memory_bytes=plan.device_bytes,
        terms=tuple((term.name, term.seconds) for term in plan.time),
    )


def _range(
    plan: Plan, work: Work, cluster: ClusterHardware | None, step_s: float
) -> tuple[tuple[OpenTerm, ...], float, float]:
    """Open terms, the step at its best and at its worst."""
    if cluster is None or plan.nodes == 1:
        return (), step_s, step_s
    waits_s = sum(term.seconds for term in plan.time if term.name == _WAITS)
    doublings = math.log2(plan.nodes)
    slow = 1 + SLOW_RANKS_PER_DOUBLING * doublings
    free_s = _step_with(work, replace(cluster, between=ALONE))
    link = cluster.between
    one = replace(link, bytes_per_s=link.bytes_per_s / cluster.devices_per_node)
    narrow_s = _step_with(work, replace(cluster, between=one))
    ranks = OpenTerm(
        name="slow ranks",
        assumed=f"{100 * SLOW_RANKS_PER_DOUBLING:.1f} % of a step for each doubling of the nodes",
        step_s=max(step_s, (step_s - waits_s) * slow),
    )
    if free_s is None or narrow_s is None or cluster.devices_per_node == 1:
        return (ranks,), min(step_s, free_s or step_s), ranks.step_s
    narrow_waits_s = waits_s * narrow_s / step_s  # a share of the step, as the plan has it
    network = OpenTerm(
        name="the network between nodes",
        assumed=f"{link.name} as one device's share of it, one link at a time",
        step_s=max(step_s, narrow_s),
    )
    worst_s = max(step_s, (narrow_s - narrow_waits_s) * slow)
    return (network, ranks), min(step_s, free_s), worst_s


def _step_with(work: Work, cluster: ClusterHardware) -> float | None:
    """The step on other links; None: it cannot be said there."""
    try:
        return estimate_of(work, cluster, None).step_s
    except RequestError:
        return None
