"""Wrong situations on Slurm: its clients are programs that say what real ones were seen to say."""

import os
from pathlib import Path

from tests.launchers.wrong_situations import Desk, Situations

SITUATIONS = Situations("slurm")
row = SITUATIONS.row

_FAILED = "sbatch: error: Batch job submission failed: "
_SBATCH = """#!/bin/sh
[ -z "$STAND_IN_SAYS" ] || { echo "$STAND_IN_SAYS" >&2; exit 1; }
echo 17 >> "$STAND_IN_JOBS"
echo 17
"""
# The controller has one job, which runs; STAND_IN_REFUSAL is its refusal.
_SCONTROL = """#!/bin/sh
[ -z "$STAND_IN_REFUSAL" ] || { echo "$STAND_IN_REFUSAL" >&2; exit 1; }
case "$*" in
*"show job"*)
  echo "JobId=17 JobName=first JobState=RUNNING ExitCode=0:0 NodeList=n0 Restarts=0" \
    "Command=$RUN_DIR/launch/slurm.sbatch WorkDir=/" ;;
*) echo "NodeName=n0 State=IDLE" ;;
esac
"""


class SlurmDesk(Desk):
    """A login node."""

    on = "slurm"
    recipe = (
        "model.preset=llama-tiny", "run.steps=10", "optim.global_batch=8", "cluster.device=cpu",
        "cluster.devices=2", "cluster.nodes=2",
    )  # fmt: skip

    def log_in(self, *, says: str = "") -> Path:
        """Put the clients on the path; returns their folder."""
        programs = self.folder / "slurm-bin"
        programs.mkdir()
        for name, text in {"sbatch": _SBATCH, "scontrol": _SCONTROL}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        for name in ("sacct", "squeue", "scancel", "sinfo"):
            (programs / name).symlink_to("scontrol")
        self.environ.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        self.environ.setenv("STAND_IN_JOBS", str(self.folder / "jobs"))
        self.environ.setenv("RUN_DIR", str(self.runs / "first"))
        self.environ.setenv("STAND_IN_SAYS", says)
        self.environ.setenv("STAND_IN_REFUSAL", "")
        return programs

    def outside(self) -> set[str]:
        return {"slurm job"} if (self.folder / "jobs").exists() else set()

    def refused(self, words: str, *settings: str) -> int:
        """Launch where sbatch refuses with Slurm's own words."""
        self.log_in(says=words)
        return self.launch(*settings)


@row("no Slurm here", 2, says="sbatch is not installed here", do="on a login node")
def _(desk: SlurmDesk) -> int:
    desk.environ.setenv("PATH", str(desk.folder))
    return desk.launch()


@row(
    "this machine belongs to no cluster",
    2,
    says="Could not establish a configuration source",
    do="set SLURM_CONF",
)
def _(desk: SlurmDesk) -> int:
    return desk.refused("sbatch: fatal: Could not establish a configuration source")


@row(
    "unknown partition",
    2,
    says="Invalid partition name specified",
    do="Set launch.slurm.partition to one of `sinfo -s`",
)
def _(desk: SlurmDesk) -> int:
    words = f"sbatch: error: invalid partition specified: h2OO {_FAILED}"
    return desk.refused(f"{words}Invalid partition name specified", "launch.slurm.partition=h2OO")


@row("unknown account", 2, says="Invalid account", do="Set launch.slurm.account")
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Invalid account or account/partition combination specified")


@row("time limit above the partition's", 2, says="time limit is invalid", do="launch.time_limit")
def _(desk: SlurmDesk) -> int:
    words = "Requested time limit is invalid (missing or exceeds some limit)"
    return desk.refused(f"{_FAILED}{words}", "launch.time_limit=99d")


@row("more nodes than there are", 2, says="Node count specification", do="fewer nodes")
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Node count specification invalid")


@row("devices that no node has", 2, says="is not available", do="cluster.devices with `sinfo")
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Requested node configuration is not available")


@row("limit of the account reached", 3, says="accounting/QOS policy", do="`squeue --me`")
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Job violates accounting/QOS policy (job submit limit)")


