"""Wrong situations of `shardyard bench network`, all told before anything is submitted."""

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("bench network")
row = SITUATIONS.row


class BenchDesk(Desk):
    """A benchmark of two processes on this machine."""

    recipe = (
        "model.preset=llama-tiny", "cluster.device=cpu", "cluster.devices=1", "cluster.nodes=2",
    )  # fmt: skip

    def bench(self, *words: str) -> int:
        """Measure, with what is to be different."""
        options = [word for word in words if "=" not in word]
        settings = [word for word in words if "=" in word]
        recipe = self._recipe(settings)
        return self.shardyard("bench", "network", *recipe, "--on", self.on, "--yes", *options)


@row("a single rank", 2, says="a collective needs two ranks or more", do="cluster.devices")
def _(desk: BenchDesk) -> int:
    return desk.bench("cluster.nodes=1")


@row(
    "pairs of one node",
    2,
    says="--pairs with cluster.nodes=1: one node has no pairs",
    do="Ask for 3 nodes or more",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("cluster.nodes=1", "cluster.devices=2", "--pairs")


@row(
    "sizes that end before they begin",
    2,
    says="--begin 4096 to --end 1024 bytes holds no size",
    do="Give --begin 8 and a larger --end",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--begin", "4K", "--end", "1K")


@row(
    "less than a number for each rank",
    2,
    says="--end 8 bytes over 4 ranks is less than one number each",
    do="Give --end 16 or more",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("cluster.nodes=4", "--end", "8")


@row("no size", 2, says="'lots' is not a size", do="such as 8, 64K, 16M or 1G")
def _(desk: BenchDesk) -> int:
    return desk.bench("--end", "lots")


@row(
    "limit in dollars",
    2,
    says="launch.max_usd=5 is not held to by a benchmark",
    do="launch.time_limit, which ends the job",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("launch.max_usd=5")


@row(
    "nccl-tests' own program",
    2,
    says="--program nccl-tests is not built",
    do="give its log to `shardyard plan --calibrate`",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--program", "nccl-tests")


@row(
    "pairs of another collective",
    2,
    says="--pairs measures all-reduces",
    do="leave --collective out",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--pairs", "--collective", "alltoall")


@row(
    "accelerators of one machine for several nodes",
    2,
    says="on one machine every node would take the same accelerators",
    do="cluster.device=cpu",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("cluster.device=cuda")


@row(
    "EFA between CPUs",
    2,
    says=(
        "--transports efa with cluster.device=cpu: CPUs communicate by gloo, which has only TCP "
        "sockets"
    ),
    do="--transports sockets:eth0,sockets:eth1",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--transports", "efa,sockets:eth0")


@row(
    "a network that nobody knows",
    2,
    says="'carrier-pigeon' is not a network that can be chosen",
    do="Use one or more of efa (all interfaces), one-efa",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--transports", "carrier-pigeon")


@row(
    "a network twice",
    2,
    says="names a network twice",
    do="Repeat the command to measure one again",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--transports", "sockets:lo,sockets:lo")


@row(
    "networks between one node",
    2,
    says="--transports sockets:lo with cluster.nodes=1: no network is between the processes",
    do="Ask for more with cluster.nodes",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("cluster.nodes=1", "cluster.devices=2", "--transports", "sockets:lo")


@row(
    "pairs and networks at once",
    2,
    says="--pairs and --transports are two measurements",
    do="give one of them",
)
def _(desk: BenchDesk) -> int:
    return desk.bench("--pairs", "--transports", "sockets:lo")
