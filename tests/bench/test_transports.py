"""What each network of `bench network --transports` changes, what is refused, and their table."""

import json

import pytest

from shardyard.bench import transports
from shardyard.bench.nccl_table import CollectiveTiming
from shardyard.bench.transports import overrides_of, variants_in
from shardyard.config.load import load_recipe
from shardyard.errors import RequestError
from shardyard.rundir.network import ObservedNetwork, Transport

P4D = "cluster.instance=p4d.24xlarge"


def changes(
    name: str, *words: str, device: str = "cuda", launcher: str = "kubernetes"
) -> list[str]:
    (variant,) = variants_in(name)
    recipe = load_recipe([], ["model.preset=llama-tiny", "cluster.nodes=2", *words])
    return overrides_of(variant, recipe, device=device, launcher=launcher)


def environment(found: list[str]) -> dict[str, str]:
    (word,) = found
    name, _, text = word.partition("=")
    assert name == "launch.env"
    return dict(json.loads(text))


def test_each_network_is_chosen_by_what_its_documentation_says() -> None:
    assert changes("efa", P4D) == []
    assert changes("one-efa", P4D) == ["launch.kubernetes.efa=1"]
    named = changes("efa:rdmap16s27", P4D, launcher="slurm")
    assert environment(named) == {"FI_EFA_IFACE": "rdmap16s27"}
    assert environment(changes("sockets", P4D)) == {"NCCL_NET": "Socket"}
    both = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth1"}
    assert environment(changes("sockets:eth1", P4D)) == both
    assert environment(changes("sockets:eth1", device="cpu")) == {"GLOO_SOCKET_IFNAME": "eth1"}


def test_the_recipes_own_variables_stay() -> None:
    kept = environment(changes("sockets", "launch.env={NCCL_DEBUG: INFO}"))
    assert kept == {"NCCL_DEBUG": "INFO", "NCCL_NET": "Socket"}


@pytest.mark.parametrize(
    ("name", "words", "given", "says"),
    [
        ("efa", [], {"device": "hpu"}, "cluster.device=hpu: the variables .* NCCL's"),
        ("efa", [], {"device": "auto"}, "give cluster.device=cuda, or cluster.instance"),
        ("efa", ["cluster.instance=g5.2xlarge"], {}, "g5.2xlarge, which has no EFA. Measure --tr"),
        ("one-efa", [P4D], {"launcher": "slurm"}, "--transports efa:INTERFACE"),
        ("sockets", ["launch.env={NCCL_NET: IB}"], {}, "launch.env.NCCL_NET=IB .* Leave one"),
        ("efa", ["launch.kubernetes.efa=2"], {}, "launch.kubernetes.efa=2 .* Leave one"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    name: str, words: list[str], given: dict[str, str], says: str
) -> None:
    with pytest.raises(RequestError, match=says):
        changes(name, *words, **given)


@pytest.mark.parametrize(
    ("name", "transport", "interfaces", "is_used"),
    [
        ("efa", "efa", "4 interfaces", True),
        ("efa", "sockets", "eth0", False),
        ("one-efa", "efa", "1 interfaces", True),
        ("one-efa", "efa", "4 interfaces", False),
        ("efa:rdmap16s27", "efa", "", False),
        ("sockets", "sockets", "eth0", True),
        ("sockets:eth1", "sockets", "eth0", False),
    ],
)
def test_a_network_counts_as_used_only_if_it_was_said_to_be(
    name: str, transport: Transport, interfaces: str, is_used: bool
) -> None:
    (variant,) = variants_in(name)
    assert not variant.is_used(None)
    said = ObservedNetwork(transport=transport, said_by="NCCL", attempt=0, interfaces=interfaces)
    assert variant.is_used(said) is is_used


def row(size: int, out_s: float, in_s: float) -> CollectiveTiming:
    return CollectiveTiming(
        collective="all_reduce", size_bytes=size, count=size // 4, out_s=out_s, out_wrong=0,
        in_s=in_s, in_wrong=0,
    )  # fmt: skip


def test_the_table_holds_every_network_against_the_first() -> None:
    # 2 ranks: bus bandwidth is size over time. 1 and 3 GB/s are 2 in the mean.
    fast = [row(1000, 1e-6, 1e-6 / 3), row(2000, 0.5e-6, 0.5e-6)]
    found = transports.rates({"efa": fast, "sockets": [row(1000, 2e-6, 2e-6)]}, 2)
    assert transports.lines(found, ["efa", "sockets"]) == [
        "# all_reduce: busbw, GB/s, mean of out of place and in place",
        "#     size (B)       efa   sockets  sockets/efa",
        "#         1000         2       0.5        0.250",
        "#         2000         4         -            -",
        "#      average         3         -            -",
        "#",
    ]
