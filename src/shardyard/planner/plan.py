"""The plan: what a resolved recipe will take on given devices, as one value.

Pure and quick. Training prints its line, writes it to plan.json and reads ``flops_per_token`` and
``peak_flops_per_s`` back for MFU; the report prints it against what was measured.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardyard.config.cluster_choice import joined_cluster
from shardyard.config.formulas import steps_on
from shardyard.config.layout import Layout
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.families.shape import ModelShape
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_named
from shardyard.hardware.cluster import ClusterHardware, default_cluster
from shardyard.hardware.machine import Machine
from shardyard.planner.calibration import Calibration, is_scaled
from shardyard.planner.cpu_memory import fit_on_cpu, on_cpu
from shardyard.planner.dispatch import (
    AnyEstimate,
    Model,
    Work,
    estimate_of,
    flops_of,
    host_shortage_of,
    memory_of,
    parameters_of,
    savings_of,
    snapshot_bytes_of,
    traffic_of,
    unit_of,
    work_of,
)
from shardyard.planner.error_bands import ErrorBand, error_band
from shardyard.planner.failures import FailureForecast, failure_outlook
from shardyard.planner.images.step import Decoding, decoding_of
from shardyard.planner.images.time import ImageEstimate
from shardyard.planner.instance_search import samples_factor
from shardyard.planner.kernels import missing_rate
from shardyard.planner.memory import Fit, MemoryEstimate, Saving, Term, fit
from shardyard.planner.reference_pass import predicted_pass
from shardyard.planner.state_memory import checkpoint_bytes
from shardyard.planner.step_time import TimeTerm
from shardyard.planner.throughput import (
    Peak,
    Price,
    Range,
    Speed,
    peak_of,
    price_of,
    price_range,
    range_sum,
    speed_of,
    sum_or_none,
)
from shardyard.units import format_bytes, format_count, format_seconds, format_usd


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A prediction, each number with its reason. Memory and traffic are per rank."""

    model: str
    parameters: int
    layout: Layout
    nodes: int
    device: str
    """Name of one device; "CPU process" or "device" where there is no accelerator or none known."""
    memory: tuple[Term, ...]
    """They add up to ``memory_bytes``."""
    memory_moment: str
    """When in a step the peak is."""
    reserved_bytes: int
    """Bytes that the allocator holds at the peak."""
    device_bytes: int
    """Bytes that the driver shows at the peak."""
    memory_limit_bytes: int | None
    """Memory that one rank may fill; None: not known."""
    fits: str
    """fits, tight, does not fit, or unknown."""
    fits_reason: str
    flops_per_token: dict[str, float]
    """Model FLOP, forward and backward, by convention: full and causal."""
    peak: Peak
    samples_per_step: int
    micro_batch: int
    recompute: str
    seq_len: int
    steps: int | None
    """None: not known before the data is prepared."""
    speed: Speed
    time: tuple[TimeTerm, ...]
    """One step, term by term; empty where no speed can be said."""
    price: Price
    checkpoint_bytes: int
    """One checkpoint on disk, all ranks."""
    communication: tuple[Term, ...]
    failures: FailureForecast | None
    failures_reason: str
    """Why ``failures`` is None; else empty."""
    advances: bool = True
    """False: it fails more often than it can save (``failures_reason``): no time and no price."""
    network: str = ""
    """Network between the nodes and its reason, where the recipe asks for less than they have."""
    measured: tuple[str, ...] = ()
    """Values that were measured and not looked up."""
    memory_savings: tuple[Saving, ...] = ()
    """Savings of a rank under other settings, most first."""
    unit: Literal["token", "image"] = "token"
    """Unit that ``seq_len``, rates, FLOP and prices count; for images, a sample is one."""
    decoding: Decoding | None = None
    """Decoding rate of the cores, for images.

    None for text, or if the cores or the speed are not known.
    """
    epoch_samples: int | None = None
    """Training samples of a pass over the data; None: not known before it is prepared."""
    frozen_parameters: int = 0
    """Count of those ``parameters`` that are not trained."""
    snapshot_bytes: int = 0
    """Host memory of a node that copies of the state take, a neighbour's among them."""
    snapshots_reason: str = ""  # of an elastic run: why it takes snapshots, or none
    reference_s: float = 0.0
    """Pass over pairs of answers before the first step, for the reference's log-probabilities."""
    reference_reason: str = ""
    phases: tuple["Plan", ...] = ()
    """Each phase, if any. Length, time and price are of all; else of the one with most memory."""

    @property
    def trained_parameters(self) -> int:
        """Count of those ``parameters`` that have a gradient and optimizer state."""
        return self.parameters - self.frozen_parameters

    def parameters_words(self) -> str:
        """``7.2 B parameters``, and how many of them are trained where some are frozen."""
        words = f"{format_count(self.parameters)} parameters"
        if not self.frozen_parameters:
            return words
        trained, frozen = map(format_count, (self.trained_parameters, self.frozen_parameters))
        return f"{words} ({trained} trained, {frozen} frozen)"

    @property
    def memory_bytes(self) -> int:
        """Predicted peak of one rank: what tensors take."""
        return sum(term.bytes for term in self.memory)

    @property
    def units(self) -> str:
        """``tokens`` or ``images``."""
        return f"{self.unit}s"

    def samples_words(self) -> str:
        """Describe the input of a step: ``1,024 samples x 4,096 tokens``, or ``1,024 images``."""
        if self.unit == "image":
            return f"{self.samples_per_step:,} images"
        return f"{self.samples_per_step:,} samples x {self.seq_len:,} tokens"

    @property
    def epoch_s(self) -> float | None:
        """Predicted time of a pass over the data, without evaluation, saves and failures."""
        if self.epoch_samples is None or self.speed.tokens_per_s is None:
            return None
        return self.epoch_samples * self.seq_len / self.speed.tokens_per_s

    @property
    def tokens_per_step(self) -> int:
        """Tokens all ranks read in one step."""
        return self.samples_per_step * self.seq_len

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run."""
        if self.phases:
            return sum_or_none(phase.tokens for phase in self.phases)
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def step_s(self) -> float | None:
        """Predicted time of one step."""
        return sum(term.seconds for term in self.time) or None

    @property
    def mfu(self) -> float | None:
        """Predicted share of the peak, full-attention convention."""
        rate, peak = self.speed.tokens_per_s, self.peak.flops_per_s
        if rate is None or peak is None:
            return None
        return rate * self.flops_per_token["full"] / (peak * self.layout.world_size)

    @property
    def seconds(self) -> float | None:
        """Predicted time of all steps, without start, evaluation and failures."""
        if self.phases:
            return sum_or_none(phase.seconds for phase in self.phases)
        if self.tokens is None or self.speed.tokens_per_s is None:
            return None
        return self.tokens / self.speed.tokens_per_s

    @property
    def wall_s(self) -> float | None:
        """Predicted time with start, saves and failures, where they are predicted."""
        if not self.advances:
            return None
        if self.phases:
            return sum_or_none(phase.wall_s for phase in self.phases)
        if self.failures is not None:
            return self.failures.wall_s
        return None if self.seconds is None else self.reference_s + self.seconds

    @property
    def usd(self) -> float | None:
        """Predicted price of the run, with failures and the spare nodes that its time assumes."""
        if self.phases:
            return sum_or_none(phase.usd for phase in self.phases)
        if self.wall_s is None:
            return None
        return self.price.of(self.wall_s, nodes=self.nodes, spares=self.spare_nodes)

    @property
    def tokens_per_s_band(self) -> Range | None:
        """80 % band of the speed of all ranks."""
        rate, band = self.speed.tokens_per_s, self.speed.band
        return None if rate is None or band is None else band.of_rate(rate)

    @property
    def wall_s_band(self) -> Range | None:
        """80 % band of the wall time: what computes errs with the speed; start and saves stay."""
        if self.phases:
            return range_sum(phase.wall_s_band for phase in self.phases)
        band = self.speed.band
        if self.wall_s is None or self.seconds is None or band is None:
            return None
        return band.of_time(self.wall_s, steps_s=self.seconds + self.reference_s)

    @property
    def usd_band(self) -> Range | None:
        """80 % band of the price of the run, at this price of an hour."""
        if self.phases:
            return range_sum(phase.usd_band for phase in self.phases)
        band = self.wall_s_band
        if band is None or self.usd is None or not self.wall_s:
            return None
        return price_range(self.usd, self.wall_s, band)

    @property
    def spare_nodes(self) -> int:
        """Nodes that wait for another to fail."""
        if self.phases:
            # Phases follow each other on the same nodes, so spares do not add up.
            return max(phase.spare_nodes for phase in self.phases)
        return 0 if self.failures is None else self.failures.spare_nodes

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Predicted price of a million tokens, without failures."""
        if self.speed.tokens_per_s is None or self.price.usd_per_hour is None or not self.advances:
            return None
        return self.price.usd_per_hour / 3600 / self.speed.tokens_per_s * 1e6

    def samples_factor(self, critical_batch: float, *, times: float = 1) -> float:
        """Return the samples to a given loss over the fewest, at ``times`` this batch."""
        return samples_factor(times * self.samples_per_step, critical_batch=critical_batch)

    def memory_term(self, name: str) -> int:
        """Bytes of one term of ``memory``; 0 if there is none of that name."""
        return sum(term.bytes for term in self.memory if term.name == name)

    def line(self) -> str:
        """The plan in one line, printed before anything else happens."""
        states = sum(self.memory_term(name) for name in ("parameters", "gradients", "optimizer"))
        length = "length known once the data is prepared"
        if self.steps is not None and self.tokens is not None:
            length = f"{self.steps:,} steps, {format_count(self.tokens)} {self.units}"
        if self.phases:
            length += f" in {len(self.phases)} phases"
        parts = [
            f"plan: {self.model} {self.parameters_words()}",
            f"{layout_name(self.layout)} over {self.devices_words()}",
            f"{format_bytes(self.memory_bytes)} per rank (states {format_bytes(states)})",
            f"{self.samples_words()} a step",
            length,
        ]
        if self.fits in ("tight", "does not fit"):
            parts.insert(3, f"memory: {self.fits}")
        if self.wall_s is not None:
            parts.append(f"about {format_seconds(self.wall_s)}")
        if self.usd is not None:
            parts.append(f"about {format_usd(self.usd)}")
        if not self.advances:
            parts.append("would not advance for failures")
        return ", ".join(parts)

    def devices_words(self) -> str:
        """``2 CPU processes`` or ``16 x H100 SXM on 2 nodes``."""
        count = self.layout.world_size
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        # Only these two names are words with a plural; names of accelerators have none.
        if self.device.endswith(("process", "device")):
            plural = "" if count == 1 else "es" if self.device.endswith("ss") else "s"
            return f"{count} {self.device}{plural}{nodes}"
        return f"{count} x {self.device}{nodes}"

    def to_json(self) -> dict[str, Any]:
        """Return plan.json. It has ``peak_flops_per_s`` and the sums, for readers without us."""
        return {
            **asdict(self),
            "phases": [phase.to_json() for phase in self.phases],
            "peak_flops_per_s": self.peak.flops_per_s,
            "trained_parameters": self.trained_parameters,
            "memory_bytes": self.memory_bytes,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "step_s": self.step_s,
            "epoch_s": self.epoch_s,
            "mfu": self.mfu,
            "seconds": self.seconds,
            "wall_s": self.wall_s,
            "usd": self.usd,
            "spare_nodes": self.spare_nodes,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "bands": self.bands(),
        }

    def bands(self) -> dict[str, Range | None]:
        """Return the 80 % bands of speed, time and price, ``[low, high]``; None: none is known."""
        band = self.speed.band
        times = {"step_s": self.step_s, "usd_per_million_tokens": self.usd_per_million_tokens}
        return {
            **{name: band.of_time(s) if band and s else None for name, s in times.items()},
            "tokens_per_s": self.tokens_per_s_band,
            "wall_s": self.wall_s_band,
            "usd": self.usd_band,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Plan":
        """The same plan back; sums are not read but made again."""
        # Plans of older versions lack newer fields such as ``advances``: defaults stand in.
        fields = {name: content[name] for name in Plan.__dataclass_fields__ if name in content}
        fields["layout"] = Layout(**content["layout"])
        for name in ("memory", "communication"):
            fields[name] = tuple(Term(**term) for term in content[name])
        fields["memory_savings"] = tuple(
            Saving(**saving) for saving in content.get("memory_savings", ())
        )
        fields["time"] = tuple(TimeTerm(**term) for term in content["time"])
        fields["measured"] = tuple(content["measured"])
        fields["phases"] = tuple(Plan.from_json(phase) for phase in content.get("phases", ()))
        for name, kind in (("peak", Peak), ("speed", Speed), ("price", Price)):
            fields[name] = kind(**content[name])
        if content["speed"].get("band"):
            band = ErrorBand.from_json(content["speed"]["band"])
            fields["speed"] = replace(fields["speed"], band=band)
        if content.get("decoding") is not None:
            fields["decoding"] = Decoding(**content["decoding"])
        if content["failures"] is not None:
            fields["failures"] = FailureForecast.from_json(content["failures"])
        return Plan(**fields)


def plan_recipe(
    recipe: Recipe,
    *,
    shape: Model,
    steps: int | None,
    world_size: int,
    devices_per_node: int,
    machine: Machine | None,
    calibration: Calibration | None = None,
    epoch_samples: int | None = None,
    data: DatasetMetadata | None = None,
) -> Plan:
    """Predict a recipe without any ``auto``, also before its data is prepared.

    Args:
        shape: Of a transformer; or a network for images.
        data: Prepared data; None: not known yet.
        epoch_samples: Training samples of a pass over the data; None: not known yet.
        steps: None: still open. Of the batch that the run began with.
    """
    layout = _layout(recipe, shape, world_size=world_size, devices_per_node=devices_per_node)
    nodes = -(-world_size // devices_per_node)
    on = _devices(recipe, machine, devices_per_node=devices_per_node)
    workload = work_of(recipe, shape, layout, on.cluster)
    if steps is not None:
        steps = steps_on(recipe.optim, steps, devices=world_size)
    needed = _needed(workload, is_cpu=on.is_cpu)
    verdict = _fit_of(workload, needed, on.limit_bytes, on.cluster, is_cpu=on.is_cpu)
    cluster, why_not = _timed_cluster(workload, on, calibration, nodes=nodes, each=devices_per_node)
    timed = None if cluster is None else estimate_of(workload, cluster, calibration)
    reference_s, reference_reason = predicted_pass(
        recipe, workload, cluster, calibration, steps=steps, data=data
    )
    rate = None if timed is None else timed.tokens_per_s
    band = error_band(workload, on.accelerator, layout, is_scaled=is_scaled(calibration))
    trained, frozen = parameters_of(workload)
    saved = checkpoint_bytes(recipe, shape)
    outlook, why_no_outlook, advances = failure_outlook(
        recipe, step_s=None if timed is None else timed.step_s, devices=world_size, nodes=nodes,
        steps=steps, nbytes=saved, reference_s=reference_s,
    )  # fmt: skip
    return Plan(
        model=recipe.model.preset or recipe.model.path or recipe.model.hub or "model",
        parameters=trained + frozen,
        frozen_parameters=frozen,
        layout=layout,
        nodes=nodes,
        device=on.name,
        memory=needed.terms,
        memory_moment=needed.peak_phase,
        memory_savings=savings_of(workload, on_cpu=on.is_cpu),
        unit=unit_of(workload),
        decoding=_decoding(timed, on.cluster),
        epoch_samples=epoch_samples,
        reserved_bytes=needed.reserved_bytes,
        device_bytes=needed.device_bytes,
        memory_limit_bytes=on.limit_bytes,
        fits=verdict.verdict,
        fits_reason=verdict.reason,
        flops_per_token=flops_of(workload),
        peak=on.peak(workload.formats.compute, override_tflops=recipe.observe.peak_tflops),
        samples_per_step=workload.global_batch,
        micro_batch=workload.micro_batch,
        recompute=str(workload.recompute),
        seq_len=workload.seq_len,
        steps=steps,
        speed=speed_of(rate, why_not, on.accelerator, workload.formats.compute, calibration, band),
        time=timed.terms if timed else (),
        price=price_of(on.cluster),
        checkpoint_bytes=saved,
        communication=traffic_of(workload),
        failures=outlook,
        failures_reason=why_no_outlook,
        advances=advances,
        reference_s=reference_s,
        reference_reason=reference_reason,
        network=_network(recipe, on.cluster, nodes=nodes),
        snapshot_bytes=round(snapshot_bytes_of(workload) * devices_per_node),
        measured=calibration.sources if calibration else (),
    )


def _layout(recipe: Recipe, model: Model, *, world_size: int, devices_per_node: int) -> Layout:
    assert isinstance(recipe.data.seq_len, int)  # a resolved recipe holds no "auto"
    layout, _ = resolve_layout(
        recipe.parallel,
        world_size=world_size,
        devices_per_node=devices_per_node,
        shape=model if isinstance(model, ModelShape) else None,
        seq_len=recipe.data.seq_len,
    )
    return layout


def _needed(workload: Work, *, is_cpu: bool) -> MemoryEstimate:
    """Return the memory of a rank; on a CPU with everything else that its process holds."""
    needed, techniques = memory_of(workload), workload.techniques
    # On an accelerator the copies are in the host's memory, which `host_shortage_of` checks.
    if not is_cpu:
        return needed
    return on_cpu(needed, snapshots=techniques.snapshots, has_standby=techniques.has_standby)


def _fit_of(
    workload: Work,
    needed: MemoryEstimate,
    limit: int | None,
    named: ClusterHardware | None,
    *,
    is_cpu: bool,
) -> Fit:
    """Whether a rank's memory fits into a device, and that of a node's ranks into its host."""
    verdict = fit_on_cpu(needed, limit) if is_cpu else fit(needed.device_bytes, limit)
    return verdict if named is None else host_shortage_of(workload, named) or verdict


def _decoding(timed: AnyEstimate | None, named: ClusterHardware | None) -> Decoding | None:
    if not isinstance(timed, ImageEstimate) or named is None:
        return None
    return decoding_of(timed.trained_per_s, named, timed.workload.threads)


def _network(recipe: Recipe, named: ClusterHardware | None, *, nodes: int) -> str:
    if named is None or nodes == 1 or recipe.launch.kubernetes.efa == "auto":
        return ""
    return f"{named.between.name}: {named.between.source}"


def _timed_cluster(
    workload: Work, on: "_Devices", calibration: Calibration | None, *, nodes: int, each: int
) -> tuple[ClusterHardware | None, str]:
    """The named cluster, else the usual one of the accelerator; or why there is no speed.

    Args:
        each: Devices of a node.
    """
    accelerator, cluster, why_not = on.accelerator, on.cluster, "cannot be said without a peak"
    if accelerator is not None:
        why_not = missing_rate(accelerator, workload.formats.compute) or ""
    # Machines without a name have no known links, so the vendor's own system stands in.
    if cluster is None and accelerator is not None and not why_not:
        cluster, why_not = _reference(accelerator, devices_per_node=each, nodes=nodes)
    if cluster is None or why_not:
        return None, why_not
    return with_links(cluster, calibration), ""


def layout_name(layout: Layout) -> str:
    """The layout by the name that users of FSDP and DeepSpeed know, and its model axes."""
    axes = "".join(
        f" x {name} {degree}"
        for name in ("cp", "tp", "pp", "ep")
        if (degree := getattr(layout, name)) > 1
    )
    return _data_name(layout) + axes


def _data_name(layout: Layout) -> str:
    if layout.dp_shard * layout.cp == 1:  # cp ranks hold parts of one copy too
        return "NO_SHARD"
    if layout.dp_replicate > 1:
        zero = "" if layout.zero == 3 else f" zero {layout.zero}"
        return f"HYBRID_SHARD{zero} ({layout.dp_replicate} copies of {layout.dp_shard} ranks)"
    return {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 1: "ZeRO-1"}[layout.zero]


def _reference(
    accelerator: Accelerator, *, devices_per_node: int, nodes: int
) -> tuple[ClusterHardware | None, str]:
    """The vendor's system, or why there is none: a run on unnamed machines needs no speed."""
    try:
        return default_cluster(accelerator, devices_per_node=devices_per_node, nodes=nodes), ""
    except RequestError as error:
        return None, str(error)


def planned_cluster(
    recipe: Recipe, machine: Machine | None, *, devices_per_node: int
) -> ClusterHardware | None:
    """The machines of a recipe, or machines like this one; None: no accelerator that is known."""
    named = joined_cluster(recipe)
    is_cpu = named is None and recipe.cluster.device == "cpu"
    accelerator = _accelerator(named, machine, is_cpu=is_cpu)
    if named is not None or accelerator is None:
        return named
    nodes = recipe.cluster.nodes
    return _reference(accelerator, devices_per_node=devices_per_node, nodes=nodes)[0]


def with_links(cluster: ClusterHardware, calibration: Calibration | None) -> ClusterHardware:
    """The cluster with the links that were measured."""
    if calibration is None:
        return cluster
    return replace(
        cluster,
        inside=calibration.link_inside or cluster.inside,
        between=calibration.link_between or cluster.between,
    )


@dataclass(frozen=True, kw_only=True)
class _Devices:
    """Devices on which a recipe computes."""

    cluster: ClusterHardware | None
    """Named by the recipe; None: this machine."""
    is_cpu: bool
    accelerator: Accelerator | None
    name: str
    limit_bytes: int | None
    """Memory that one rank may fill."""

    def peak(self, number_format: str, *, override_tflops: float | None) -> Peak:
        return peak_of(
            self.accelerator,
            device_name=self.name,
            number_format=number_format,
            override_tflops=override_tflops,
        )


def _devices(recipe: Recipe, machine: Machine | None, *, devices_per_node: int) -> _Devices:
    named = joined_cluster(recipe)
    is_cpu = named is None and recipe.cluster.device == "cpu"
    accelerator = _accelerator(named, machine, is_cpu=is_cpu)
    return _Devices(
        cluster=named,
        is_cpu=is_cpu,
        accelerator=accelerator,
        name=_device_name(accelerator, machine, is_cpu=is_cpu),
        limit_bytes=_memory_limit(named, machine, is_cpu=is_cpu, devices_per_node=devices_per_node),
    )


def _accelerator(
    named: ClusterHardware | None, machine: Machine | None, *, is_cpu: bool
) -> Accelerator | None:
    if named is not None:
        return named.accelerator
    if machine is None or is_cpu:
        return None
    return accelerator_named(machine.name)


def _device_name(accelerator: Accelerator | None, machine: Machine | None, *, is_cpu: bool) -> str:
    if is_cpu:
        return "CPU process"
    if accelerator is not None:
        return accelerator.name
    return machine.name if machine is not None else "device"


def _memory_limit(
    named: ClusterHardware | None, machine: Machine | None, *, is_cpu: bool, devices_per_node: int
) -> int | None:
    """Bytes one rank may fill."""
    if named is not None:
        return named.accelerator.memory_bytes
    if machine is None or (is_cpu and machine.device != "cpu"):
        return None  # an accelerator's description does not tell the memory of its host
    return machine.memory_bytes // (devices_per_node if is_cpu else 1)
