"""Seeded traces of what ranks note of their steps, with faults whose place and time are known.

A step is computed as it happens: each rank waits for its samples and computes; then the ranks of a
node exchange, then those of a rail (the ranks of the same place on every node of an island), then
all. In each exchange everybody waits for the last, and it takes as long as its slowest link. So a
slow rank makes all others wait, and a slow link makes its groups wait, as in a real run.

Nothing here knows the judge: it says only what happened (`Fault`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Draw = np.random.Generator

Kind = Literal["compute", "data", "link"]
MACHINES = ("dedicated", "usual", "shared")
"""How loud: standard deviation of a step's compute 0.3 to 1 %, 1 to 3 %, 8 to 30 % in bursts."""
_NOISE = {"dedicated": (0.003, 0.01), "usual": (0.01, 0.03), "shared": (0.08, 0.3)}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that makes steps longer, and whose it is."""

    kind: Kind
    shape: str
    """How it comes: step, ramp, node, several, pulses, data, link, since start."""
    units: tuple[tuple[int, ...], ...]
    """Each rank that is slow, or the ranks of each group whose link is."""
    begin: int
    """Number of the first step in which it is there, of a ramp: in which it has reached 10 %."""
    end: int
    """Number of the first step without it."""
    factor: float
    """Times as long as without it."""
    tell: Literal["must", "may", "no"] = "must"
    """Whether it is to be told; ``no``: it is lawful."""
    since: int | None = None
    """Number of the first step with any of it; None: ``begin``."""

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for unit in self.units for rank in unit})


@dataclass(kw_only=True)
class Trace:
    """What the ranks of one run noted, by step and rank, in seconds."""

    seed: int
    machine: str
    nodes: int
    devices: int
    stages: int
    compute_s: Floats
    data_s: Floats
    exchange_s: dict[tuple[int, ...], Floats] = field(default_factory=dict)
    """Ranks of a group -> by step and member."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices

    @property
    def steps(self) -> int:
        return len(self.compute_s)


