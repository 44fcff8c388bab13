"""The plan: what a resolved recipe will take on given devices, as one value.

Pure and quick. Training prints its line, writes it to plan.json and reads ``flops_per_token`` and
``peak_flops_per_s`` back for MFU; the report prints it against what was measured.
"""

from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.legality import Layout, resolve_layout
from shardyard.config.presets import ModelShape
from shardyard.config.resolved import Resolved
from shardyard.config.schema import Recipe
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import Instance, accelerator_named, instance
from shardyard.hardware.machine import Machine
from shardyard.plan.flops import flops_per_token
from shardyard.plan.memory import Term, memory_terms, optimizer_bytes_per_parameter
from shardyard.plan.throughput import Peak, Price, Speed, peak_of, price_of, speed_of
from shardyard.plan.traffic import communication_terms
from shardyard.units import format_bytes, format_count, format_seconds, format_usd

SAFE_SHARE = 0.8
"""Share of a device's memory that a plan may fill and still be said to fit. The driver shows more
than what tensors take: a formula like this one, with 4 GiB added, comes to 0.82 of what the runs of
BLOOM's prototypes printed (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles.md)."""


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
    memory_limit_bytes: int | None
    """Memory that one rank may fill; None: not known."""
    fits: str
    """fits, tight, does not fit, or unknown."""
    fits_reason: str
    flops_per_token: dict[str, float]
    """Model FLOP, forward and backward, by convention: full and causal."""
    peak: Peak
    samples_per_step: int
    seq_len: int
    steps: int | None
    """None: not known before the data is prepared."""
    speed: Speed
    price: Price
    checkpoint_bytes: int
    """One checkpoint on disk, all ranks."""
    communication: tuple[Term, ...]

    @property
    def memory_bytes(self) -> int:
        """Predicted peak of one rank."""
        return sum(term.bytes for term in self.memory)

    @property
    def tokens_per_step(self) -> int:
        """Tokens all ranks read in one step."""
        return self.samples_per_step * self.seq_len

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run."""
        return None if self.steps is None else self.steps * self.tokens_per_step

    @property
    def seconds(self) -> float | None:
        """Predicted time of all steps, without start, evaluation and failures."""
        if self.tokens is None or self.speed.tokens_per_s is None:
            return None
        return self.tokens / self.speed.tokens_per_s

    @property
    def usd(self) -> float | None:
        """Predicted price of all steps."""
        if self.seconds is None or self.price.usd_per_hour is None:
            return None
        return self.seconds / 3600 * self.price.usd_per_hour

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Predicted price of a million tokens."""
        if self.speed.tokens_per_s is None or self.price.usd_per_hour is None:
            return None
        return self.price.usd_per_hour / 3600 / self.speed.tokens_per_s * 1e6

    def memory_term(self, name: str) -> int:
        """Bytes of one term of ``memory``; 0 if there is none of that name."""
        return sum(term.bytes for term in self.memory if term.name == name)

    def line(self) -> str:
        """The plan in one line, printed before anything else happens."""
        states = sum(self.memory_term(name) for name in ("parameters", "gradients", "optimizer"))
        length = "length known once the data is prepared"
        if self.steps is not None and self.tokens is not None:
            length = f"{self.steps:,} steps, {format_count(self.tokens)} tokens"
        parts = [
            f"plan: {self.model} {format_count(self.parameters)} parameters",
            f"{layout_name(self.layout)} over {self.devices_words()}",
            f"{format_bytes(self.memory_bytes)} per rank (states {format_bytes(states)})",
            f"{self.samples_per_step:,} samples x {self.seq_len:,} tokens a step",
            length,
        ]
        if self.fits in ("tight", "does not fit"):
            parts.insert(3, f"memory: {self.fits}")
        if self.seconds is not None:
            parts.append(f"about {format_seconds(self.seconds)}")
        if self.usd is not None:
            parts.append(f"about {format_usd(self.usd)}")
        return ", ".join(parts)

    def devices_words(self) -> str:
        """``2 CPU processes`` or ``16 x H100 SXM on 2 nodes``."""
        count = self.layout.world_size
        nodes = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        if self.device.endswith(("process", "device")):
            plural = "" if count == 1 else "es" if self.device.endswith("ss") else "s"
            return f"{count} {self.device}{plural}{nodes}"
        return f"{count} x {self.device}{nodes}"

    def to_json(self) -> dict[str, Any]:
        """plan.json. ``peak_flops_per_s`` and the sums stand there too, for readers without us."""
        return {
            **asdict(self),
            "peak_flops_per_s": self.peak.flops_per_s,
            "memory_bytes": self.memory_bytes,
            "tokens_per_step": self.tokens_per_step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "usd": self.usd,
            "usd_per_million_tokens": self.usd_per_million_tokens,
        }

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Plan":
        """The same plan back; sums are not read but made again."""
        fields = {name: content[name] for name in Plan.__dataclass_fields__}
        fields["layout"] = Layout(**content["layout"])
        for name in ("memory", "communication"):
            fields[name] = tuple(Term(**term) for term in content[name])
        for name, kind in (("peak", Peak), ("speed", Speed), ("price", Price)):
            fields[name] = kind(**content[name])
        return Plan(**fields)


