"""The search: all legal layouts of a model on a cluster, those that fit, the fastest first.

Where none fits, it tries further settings of the same step (``Relief``).

Every candidate is a layout with its micro-batch and recompute mode. What does not fit is never
timed. For each family of layouts that did not win, the search says why: it does not fit, and by how
much, or it is slower, and what it spends the time on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, TypeVar, assert_never

from shardyard.config.layout import Layout
from shardyard.config.rules.layout import (
    SPLIT_BACKWARD,
    check_axes,
    check_batch,
    check_experts,
    check_stages,
)
from shardyard.config.rules.model import falls_back_to_eager, is_fp8_legal
from shardyard.errors import RequestError
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration, is_scaled
from shardyard.planner.dispatch import Work, host_shortage_of, work_on_devices
from shardyard.planner.error_bands import ErrorBand, error_band
from shardyard.planner.images.layouts import ImageSpace
from shardyard.planner.images.step import ImageStep
from shardyard.planner.kernels import missing_rate
from shardyard.planner.memory import Fit, device_of, fit, fit_verdict, peak_bytes
from shardyard.planner.step_time import NAMES, Parts, StepModel
from shardyard.planner.workload import Recompute, Workload, with_layout
from shardyard.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Relief:
    """Settings that make a step need less memory on a device, and the step with them."""

    settings: tuple[str, ...]
    """Overrides of the recipe, such as ``memory.offload=optimizer``."""
    work: Work


Reliefs = Callable[[], Sequence[Relief]]
"""Finds reliefs: each is checked against the whole recipe, so they wait until one is wanted."""

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MOST_MICRO_BATCH = 64
USUAL_MICRO_BATCH = 8
USUAL_STAGES = 8
SPENT = 0.02
"""Share of a step from which a loss is worth a word."""

Axes = tuple[int, ...]
"""Degrees by which layouts differ."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to train, and what it comes to."""

    layout: Layout
    micro_batch: int
    recompute: Recompute
    parts: Parts
    tokens_per_s: float
    """All devices."""
    step_s: float
    """One optimizer step: the sum of ``parts``."""
    device_bytes: float
    limit_bytes: int
    more: tuple[str, ...] = ()
    """Further overrides that it needs, such as ``memory.offload=optimizer``."""
    host_short: Fit | None = None
    """Says so if the hosts have too little memory for what waits there."""
    band: ErrorBand | None = None
    """Band of its speed; of the candidates that a search returns."""

    @property
    def fit(self) -> Fit:
        """Fit to the memory of a device, or of its host."""
        return self.host_short or fit(self.device_bytes, self.limit_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **asdict(self),
            "tokens_per_s_band": self.band and list(self.band.of_rate(self.tokens_per_s)),
            "parts": self.parts._asdict(),
            "fits": self.fit.verdict,
            "reason": speed_reason(self),
        }

    @property
    def is_safe(self) -> bool:
        """Whether it fits with room for the error of the prediction."""
        if self.host_short is not None:
            return self.host_short.is_safe
        return fit_verdict(self.device_bytes, self.limit_bytes) == "fits"


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A family of layouts that did not win."""

    family: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Search:
    """Result of a search."""

    legal: int
    """Candidates that the model, the cluster and the batch allow."""
    fitting: int
    """Count of candidates that fit."""
    best: tuple[Candidate, ...]
    """The fastest that fit, each of another layout; where none fits, the tight ones."""
    rejected: tuple[Rejected, ...]
    nearest: Candidate | None
    """Candidate that needs least memory, where none fits and none is tight."""
    more_legal: int = 0
    """Candidates with further settings, which are looked at where none fits as the recipe is."""
    more_fitting: int = 0
    """Count of these candidates that fit."""

    @property
    def fits(self) -> bool:
        """Whether anything fits; the first of ``best`` then does."""
        return self.fitting + self.more_fitting > 0


@dataclass
class _Family:
    """The best of one family so far, or what it needs least."""

    fastest: Candidate | None = None
    least_bytes: float = float("inf")


_WorkT = TypeVar("_WorkT", Workload, ImageStep)


class _Space(Protocol[_WorkT]):
    """Space that is searched."""

    def ways(self) -> Iterator[tuple[tuple[Layout, Recompute], list[int]]]:
        """Layouts and recompute modes, each with its micro-batches, smallest first."""

    def work_for(self, way: tuple[Layout, Recompute], size: int) -> _WorkT:
        """The same model and batch in this way."""

    def device_bytes(self, work: _WorkT) -> float:
        """Return the memory at the peak, as the driver shows it."""

    def parts(self, work: _WorkT) -> Parts:
        """Seconds of a step."""


def search(
    workload: Work,
    cluster: ClusterHardware,
    *,
    best: int = 3,
    breadth: Literal["all", "usual"] = "all",
    calibration: Calibration | None = None,
    reliefs: Reliefs = tuple,
) -> Search:
    """Find the fastest ways to train a workload's model and batch on all devices of a cluster.

    Args:
        workload: Model, batch, formats and techniques; its layout, micro-batch and recompute mode
            are searched.
        best: Candidates to return.
        breadth: ``usual`` leaves out what seldom wins, for a search over many clusters: dp_shard
            other than all data ranks or a node, cp on short samples, deep pipelines.
        reliefs: Gives further settings; called only where no layout fits without.

    Raises:
        RequestError: No source gives the rates of the device, or no layout is legal.
    """
    why_not = missing_rate(cluster.accelerator, workload.formats.compute)
    if why_not:
        raise RequestError(f"{why_not}, so layouts cannot be ranked. Take another instance.")
    is_broad = breadth == "all"
    # Reliefs cost time in each step, so they are tried only where nothing fits without them.
    found = _search(workload, cluster, calibration, best=best, is_broad=is_broad)
    if found.fits or not (further := reliefs()):
        return found
    others = []
    for relief in further:
        with suppress(RequestError):  # weights on the host may leave no legal layout
            others.append(
                (relief, _search(relief.work, cluster, calibration, best=best, is_broad=is_broad))
            )
    return _with_reliefs(found, others, best=best)


def _with_reliefs(
    original: Search, others: Sequence[tuple[Relief, Search]], *, best: int
) -> Search:
    """Extend a search without a fitting layout by what fits with further settings."""
    more = [
        replace(candidate, more=relief.settings)
        for relief, other in others
        for candidate in other.best
    ]
    ranked = sorted((*original.best, *more), key=_rank)
    return replace(
        original,
        best=tuple(ranked[:best]),
        more_legal=sum(other.legal for _, other in others),
        more_fitting=sum(other.fitting for _, other in others),
        nearest=None if ranked else original.nearest,
    )


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Order candidates: those that fit first, then by speed."""
    return not candidate.is_safe, candidate.step_s


