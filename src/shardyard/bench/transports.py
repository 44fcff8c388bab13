"""One benchmark over several networks, side by side: what each changes, and their common table.

What a variant sets, and who says so: NCCL_NET and NCCL_SOCKET_IFNAME, NVIDIA's list of NCCL's
variables; FI_EFA_IFACE, ofiwg/libfabric#10263 (from libfabric 1.22); GLOO_SOCKET_IFNAME, torch's
page of torch.distributed. All EFA interfaces need none (aws-ofi-nccl, doc/efa-env-var.md).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardyard.bench.nccl_table import CollectiveTiming
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RequestError
from shardyard.hardware.catalogue import instance
from shardyard.rundir.network import Collective, ObservedNetwork, Transport

_VARIANT = re.compile(r"(efa|one-efa|sockets)(?::([A-Za-z0-9_.-]{1,15}))?", re.ASCII)
_CHOOSES_NETWORK = ("NCCL_NET", "FI_EFA_IFACE")
"""Variables of launch.env that would change every variant."""

Rates = dict[tuple[Collective, int], dict[str, float]]
"""Bus bandwidth of each variant, GB/s, by collective and size."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One network that is measured."""

    name: str
    """Requested name: ``efa``, ``one-efa``, ``efa:rdmap16s27``, ``sockets``, ``sockets:eth0``."""
    transport: Transport
    interface: str
    """The only one that is used; empty: not named."""

    @property
    def label(self) -> str:
        """Ends the ids of its runs."""
        return self.name.replace(":", "-")

    def is_used(self, network: ObservedNetwork | None) -> bool:
        """Whether this is what was used in truth, as NCCL's log or gloo's interfaces say."""
        if network is None or network.transport != self.transport:
            return False
        if self.transport == "sockets":
            return self.interface in ("", network.interfaces)
        return self.name == "efa" or network.interfaces == "1 interfaces"


def variants_in(text: str) -> tuple[Variant, ...]:
    """Parse the variants of ``efa,one-efa,sockets``.

    Raises:
        RequestError: One is not known, or occurs twice.
    """
    names, found = text.split(","), []
    for name in names:
        match = _VARIANT.fullmatch(name)
        if match is None or (match[1] == "one-efa" and match[2]):
            raise RequestError(
                f"--transports {text}: {name!r} is not a network that can be chosen. Use one or "
                "more of efa (all interfaces), one-efa, efa:INTERFACE, sockets and "
                "sockets:INTERFACE, joined by commas."
            )
        transport: Transport = "sockets" if match[1] == "sockets" else "efa"
        found.append(Variant(name=name, transport=transport, interface=match[2] or ""))
    if len(set(names)) < len(names):
        raise RequestError(
            f"--transports {text} names a network twice. Repeat the command to measure one again."
        )
    return tuple(found)


def overrides_of(variant: Variant, recipe: Recipe, *, device: str, launcher: str) -> list[str]:
    """Return the settings that a variant changes in a recipe, as ``section.key=value``.

    Args:
        device: Kind of the nodes' devices, as torch calls it; auto: not known.

    Raises:
        RequestError: The variant cannot be chosen there, or the recipe already chooses.
    """
    what = f"--transports {variant.name}"
    _check_network_choice(what, variant, recipe, device)
    variables = _variables(variant, device)
    if variant.name == "one-efa" and launcher != "kubernetes":
        raise RequestError(
            f"{what} on {launcher}: only pods are given a number of interfaces, and Shardyard does "
            "not know the interfaces' names on other launchers. Name one that every node has (`ls "
            "/sys/class/infiniband` on a node): --transports efa:INTERFACE."
        )
    env = recipe.launch.env
    taken = [name for name in (*_CHOOSES_NETWORK, *variables) if name in env]
    if taken:
        raise RequestError(
            f"launch.env.{taken[0]}={env[taken[0]]} chooses a network, and so does {what}. Leave "
            "one of them out."
        )
    if recipe.launch.kubernetes.efa != "auto":
        raise RequestError(
            f"launch.kubernetes.efa={recipe.launch.kubernetes.efa} says how many interfaces a pod "
            f"has, and so does {what}. Leave one of them out."
        )
    found = [f"launch.env={json.dumps({**env, **variables})}"] if variables else []
    return [*found, "launch.kubernetes.efa=1"] if variant.name == "one-efa" else found