def plan(
    resolved: Resolved, *, world_size: int, devices_per_node: int, machine: Machine | None
) -> Plan:
    """Predict a resolved recipe.

    Args:
        machine: A machine of the run; not asked where ``cluster.instance`` names one. None: what
            depends on the device stays open.

    Raises:
        RequestError: The degrees do not fit the world size, or the instance is not known.
    """
    return plan_recipe(
        resolved.recipe,
        shape=resolved.shape,
        steps=resolved.steps,
        world_size=world_size,
        devices_per_node=devices_per_node,
        machine=machine,
    )


def plan_recipe(
    recipe: Recipe,
    *,
    shape: ModelShape,
    steps: int | None,
    world_size: int,
    devices_per_node: int,
    machine: Machine | None,
) -> Plan:
    """As ``plan``, before the data is prepared: ``steps`` may still be open."""
    layout, _ = resolve_layout(
        recipe.parallel, world_size=world_size, devices_per_node=devices_per_node
    )
    nodes = -(-world_size // devices_per_node)
    rented = instance(recipe.cluster.instance) if recipe.cluster.instance else None
    is_cpu = rented is None and recipe.cluster.device == "cpu"
    accelerator = _accelerator(rented, machine, is_cpu=is_cpu)
    device = _device_name(accelerator, machine, is_cpu=is_cpu)
    memory = memory_terms(recipe, shape, layout, is_cpu=is_cpu)
    limit = _memory_limit(rented, machine, is_cpu=is_cpu, devices_per_node=devices_per_node)
    fits, fits_reason = risk(sum(term.bytes for term in memory), limit)
    flops = flops_per_token(shape, _number(recipe.data.seq_len))
    compute = recipe.precision.compute
    peak = peak_of(
        accelerator, device_name=device, number_format=compute, given=recipe.observe.peak_tflops
    )
    speed = speed_of(
        peak, ranks=world_size, full_flops_per_token=flops["full"], number_format=compute
    )
    return Plan(
        model=recipe.model.preset or recipe.model.path or recipe.model.hub or "model",
        parameters=shape.parameters,
        layout=layout,
        nodes=nodes,
        device=device,
        memory=memory,
        memory_limit_bytes=limit,
        fits=fits,
        fits_reason=fits_reason,
        flops_per_token=flops,
        peak=peak,
        samples_per_step=_number(recipe.optim.global_batch),
        seq_len=_number(recipe.data.seq_len),
        steps=steps,
        speed=speed,
        price=price_of(rented, nodes=nodes),
        checkpoint_bytes=shape.parameters * (4 + optimizer_bytes_per_parameter(recipe)),
        communication=communication_terms(recipe, shape, layout),
    )


def layout_name(layout: Layout) -> str:
    """The layout by the name that users of FSDP and DeepSpeed know."""
    if layout.dp_shard == 1:
        return "NO_SHARD"
    if layout.dp_replicate > 1:
        zero = "" if layout.zero == 3 else f" zero {layout.zero}"
        return f"HYBRID_SHARD{zero} ({layout.dp_replicate} copies of {layout.dp_shard} ranks)"
    return {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 1: "ZeRO-1"}[layout.zero]


def risk(memory_bytes: int, limit_bytes: int | None) -> tuple[str, str]:
    """A word for how near the predicted peak comes to the memory there is, and its reason."""
    if limit_bytes is None:
        return "unknown", "the memory of the device is not known"
    share = memory_bytes / limit_bytes
    reason = f"{share:.0%} of {format_bytes(limit_bytes)}"
    if share <= SAFE_SHARE:
        return "fits", reason
    if share <= 1:
        rest = "the allocator's reserve and the driver need the rest"
        return "tight", f"{reason}; above {SAFE_SHARE:.0%} {rest}"
    return "does not fit", reason


def _accelerator(
    rented: Instance | None, machine: Machine | None, *, is_cpu: bool
) -> Accelerator | None:
    if rented is not None:
        return rented.accelerator
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
    rented: Instance | None, machine: Machine | None, *, is_cpu: bool, devices_per_node: int
) -> int | None:
    """Bytes one rank may fill."""
    if rented is not None:
        return rented.accelerator.memory_bytes
    if machine is None or (is_cpu and machine.device != "cpu"):
        return None  # an accelerator's description does not tell the memory of its host
    return machine.memory_bytes // (devices_per_node if is_cpu else 1)


def _number(value: int | str) -> int:
    assert isinstance(value, int), value  # a resolved recipe holds no "auto"
    return value