def _search(
    workload: Work,
    cluster: ClusterHardware,
    calibration: Calibration | None,
    *,
    best: int,
    is_broad: bool,
) -> Search:
    match work_on_devices(workload, cluster):
        case Workload() as text:
            space = _TextSpace(text, cluster, calibration, is_broad=is_broad)
            found = _searched(text, space, cluster, best=best)
            return _with_bands(found, text, cluster, calibration)
        case ImageStep() as step:
            most = MOST_MICRO_BATCH if is_broad else USUAL_MICRO_BATCH
            images = ImageSpace(step, cluster, calibration, most=most)
            return _searched(step, images, cluster, best=best)
        case unknown:
            assert_never(unknown)


def _with_bands(
    found: Search, work: Workload, cluster: ClusterHardware, calibration: Calibration | None
) -> Search:
    """The same search, with the band of each speed that it returns."""
    best = tuple(
        replace(
            each,
            band=error_band(
                work, cluster.accelerator, each.layout, is_scaled=is_scaled(calibration)
            ),
        )
        for each in found.best
    )
    return replace(found, best=best)


def _searched(
    workload: _WorkT, space: _Space[_WorkT], cluster: ClusterHardware, *, best: int
) -> Search:
    limit = cluster.accelerator.memory_bytes
    by_axes: dict[Axes, Candidate] = {}
    families: dict[str, _Family] = {}
    legal = fitting = 0
    nearest: tuple[float, _WorkT] | None = None
    for way, sizes in space.ways():
        axes = _axes_of(way[0])
        legal += len(sizes)
        for size in sizes:
            asked = space.work_for(way, size)
            device_bytes = space.device_bytes(asked)
            names = _families(asked)
            # Before the fit is tested, so that a family that never fits has its least bytes.
            for name in names:
                family = families.setdefault(name, _Family())
                family.least_bytes = min(family.least_bytes, device_bytes)
            if nearest is None or device_bytes < nearest[0]:
                nearest = (device_bytes, asked)
            # What does not fit is not timed: this keeps a search of 10,000 layouts under a second.
            does_fit = fit_verdict(device_bytes, limit) != "does not fit"
            if not does_fit or host_shortage_of(asked, cluster):
                break  # nor do larger micro-batches fit
            candidate = _candidate(asked, space.parts(asked), device_bytes, limit)
            fitting += candidate.is_safe
            for name in names:
                if _beats(candidate, families[name].fastest):
                    families[name].fastest = candidate
            # One candidate per set of axes: else the list would be one layout many times.
            if _beats(candidate, by_axes.get(axes)):
                by_axes[axes] = candidate
    if nearest is None:
        raise RequestError(_nothing_legal(workload, cluster))
    ranked = sorted(by_axes.values(), key=_rank)
    least = None
    if not ranked:
        asked = nearest[1]
        least = _candidate(asked, space.parts(asked), nearest[0], limit)
        least = replace(least, host_short=host_shortage_of(asked, cluster))
    return Search(
        legal=legal,
        fitting=fitting,
        best=tuple(ranked[:best]),
        rejected=tuple(_rejected(families, ranked[0] if ranked else None, limit)),
        nearest=least,
    )