def healthy(seed: int, *, machine: str, steps: int, ranks: int = 8) -> Trace:
    """Without a fault, but with all that a healthy run has."""
    draw = np.random.default_rng([seed, 1])
    nodes = max(1, ranks // 8)
    trace, node_s, rail_s = _machine(
        seed, draw, machine, nodes=nodes, devices=ranks // nodes, steps=steps
    )
    _disturb(trace, draw)
    _exchange(trace, node_s, rail_s, island=nodes)
    return trace


def drawn(seed: int, *, steps: int = 480) -> Trace:
    """One of the traces of the score table: of four, one is healthy, and one has a slow link."""
    draw = np.random.default_rng([seed, 0])
    nodes = int(2 ** draw.integers(1, 7))
    devices = 8 if nodes > 2 else int(draw.choice([4, 8]))
    machine = "dedicated" if draw.random() < 0.5 else "usual"
    trace, node_s, rail_s = _machine(seed, draw, machine, nodes=nodes, devices=devices, steps=steps)
    island = nodes if nodes < 4 or draw.random() < 0.5 else int(draw.choice([2, nodes // 2]))
    _disturb(trace, draw)
    what = draw.random()
    if what < 0.25:
        _slow_link(trace, draw, node_s, rail_s, island)
    elif what < 0.75:
        _slow_ranks(trace, draw)
    _exchange(trace, node_s, rail_s, island=island)
    return trace


def loud(seed: int, *, steps: int = 480) -> Trace:
    """A machine that others use too, and one rank that takes half as long again, or more."""
    draw = np.random.default_rng([seed, 2])
    ranks = int(2 ** draw.integers(2, 6))
    nodes = max(1, ranks // 8)
    trace, node_s, rail_s = _machine(
        seed, draw, "shared", nodes=nodes, devices=ranks // nodes, steps=steps
    )
    _disturb(trace, draw)
    rank, begin = int(draw.integers(trace.ranks)), int(draw.integers(160, 240))
    factor = float(draw.uniform(1.5, 4.0))
    _slow(trace, Fault(kind="compute", shape="step", units=((rank,),), begin=begin, end=steps + 1,
                       factor=factor))  # fmt: skip
    _exchange(trace, node_s, rail_s, island=nodes)
    return trace


# -- what a healthy machine does --------------------------------------------------------------


def _machine(
    seed: int, draw: Draw, machine: str, *, nodes: int, devices: int, steps: int
) -> tuple[Trace, Floats, Floats]:
    """Noise, boards that differ, stages of a pipeline; and how long an exchange takes by node."""
    ranks = nodes * devices
    stages = int(draw.choice([1, 1, 2, 4])) if nodes >= 4 else 1
    step_s = float(np.exp(draw.uniform(math.log(0.2), math.log(2.0))))
    logs = _noise(draw, machine, steps, nodes, devices)
    logs += draw.normal(0.0, 0.01, ranks)  # boards of one kind differ
    share = np.exp(draw.uniform(-0.4, 0.4, stages))
    logs += np.log(np.repeat(share, ranks // stages))  # stages have other parts of the model
    logs += draw.normal(0.0, 0.06, (steps, 1))  # samples of other lengths, alike for all
    trace = Trace(
        seed=seed,
        machine=machine,
        nodes=nodes,
        devices=devices,
        stages=stages,
        compute_s=step_s * np.exp(logs),
        data_s=np.abs(draw.normal(0.0, 0.001, (steps, ranks))) * step_s,
    )
    if draw.random() < 0.3:
        _slow_since_start(trace, draw)
    spread = {"dedicated": 0.03, "usual": 0.08, "shared": 0.3}[machine]
    part = draw.uniform(0.05, 0.4)  # of compute
    node_s = step_s * part * draw.lognormal(0.0, spread, (steps, nodes))
    rail_s = step_s * part * draw.lognormal(0.0, spread, (steps, nodes))
    return trace, node_s, rail_s


def _noise(draw: Draw, machine: str, steps: int, nodes: int, devices: int) -> Floats:
    """Logarithms: tails, neighbouring steps alike, ranks of a node alike, drift."""
    low, high = _NOISE[machine]
    size = float(np.exp(draw.uniform(math.log(low), math.log(high))))
    ranks = nodes * devices
    tail = float(draw.choice([3.0, 5.0, 30.0]))  # degrees of freedom
    fresh = draw.standard_t(tail, (steps, ranks)) * size * math.sqrt((tail - 2) / tail)
    logs = _alike(fresh, float(draw.uniform(0.0, 0.5)))
    shared = draw.normal(0.0, size / 2, (steps, nodes))
    logs += np.repeat(_alike(shared, 0.5), devices, axis=1)
    drift = np.cumsum(draw.normal(0.0, 1.0, (steps, ranks)), axis=0) / math.sqrt(steps)
    logs += drift * float(draw.uniform(0.0, 0.015))
    if machine == "shared":
        logs += _bursts(draw, steps, ranks)
    return logs


def _alike(fresh: Floats, kept: float) -> Floats:
    """Of the same spread, where each step keeps so much of the one before."""
    found = np.empty_like(fresh)
    last, rest = fresh[0], math.sqrt(1 - kept**2)
    for step, values in enumerate(fresh):
        last = kept * last + rest * values if step else values
        found[step] = last
    return found


def _bursts(draw: Draw, steps: int, ranks: int) -> Floats:
    """Another program on the same core: two to three times as long for some steps."""
    logs = np.zeros((steps, ranks))
    for rank in range(ranks):
        step = 0
        while (step := step + int(draw.exponential(40)) + 1) < steps:
            length = int(draw.integers(1, 12))
            logs[step : step + length, rank] += math.log(draw.uniform(1.5, 3.0))
    return logs


def _slow_since_start(trace: Trace, draw: Draw) -> None:
    """A node of an older kind: somewhat slower, or by half and more, which is to be told."""
    is_much = draw.random() < 0.4
    factor = float(draw.uniform(1.4, 2.0) if is_much else draw.uniform(1.02, 1.15))
    node = int(draw.integers(trace.nodes))
    if trace.nodes // trace.stages < 3:
        return  # of two nodes, one of which is slower, neither is the odd one for sure
    _slow(trace, Fault(kind="compute", shape="since start", units=_ranks_of(trace, node), begin=1,
                       end=trace.steps + 1, factor=factor,
                       tell="must" if is_much else "no"))  # fmt: skip


def _disturb(trace: Trace, draw: Draw) -> None:
    """Hiccups, evaluations, saves, stalls of the storage: they pass, and nobody is slow."""
    steps, ranks = trace.steps, trace.ranks
    share = float(draw.choice([0.0, 0.002, 0.01]))
    hiccups = draw.random((steps, ranks)) < share
    trace.compute_s[hiccups] *= draw.uniform(1.3, 10.0, int(hiccups.sum()))
    for step in range(int(draw.integers(40, 100)), steps, int(draw.integers(60, 200))):
        trace.compute_s[step, :] *= draw.uniform(1.0, 1.3)  # caches are cold after an evaluation
    for step in range(int(draw.integers(40, 100)), steps, int(draw.integers(60, 200))):
        node, length = int(draw.integers(trace.nodes)), int(draw.integers(1, 6))
        mine = slice(node * trace.devices, (node + 1) * trace.devices)
        trace.compute_s[step : step + length, mine] *= draw.uniform(1.02, 1.5)  # a save is written
    for _ in range(int(draw.integers(0, 3))):
        step, length = int(draw.integers(steps)), int(draw.integers(1, 12))
        usual_s = float(np.median(trace.compute_s))
        stalls_s = draw.uniform(0.2, 5.0) * usual_s
        if draw.random() < 0.5:
            trace.data_s[step : step + length] += stalls_s  # the storage of all
        else:
            node = int(draw.integers(trace.nodes))
            mine = slice(node * trace.devices, (node + 1) * trace.devices)
            trace.data_s[step : step + length, mine] += stalls_s


# -- faults -----------------------------------------------------------------------------------


def _slow(trace: Trace, fault: Fault) -> None:
    trace.faults.append(fault)
    trace.compute_s[fault.begin - 1 : fault.end - 1, fault.ranks] *= fault.factor


def _drawn_factor(draw: Draw) -> float:
    """10 to 100 % longer, small ones as often as large ones."""
    return 1.0 + float(np.exp(draw.uniform(math.log(0.1), 0.0)))


def _slow_ranks(trace: Trace, draw: Draw) -> None:
    shapes: dict[str, Callable[[Trace, Draw], None]] = {
        "step": _one_rank, "ramp": _ramp, "node": _one_node, "several": _several,
        "pulses": _pulses, "data": _slow_data,
    }  # fmt: skip
    shapes[str(draw.choice(list(shapes), p=[0.35, 0.15, 0.2, 0.1, 0.1, 0.1]))](trace, draw)


def _begin(trace: Trace, draw: Draw) -> int:
    return int(draw.integers(140, trace.steps - 120))


def _one_rank(trace: Trace, draw: Draw) -> None:
    begin, rank = _begin(trace, draw), int(draw.integers(trace.ranks))
    end = trace.steps + 1 if draw.random() < 0.5 else begin + int(draw.integers(40, 110))
    _slow(trace, Fault(kind="compute", shape="step", units=((rank,),), begin=begin, end=end,
                       factor=_drawn_factor(draw)))  # fmt: skip


def _ranks_of(trace: Trace, node: int) -> tuple[tuple[int, ...], ...]:
    return tuple((node * trace.devices + place,) for place in range(trace.devices))


def _one_node(trace: Trace, draw: Draw) -> None:
    begin, node = _begin(trace, draw), int(draw.integers(trace.nodes))
    _slow(trace, Fault(kind="compute", shape="node", units=_ranks_of(trace, node), begin=begin,
                       end=trace.steps + 1, factor=_drawn_factor(draw),
                       tell=_if_it_has_peers(trace)))  # fmt: skip


def _if_it_has_peers(trace: Trace) -> Literal["must", "may"]:
    """A node that is a stage of the pipeline by itself has nothing that it could be told from."""
    return "must" if trace.nodes // trace.stages > 1 else "may"


def _several(trace: Trace, draw: Draw) -> None:
    """Two or three ranks of different nodes, each at its own time."""
    nodes = draw.permutation(trace.nodes)[: int(draw.integers(2, 4))]
    for node in nodes:
        rank = int(node) * trace.devices + int(draw.integers(trace.devices))
        _slow(trace, Fault(kind="compute", shape="several", units=((rank,),),
                           begin=_begin(trace, draw), end=trace.steps + 1,
                           factor=_drawn_factor(draw)))  # fmt: skip


def _ramp(trace: Trace, draw: Draw) -> None:
    """It grows over 20 to 80 steps, and counts from where it has reached 10 %."""
    begin, rank = _begin(trace, draw), int(draw.integers(trace.ranks))
    factor, length = _drawn_factor(draw), int(draw.integers(20, 80))
    grown = np.minimum(1.0, np.arange(1, trace.steps - begin + 2) / length)
    trace.compute_s[begin - 1 :, rank] *= np.exp(grown * math.log(factor))
    reached = begin + math.ceil(length * math.log(1.1) / math.log(factor)) - 1
    trace.faults.append(
        Fault(kind="compute", shape="ramp", units=((rank,),), begin=reached, since=begin,
              end=trace.steps + 1, factor=factor)
    )  # fmt: skip


def _pulses(trace: Trace, draw: Draw) -> None:
    """Slow for some steps, well for some, in turn; the first is due if it lasts 24 steps."""
    begin, rank, factor = _begin(trace, draw), int(draw.integers(trace.ranks)), _drawn_factor(draw)
    length, pause = int(draw.integers(4, 60)), int(draw.integers(20, 60))
    for first in range(begin, trace.steps + 1, length + pause):
        end = min(first + length, trace.steps + 1)
        is_due = first == begin and end - first >= 24
        _slow(trace, Fault(kind="compute", shape="pulses", units=((rank,),), begin=first, end=end,
                           factor=factor, tell="must" if is_due else "may"))  # fmt: skip


def _slow_data(trace: Trace, draw: Draw) -> None:
    """The samples of one node come late from some step on."""
    begin, node = _begin(trace, draw), int(draw.integers(trace.nodes))
    fault = Fault(kind="data", shape="data", units=_ranks_of(trace, node), begin=begin,
                  end=trace.steps + 1, factor=_drawn_factor(draw),
                  tell=_if_it_has_peers(trace))  # fmt: skip
    usual_s = np.median(trace.compute_s[:, fault.ranks], axis=0)
    trace.data_s[begin - 1 :, fault.ranks] += (fault.factor - 1) * usual_s
    trace.faults.append(fault)


def _slow_link(trace: Trace, draw: Draw, node_s: Floats, rail_s: Floats, island: int) -> None:
    """The links inside a node, or those of a node to others: from a step on, or since the start.

    A lone node's slow rails slow its island; where all nodes are one island, there is nothing to
    tell it from, and nothing is due.
    """
    node, is_since_start = int(draw.integers(trace.nodes)), draw.random() < 0.3
    begin = 1 if is_since_start else _begin(trace, draw)
    is_inside = draw.random() < 0.5
    seconds = node_s if is_inside else rail_s
    more_s = float(np.median(trace.compute_s)) * (_drawn_factor(draw) - 1)  # 10 % of a step or more
    factor = 1.0 + more_s / float(np.median(seconds[:, node]))
    if is_since_start:
        factor = max(factor, 2.0)
    seconds[begin - 1 :, node] *= factor
    groups = [(node * trace.devices, (node + 1) * trace.devices, 1)]
    if not is_inside:
        groups = [(*rail, trace.devices) for rail in _rails(trace, island, node)]
    alike = trace.nodes if is_inside else trace.nodes // island
    trace.faults.append(
        Fault(kind="link", shape="link since start" if is_since_start else "link",
              units=tuple(tuple(range(*group)) for group in groups), begin=begin,
              end=trace.steps + 1, factor=factor, tell="must" if alike > 1 else "may")
    )  # fmt: skip


def _rails(trace: Trace, island: int, node: int) -> list[tuple[int, int]]:
    """First rank and end of the rails of a node's island."""
    first = node // island * island * trace.devices
    return [
        (first + place, first + place + (island - 1) * trace.devices + 1)
        for place in range(trace.devices)
    ]


def _exchange(trace: Trace, node_s: Floats, rail_s: Floats, *, island: int) -> None:
    """Have each step's exchanges happen: inside of nodes, on the rails of islands, and of all."""
    shape = (trace.steps, trace.nodes, trace.devices)
    came_s = (trace.compute_s + trace.data_s).reshape(shape)
    after_s = came_s.max(axis=2) + node_s
    inside_s = after_s[:, :, None] - came_s
    for node in range(trace.nodes):
        ranks = tuple(range(node * trace.devices, (node + 1) * trace.devices))
        trace.exchange_s[ranks] = inside_s[:, node]
    if island < 2:
        return
    islands = trace.nodes // island
    there_s = after_s.reshape(trace.steps, islands, island)
    slowest_s = rail_s.reshape(trace.steps, islands, island).max(axis=2)
    rails_s = (there_s.max(axis=2) + slowest_s)[:, :, None] - there_s
    for number in range(islands):
        for first, end in _rails(trace, island, number * island):
            trace.exchange_s[tuple(range(first, end, trace.devices))] = rails_s[:, number]
