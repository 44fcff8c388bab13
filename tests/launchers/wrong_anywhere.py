"""Wrong situations that no launcher is special to."""

from pathlib import Path

from shardyard.launchers.ledger import Ledger, Submission
from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("any launcher")
row = SITUATIONS.row

_RENTED = (
    "cluster.device=auto", "cluster.devices=auto", "cluster.instance=p5.48xlarge",
)  # fmt: skip


class AnyDesk(Desk):
    """Launching where nothing is asked before it is refused: Slurm without a Slurm."""

    on = "slurm"
    recipe = (
        "model.preset=llama-tiny", "run.steps=10", "optim.global_batch=8", "cluster.device=cpu",
        "cluster.devices=2", "cluster.nodes=2",
    )  # fmt: skip

    def submitted(self, job_id: str, **details: str) -> None:
        """A ledger with one job, as a launcher writes it or as somebody changed it."""
        given = {"folder": str(self.runs / "first"), "nodes": "2", **details}
        job = Submission(launcher="slurm", run_id="first", id=job_id, name="first", details=given)
        Ledger(self.ledger()).record(job)

    def ledger(self) -> Path:
        """Of a run that stands as launched elsewhere and is not asked about."""
        path = self.runs / "first" / "ledger.jsonl"
        path.parent.mkdir(parents=True)
        (path.parent / "recipe.yaml").write_text("model: {preset: llama-tiny}\n")
        return path


@row(
    "unknown launcher",
    2,
    says="unknown launcher 'moon'",
    do="Available: local, slurm, kubernetes",
)
def _(desk: AnyDesk) -> int:
    return desk.shardyard("launch", *desk.recipe, "--on", "moon")


@row("setting that does not exist", 2, says="launch.kubernetes.nampespace", do="namespace")
def _(desk: AnyDesk) -> int:
    return desk.launch("launch.kubernetes.nampespace=team")