def nodes_that_fit(
    workload: Work, cluster: ClusterHardware, *, reliefs: Reliefs = tuple, most: int = 256
) -> tuple[int, Candidate] | None:
    """Find the fewest nodes, by doubling, on which some layout fits, and the fastest one there.

    Returns:
        None: no layout fits within ``most`` nodes.
    """
    nodes = cluster.nodes * 2
    while nodes <= most:
        larger = replace(cluster, nodes=nodes)
        try:
            best = search(workload, larger, best=1, breadth="usual", reliefs=reliefs).best
        except RequestError:
            return None  # more data-parallel ranks than samples
        if best and best[0].is_safe:
            return nodes, best[0]
        nodes *= 2
    return None


def speed_reason(candidate: Candidate) -> str:
    """Why a candidate is as fast as it is: what its step computes, and what it loses on what."""
    parts, step_s = candidate.parts, candidate.step_s
    computed = parts.matmul_s + parts.attention_s + parts.elementwise_s + parts.vocabulary_s
    losses = [f"{share:.0%} {name}" for name, share in overhead_shares(parts)]
    words = ", ".join(losses) if losses else "no loss above 2 %"
    return f"{computed / step_s:.0%} of the step computes; {words}"


def overhead_shares(parts: Parts) -> list[tuple[str, float]]:
    """Terms that are not the model's own work and their share of the step, largest first."""
    own = ("matmul_s", "attention_s", "elementwise_s", "vocabulary_s")
    shares = [
        (NAMES[key][0], seconds / parts.step_s)
        for key, seconds in zip(parts._fields, parts, strict=True)
        if key not in own
    ]
    return sorted(((n, s) for n, s in shares if s >= SPENT), key=lambda pair: -pair[1])


# --- what is legal ------------------------------------------------------------------------------


