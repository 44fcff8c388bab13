"""Host memory of offload and snapshots, and the bytes that a step moves there and back."""

from typing import assert_never

from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.memory import Fit, saved_activation_bytes
from shardyard.planner.stages import in_flight, stage_blocks, stage_parameters, stage_trained
from shardyard.planner.workload import Techniques, Workload
from shardyard.units import format_bytes


def host_bytes(w: Workload) -> float:
    """Host memory that the first stage's rank needs."""
    return offloaded_bytes(w) + snapshot_bytes(w)


def snapshot_bytes(w: Workload) -> float:
    """Copies of what a checkpoint holds, of this rank's part."""
    formats = w.formats
    frozen = 0.0 if _has_adapters(w) else _frozen(w) * formats.compute_bytes
    state = _trained(w) * formats.weight_bytes + _optimizer_bytes(w) + frozen
    return w.techniques.snapshots * state


def offloaded_bytes(w: Workload) -> float:
    """Return the bytes that offload saves on the rank's device."""
    offload, formats = w.techniques.offload, w.formats
    match offload:
        case "none":
            return 0.0
        case "optimizer":
            return _optimizer_bytes(w)
        case "params":
            states = formats.weight_bytes + formats.gradient_bytes
            held = _trained(w) * states + _optimizer_bytes(w)
            return held + _frozen(w) * formats.compute_bytes
        case "activations":
            return _activations(w) * in_flight(w, 0)
        case _:
            assert_never(offload)


def overlapped_transfer_bytes(w: Workload) -> float:
    """Bytes of a step that cross the link between one device and its host while it computes."""
    offload, formats, passes = w.techniques.offload, w.formats, w.micro_batches
    match offload:
        case "none" | "optimizer":
            return 0.0
        case "params" if not w.techniques.updates_on_host:  # as they lie there, master weights
            up = _frozen(w) * formats.compute_bytes + _trained(w) * formats.weight_bytes
            return passes * (2 * up + _trained(w) * formats.gradient_bytes)
        case "params":  # up for each direction of a pass, gradients down
            return passes * (2 * (_frozen(w) + _trained(w)) + _trained(w)) * formats.compute_bytes
        case "activations":
            return 2 * passes * _activations(w)
        case _:
            assert_never(offload)


def moved_for_update(w: Workload) -> float:
    """Return the bytes that cross the host link for the update, without overlapping compute."""
    offload, formats = w.techniques.offload, w.formats
    match offload:
        case "none" | "activations":
            return 0.0
        case "optimizer" if not w.techniques.updates_on_host:  # both ways at once, each as much
            return _optimizer_bytes(w)
        case "optimizer":  # gradients down, parameters up
            return _trained(w) * (formats.gradient_bytes + formats.weight_bytes)
        case "params" if not w.techniques.updates_on_host:  # up; less goes down meanwhile
            each = formats.weight_bytes + formats.gradient_bytes
            return _trained(w) * each + _optimizer_bytes(w)
        case "params":
            return 0.0
        case _:
            assert_never(offload)


def _owned_parameters(w: Workload) -> float:
    """Parameters of the first stage that one rank is the keeper of."""
    shards = w.layout.dp_shard * w.layout.cp
    return stage_parameters(w.shape, w.layout, stage_blocks(w, 0)) / shards


def _trained(w: Workload) -> float:
    """Return the trained parameters of the first stage that one rank keeps."""
    trained = stage_trained(w, 0)
    return (
        _owned_parameters(w)
        if trained is None
        else trained.elements / (w.layout.dp_shard * w.layout.cp)
    )


def _optimizer_bytes(w: Workload) -> float:
    """States of the optimizer of the first stage, of one rank's part."""
    trained = stage_trained(w, 0)
    outside = stage_parameters(w.shape, w.layout, 0) if trained is None else trained.outside
    return w.formats.all_optimizer_bytes(_trained(w), outside / (w.layout.dp_shard * w.layout.cp))


def _frozen(w: Workload) -> float:
    """Return the frozen parameters that one rank keeps; adapters add to the model's parameters."""
    trained = stage_trained(w, 0)
    outside = 0.0 if trained is None else trained.outside / (w.layout.dp_shard * w.layout.cp)
    return _owned_parameters(w) - (outside if _has_adapters(w) else _trained(w))


def _has_adapters(w: Workload) -> bool:
    """Whether what is trained comes to the model's parameters."""
    return w.trained is not None and w.trained.adapters is not None


def _activations(w: Workload) -> float:
    """Bytes that one pass leaves for the backward pass."""
    trained = stage_trained(w, 0)
    blocks = stage_blocks(w, 0) if trained is None else trained.layers
    return w.tokens / w.layout.cp * blocks * saved_activation_bytes(w)[0]


def host_shortage(w: Workload, cluster: ClusterHardware) -> Fit | None:
    """Says so if the hosts have too little memory for it."""
    return host_memory_shortage(
        cluster, offloaded_bytes(w), snapshot_bytes(w), techniques=w.techniques
    )


def host_memory_shortage(
    cluster: ClusterHardware, moved_bytes: float, retained_bytes: float, *, techniques: Techniques
) -> Fit | None:
    """Says so if the hosts have too little memory for what one rank moves and keeps there."""
    # All ranks of a node keep their copies in the memory of the same host.
    needed = (moved_bytes + retained_bytes) * cluster.devices_per_node
    there = cluster.host_memory_bytes
    if there is None or needed <= there:
        return None
    why = {
        f"memory.offload={techniques.offload}": moved_bytes,
        f"{techniques.snapshots} copies of the state (elastic.snapshot_every)": retained_bytes,
    }
    causes = [what for what, size in why.items() if size]
    verb = "needs" if causes == [next(iter(why))] else "need"
    return Fit(
        verdict="does not fit",
        reason=f"{' and '.join(causes)} {verb} {format_bytes(needed)} of host memory "
        f"a node, which has {format_bytes(there)}",
    )