def _check_network_choice(what: str, variant: Variant, recipe: Recipe, device: str) -> None:
    if recipe.cluster.nodes == 1:
        raise RequestError(
            f"{what} with cluster.nodes=1: no network is between the processes of one node. Ask "
            "for more with cluster.nodes."
        )
    if device == "cpu" and not (variant.transport == "sockets" and variant.interface):
        raise RequestError(
            f"{what} with cluster.device=cpu: CPUs communicate by gloo, which has only TCP "
            "sockets. Name the interfaces to compare, such as --transports "
            "sockets:eth0,sockets:eth1."
        )
    if device not in ("cpu", "cuda"):
        raise RequestError(
            f"{what} with cluster.device={device}: the variables that choose a network are NCCL's "
            "and gloo's. Leave --transports out to measure the network that it takes, or give "
            "cluster.device=cuda, or cluster.instance, if these are such machines."
        )
    name = recipe.cluster.instance
    if variant.transport == "efa" and name is not None and instance(name).efa_count == 0:
        raise RequestError(
            f"{what} with cluster.instance={name}, which has no EFA. Measure --transports sockets, "
            "or another instance."
        )


def _variables(variant: Variant, device: str) -> dict[str, str]:
    named = variant.interface
    if device == "cpu":
        return {"GLOO_SOCKET_IFNAME": named}
    if variant.transport == "efa":
        return {"FI_EFA_IFACE": named} if named else {}
    only = {"NCCL_SOCKET_IFNAME": f"={named}"} if named else {}  # =: this name, not its beginning
    return {"NCCL_NET": "Socket", **only}


# --- table --------------------------------------------------------------------------------------


def rates(measured: Mapping[str, Sequence[CollectiveTiming]], ranks: int) -> Rates:
    """Bus bandwidths of all variants: the mean of out of place and in place.

    Args:
        measured: Variant -> its rows.
    """
    bandwidths: Rates = {}
    for name, rows in measured.items():
        for row in rows:
            gbs = sum(row.busbw_gbs(ranks)) / 2
            bandwidths.setdefault((row.collective, row.size_bytes), {})[name] = gbs
    return bandwidths


def lines(bandwidths: Rates, names: Sequence[str]) -> list[str]:
    """A table of each collective: a row for each size, a column for each variant, and ratios.

    Args:
        names: Of the variants; ratios are to the first.
    """
    said = []
    for collective in dict.fromkeys(collective for collective, _ in bandwidths):
        of_sizes = {size: by for (one, size), by in bandwidths.items() if one == collective}
        said += [f"# {collective}: busbw, GB/s, mean of out of place and in place", _head(names)]
        said += [_line(str(size), by, names) for size, by in of_sizes.items()]
        means = {
            name: sum(by[name] for by in of_sizes.values()) / len(of_sizes)
            for name in names
            if all(name in by for by in of_sizes.values())
        }
        said += [_line("average", means, names), "#"]
    return said


def ratios(by: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return each later variant's ratio to the first, where both were measured."""
    first, *others = names
    return {name: by[name] / by[first] for name in others if {name, first} <= by.keys()}


def _head(names: Sequence[str]) -> str:
    first, *others = names
    titles = [*names, *(f"{name}/{first}" for name in others)]
    return f"# {'size (B)':>12}" + "".join(f"  {title:>{_width(title)}}" for title in titles)


def _line(what: str, by: Mapping[str, float], names: Sequence[str]) -> str:
    first, *others = names
    shares = ratios(by, names)
    cells = [(name, f"{by[name]:.4g}" if name in by else "-") for name in names]
    cells += [
        (f"{name}/{first}", f"{shares[name]:.3f}" if name in shares else "-") for name in others
    ]
    return f"# {what:>12}" + "".join(f"  {text:>{_width(title)}}" for title, text in cells)


def _width(title: str) -> int:
    return max(8, len(title))