class _TextSpace:
    """Every legal way to train a transformer on all devices of a cluster."""

    def __init__(
        self,
        workload: Workload,
        cluster: ClusterHardware,
        calibration: Calibration | None,
        *,
        is_broad: bool,
    ) -> None:
        self._workload, self._cluster, self._is_broad = workload, cluster, is_broad
        self._model = StepModel(
            workload.shape, cluster, seq_len=workload.seq_len, formats=workload.formats,
            techniques=workload.techniques, trained=workload.trained, calibration=calibration,
        )  # fmt: skip

    def ways(self) -> Iterator[tuple[tuple[Layout, Recompute], list[int]]]:
        """Layouts and recompute modes, each with its micro-batches, smallest first."""
        is_compiled = self._workload.techniques.kernels == "compiled"
        shape = self._workload.shape
        for layout, sizes in _legal(self._workload, self._cluster, is_broad=self._is_broad):
            for recompute in RECOMPUTE:
                # torch would run these blocks operator by operator and not report it, so the
                # predicted speed of compiled kernels would be wrong.
                if is_compiled and falls_back_to_eager(recompute, tp=layout.tp, shape=shape):
                    continue
                yield (layout, recompute), sizes

    def work_for(self, way: tuple[Layout, Recompute], size: int) -> Workload:
        """The same model and batch in this way."""
        return with_layout(self._workload, way[0], micro_batch=size, recompute=way[1])

    def device_bytes(self, work: Workload) -> float:
        """Return the memory at the peak, as the driver shows it."""
        return device_of(peak_bytes(work), work.layout, has_standby=work.techniques.has_standby)

    def parts(self, work: Workload) -> Parts:
        """Seconds of a step."""
        return self._model.parts(
            work.layout, micro_batch=work.micro_batch, micro_batches=work.micro_batches,
            recompute=work.recompute,
        )  # fmt: skip