@row(
    "unknown instance",
    2,
    says="cluster.instance='p9.48xlarge'",
    do="p5.48xlarge",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("cluster.instance=p9.48xlarge")


@row(
    "bad time limit",
    2,
    says="launch.time_limit='soon' is not a time with its unit",
    do="such as 90min",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("launch.time_limit=soon")


@row("nobody to ask, and no --yes", 2, says="not confirmed, as", do="Add --yes to do it")
def _(desk: AnyDesk) -> int:
    return desk.shardyard("launch", *desk._recipe([]), "--on", desk.on)


@row("run folder cannot be made", 2, says="which is a file, not a folder", do="Fix the path")
def _(desk: AnyDesk) -> int:
    (desk.folder / "file").write_text("")
    return desk.launch(f"run.dir={desk.folder / 'file' / 'runs'}")


@row("plan does not fit", 2, says="the plan does not fit", do="`shardyard plan` shows layouts")
def _(desk: AnyDesk) -> int:
    return desk.launch(*_RENTED, "model.preset=llama3.1-405b", "cluster.nodes=1")


@row("price above the limit", 2, says="above launch.max_usd=1", do="Make the run shorter")
def _(desk: AnyDesk) -> int:
    long = ("run.steps=100000000", "optim.global_batch=16")
    return desk.launch(*_RENTED, *long, "launch.max_usd=1")


@row(
    "price limit without a known price",
    2,
    says="launch.max_usd=5, but the price is not known",
    do="Name what is missing",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("launch.max_usd=5")


@row("number of devices not known", 2, says="cluster.devices=auto, and how many", do="cluster.file")
def _(desk: AnyDesk) -> int:
    return desk.launch("cluster.device=auto", "cluster.devices=auto")


@row("run that does not exist", 2, says="RUN 'first' is neither a run folder", do="--runs-dir")
def _(desk: AnyDesk) -> int:
    return desk.steer("status")


@row("run that was never launched", 2, says="run first has no job", do="`shardyard report")
def _(desk: AnyDesk) -> int:
    desk.ledger()
    return desk.steer("cancel")


@row(
    "run.id in use",
    2,
    says="run.id='first' exists already",
    do="continue it with `shardyard resume",
)
def _(desk: AnyDesk) -> int:
    desk.ledger()
    return desk.launch()


@row(
    "run.id in use by a benchmark",
    2,
    says="It is a benchmark (bench network), which is not continued",
    do="or its tables with `shardyard logs",
)
def _(desk: AnyDesk) -> int:
    desk.submitted("7", bench="network")
    return desk.launch()


@row(
    "submission died between intent and confirmation",
    2,
    says="was interrupted before it became a job",
    do="Remove it with `shardyard teardown",
)
def _(desk: AnyDesk) -> int:
    Ledger(desk.ledger()).intend(
        "slurm job", "first", launcher="slurm", folder=str(desk.runs / "first"), nodes="2"
    )
    return desk.steer("status")


@row(
    "line of the ledger is of another kind",
    1,
    says="Another program changed the file",
    do="Fix or remove",
)
def _(desk: AnyDesk) -> int:
    desk.ledger().write_text('{"nothing": "of a ledger"}\n')
    return desk.steer("teardown", "--yes")


@row(
    "ledger names an option as a job's id",
    1,
    says="line 1 is not a line of a ledger: id='-uroot' begins with a hyphen",
    do="look with the scheduler's own tools",
)
def _(desk: AnyDesk) -> int:
    desk.submitted("-uroot")
    return desk.steer("cancel")


@row(
    "ledger names a folder elsewhere",
    1,
    says="details.folder='/etc' is not where the job's folder is",
    do="Fix or remove",
)
def _(desk: AnyDesk) -> int:
    desk.submitted("17", folder="/etc")
    return desk.steer("logs")


@row(
    "others may write into the folder of a run that is to be ended",
    4,
    says="may be written by its group",
    do="chmod go-w",
)
def _(desk: AnyDesk) -> int:
    desk.submitted("17")
    (desk.runs / "first").chmod(0o775)
    return desk.steer("teardown", "--yes")


@row("a folder in the place of the ledger", 1, says="it is not a file", do="Restore the file")
def _(desk: AnyDesk) -> int:
    desk.ledger().mkdir(mode=0o755)
    return desk.steer("teardown", "--yes")


@row(
    "ledger overwritten with bytes",
    1,
    says=("line 1 is not a line of a ledger"),
    do="Fix or remove",
)
def _(desk: AnyDesk) -> int:
    desk.ledger().write_bytes(bytes(range(128, 256)))
    return desk.steer("status")


@row(
    "literal secret in launch.env",
    2,
    says="launch.env",
    do="secrets",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("launch.env={HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz0123456789}")


@row("literal value as a secret", 2, says="secrets.HF_TOKEN", do="env")
def _(desk: AnyDesk) -> int:
    return desk.launch("secrets.HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789")


_BLOCK = "cluster.capacity=block:cr-0123456789abcdef0"


@row(
    "capacity block whose end is not said",
    2,
    says="cluster.block_ends: is not given, and the run must have drained when the block ends",
    do="aws ec2 describe-capacity-reservations --capacity-reservation-ids cr-0123456789abcdef0",
)
def _(desk: AnyDesk) -> int:
    return desk.launch(*_RENTED, _BLOCK)


@row(
    "capacity block that is over",
    2,
    says="cluster.capacity=block:cr-0123456789abcdef0 is over",
    do="Name another block, or extend this one",
)
def _(desk: AnyDesk) -> int:
    ended = "cluster.block_ends=2026-01-31T11:30:00Z"
    return desk.launch(*_RENTED, "optim.global_batch=16", _BLOCK, ended)


@row(
    "capacity of no instances",
    2,
    says="cluster.capacity=spot, and cluster.instance names no EC2 type",
    do="Name it, or leave the capacity out",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("cluster.capacity=spot")


@row(
    "lost jobs of a launcher that marks none",
    2,
    says="jobs of local carry no mark",
    do="Ask one of slurm, kubernetes, aws-batch",
)
def _(desk: AnyDesk) -> int:
    return desk.shardyard("runs", "--on", "local")


@row(
    "stragglers to be left out where all nodes are needed",
    2,
    says="elastic.leave_out_for=[slow_rank] continues with one node less, but elastic.min_nodes=2",
    do="Set elastic.min_nodes below",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.leave_out_for=[slow_rank]")


@row(
    "stragglers to be left out on accelerators",
    2,
    says="elastic.leave_out_for=[slow_rank] with cluster.device=cuda",
    do="Leave slow_rank out",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.leave_out_for=[slow_rank]", "elastic.min_nodes=1", *_RENTED)


@row(
    "nodes to be left out for what telemetry finds, without telemetry",
    2,
    says="elastic.leave_out_for=[xid] follows from what telemetry finds",
    do="Give it seconds",
)
def _(desk: AnyDesk) -> int:
    rules = ("elastic.leave_out_for=[xid]", "observe.telemetry_every_s=null")
    return desk.launch(*rules, "elastic.min_nodes=1", *_RENTED)


@row(
    "an unknown verdict to leave nodes out for",
    2,
    says="elastic.leave_out_for",
    do="slow_rank",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.leave_out_for=[slow_ranks]")


@row(
    "more nodes needed than there are",
    2,
    says="elastic.min_nodes=3 is more than cluster.nodes=2",
    do="Use at most 2",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.min_nodes=3")


@row(
    "fewer nodes at most than there are",
    2,
    says="elastic.max_nodes=1 is less than cluster.nodes=2",
    do="Use at least 2",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.max_nodes=1")


@row(
    "silence of a node borne longer than a collective waits",
    2,
    says="elastic.keep_alive_s=60 is not below elastic.collective_timeout_s=60",
    do="Lower the one or raise the other",
)
def _(desk: AnyDesk) -> int:
    return desk.launch("elastic.keep_alive_s=60", "elastic.collective_timeout_s=60")