@row("not permitted in the partition", 4, says="not permitted to use", do="administrators")
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}User's group not permitted to use this partition")


@row(
    "controller away while it is submitted",
    3,
    says="Unable to contact slurm controller",
    do="`scontrol ping` says when it is back",
)
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Unable to contact slurm controller (connect failure)")


@row("words that nobody knows", 1, says="the moon is full", do="`shardyard launch --dry-run`")
def _(desk: SlurmDesk) -> int:
    return desk.refused("sbatch: error: the moon is full")


@row("secret not in the environment", 2, says="has no HF_TOKEN", do="export HF_TOKEN=...")
def _(desk: SlurmDesk) -> int:
    desk.log_in()
    desk.environ.delenv("HF_TOKEN", raising=False)
    return desk.launch("secrets.HF_TOKEN=env")


@row("secret where no job can read it", 2, says="from k8s", do="install -m 600")
def _(desk: SlurmDesk) -> int:
    desk.log_in()
    return desk.launch("secrets.HF_TOKEN=k8s:hf/token")


@row("teardown of a running job", 2, says="is running. Removing it now", do="`shardyard cancel")
def _(desk: SlurmDesk) -> int:
    desk.log_in()
    desk.launched()
    return desk.steer("teardown", "--yes")


@row("controller away while it is asked", 3, says="controller does not answer", do="Try again")
def _(desk: SlurmDesk) -> int:
    desk.log_in()
    desk.launched()
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    desk.environ.setenv("STAND_IN_REFUSAL", away)
    return desk.steer("status")


@row(
    "option of sbatch that the launch sets itself",
    2,
    says="launch.slurm.options: 'partition' is set by the launch itself",
    do="Set launch.slurm.partition",
)
def _(desk: SlurmDesk) -> int:
    return desk.launch("launch.slurm.options={partition: main}")


@row(
    "option of sbatch that is not passed on",
    2,
    says="'excludes' is not an option that Shardyard passes on",
    do="Did you mean exclude?",
)
def _(desk: SlurmDesk) -> int:
    return desk.launch("launch.slurm.options={excludes: n1}")


@row(
    "option of sbatch in another form",
    2,
    says="launch.slurm.options.switches='many' is not a value of --switches",
    do="Give such as 1@12:00:00",
)
def _(desk: SlurmDesk) -> int:
    return desk.launch("launch.slurm.options={switches: many}")


@row(
    "GPUs of a gres that are not as many as the processes",
    2,
    says="launch.slurm.options.gres=gpu:4 asks for 4 GPUs of each node, where 2 processes start",
    do="Give both the same number",
)
def _(desk: SlurmDesk) -> int:
    return desk.launch("launch.slurm.options={gres: 'gpu:4'}")


@row(
    "GPUs of a Slurm that manages none",
    2,
    says="Invalid generic resource (gres) specification",
    do="set launch.slurm.request_gpus=false",
)
def _(desk: SlurmDesk) -> int:
    return desk.refused(f"{_FAILED}Invalid generic resource (gres) specification")


@row(
    "reservation that is not there",
    2,
    says="Requested reservation is invalid",
    do="`scontrol show reservation`",
)
def _(desk: SlurmDesk) -> int:
    words = f"{_FAILED}Requested reservation is invalid"
    return desk.refused(words, "launch.slurm.options={reservation: nosuch}")


@row(
    "mount whose path has a colon",
    2,
    says="launch.slurm.container_mounts=/data:1:/data is not /source:/target",
    do="leave a symbolic link without them",
)
def _(desk: SlurmDesk) -> int:
    return desk.launch(
        "launch.slurm.container_image=train.sqsh", "launch.slurm.container_mounts=['/data:1:/data']"
    )


@row(
    "spot instances on a cluster that is there",
    2,
    says="cluster.capacity=spot, but on Slurm the nodes exist already, and",
    do="launch.slurm.options.reservation",
)
def _(desk: SlurmDesk) -> int:
    rented = ("cluster.instance=p4d.24xlarge", "cluster.device=cuda", "cluster.devices=8")
    return desk.launch(*rented, "optim.global_batch=16", "cluster.capacity=spot")