def _legal(
    workload: Workload, cluster: ClusterHardware, *, is_broad: bool
) -> Iterator[tuple[Layout, list[int]]]:
    """Every legal layout, with the micro-batches that it allows, smallest first."""
    techniques = workload.techniques
    splits_backward = techniques.schedule in SPLIT_BACKWARD
    for cp, tp, pp, ep in _axes(workload, cluster, is_broad=is_broad):
        data_ranks = cluster.devices // (cp * tp * pp)
        if check_batch(data_ranks, global_batch=workload.global_batch, micro_batch=1):
            continue
        # Short shares are padded to as many passes as the longest has.
        per_rank = -(-workload.global_batch // data_ranks)
        per_node = max(1, cluster.reach // (cp * tp))
        sizes = [
            size
            for size in _powers(min(per_rank, MOST_MICRO_BATCH if is_broad else USUAL_MICRO_BATCH))
            if not check_stages(
                pp=pp,
                micro_batches=-(-per_rank // size),
                schedule=techniques.schedule,
                virtual_stages=techniques.virtual_stages,
                shape=workload.shape,
            )
        ]
        for dp_shard in _shard_degrees(data_ranks, per_node, is_broad=is_broad):
            if check_experts(dp_shard=dp_shard, cp=cp, ep=ep):
                continue
            # One shard at zero 3 splits nothing, but it frees its copy in the computing format.
            levels: tuple[int, ...] = (1, 2, 3) if dp_shard * cp > 1 else (1, 3)
            # Zero 3 frees the weights before the pass that computes their gradients: torch would
            # leave the gradients out without an error.
            levels = levels[:-1] if pp > 1 and splits_backward else levels
            if techniques.offload == "params":  # weights on the host are gathered block by block
                levels = tuple(zero for zero in levels if zero == 3)
            for zero in levels:
                yield (
                    Layout(
                        dp_replicate=data_ranks // dp_shard, dp_shard=dp_shard, cp=cp, tp=tp,
                        pp=pp, ep=ep, zero=zero,
                    ),
                    sizes,
                )  # fmt: skip


def _axes_of(layout: Layout) -> Axes:
    """Return the axes that identify a layout; without a split, its zero level does not count."""
    zero = layout.zero if layout.dp_shard * layout.cp > 1 else 1
    return (layout.dp_shard, layout.cp, layout.tp, layout.pp, layout.ep, zero)


def _axes(workload: Workload, cluster: ClusterHardware, *, is_broad: bool) -> Iterator[Axes]:
    shape, devices = workload.shape, cluster.devices
    experts = _powers(shape.num_experts) if shape.num_experts else [1]
    # tp exchanges activations in every block, so its ranks stay within one node.
    for tp in _divisors(cluster.devices_per_node):
        for pp in _divisors(devices // tp):
            if pp > (shape.num_hidden_layers if is_broad else USUAL_STAGES):
                break
            for cp in _powers(devices // (tp * pp)):
                if cp > 1 and workload.seq_len // cp < (2048 if is_broad else 8192):
                    break  # shorter pieces compute less than they exchange
                if devices % (tp * pp * cp):
                    continue
                if workload.formats.compute == "fp8" and not is_fp8_legal(
                    shape, seq_len=workload.seq_len, tp=tp, cp=cp
                ):
                    continue
                for ep in experts:
                    if not check_axes(
                        cp=cp, tp=tp, pp=pp, ep=ep, world_size=devices,
                        devices_per_node=cluster.devices_per_node, shape=shape,
                        seq_len=workload.seq_len,
                    ):  # fmt: skip
                        yield cp, tp, pp, ep


def _shard_degrees(data_ranks: int, per_node: int, *, is_broad: bool) -> Iterable[int]:
    if is_broad:
        return _divisors(data_ranks)
    return sorted({data_ranks, per_node} if data_ranks % per_node == 0 else {data_ranks})


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to ``most``."""
    return [1 << bit for bit in range(most.bit_length())]


# --- choosing and explaining --------------------------------------------------------------------


def _candidate(work: Work, parts: Parts, device_bytes: float, limit: int) -> Candidate:
    step_s = parts.step_s
    return Candidate(
        layout=work.layout,
        micro_batch=work.micro_batch,
        recompute=work.recompute,
        parts=parts,
        tokens_per_s=work.global_batch * work.seq_len / step_s,
        step_s=step_s,
        device_bytes=device_bytes,
        limit_bytes=limit,
    )


def _beats(candidate: Candidate, other: Candidate | None) -> bool:
    if other is None:
        return True
    if candidate.is_safe != other.is_safe:
        return candidate.is_safe
    return candidate.step_s < other.step_s


def _families(workload: Work) -> list[str]:
    layout = workload.layout
    names = [f"recompute {workload.recompute}"]
    if layout.dp_shard * layout.cp == 1:
        names.append("nothing sharded")
    elif layout.dp_replicate > 1:
        names.append(f"hybrid, zero {layout.zero}")
    else:
        names.append(f"zero {layout.zero} over all data ranks")
    names += [f"{axis} {getattr(layout, axis)}" for axis in ("cp", "tp", "pp", "ep")]
    return names


def _rejected(
    families: dict[str, _Family], winner: Candidate | None, limit: int
) -> Iterator[Rejected]:
    for name, family in families.items():
        if family.fastest is None:
            over = family.least_bytes / limit
            needs = f"needs at least {format_bytes(family.least_bytes)}, {over:.0%} of a device"
            yield Rejected(family=name, reason=f"does not fit: {needs}")
        elif winner is not None and family.fastest.step_s > winner.step_s:
            slower = family.fastest.step_s / winner.step_s - 1
            tight = "" if family.fastest.is_safe else ", and memory is tight"
            reason = f"{slower:.1%} slower at best: {speed_reason(family.fastest)}{tight}"
            yield Rejected(family=name, reason=reason)


def _nothing_legal(workload: Work, cluster: ClusterHardware) -> str:
    if isinstance(workload, ImageStep):
        return (
            f"no layout of {workload.global_batch} images over {cluster.devices} devices is legal: "
            f"every data-parallel rank needs a micro-batch, which is {workload.micro_batch} here. "
            "Use a larger optim.global_batch, a smaller optim.micro_batch, or fewer nodes."
        )
    return (
        f"no layout of {workload.global_batch} samples of {workload.seq_len} tokens over "
        f"{cluster.devices} devices is legal: every data-parallel rank needs a sample, every "
        "pipeline stage a micro-batch. Use a larger optim.global_batch, or fewer nodes."
    )
