"""Environment variables of other programs that would change a run, and what becomes of them.

One table for all: a variable is honoured and checked, removed for a child, or rejected by name.
Variables that only choose how a library works (NCCL_*, OMP_NUM_THREADS) are passed on as they are.
"""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Literal

from shardyard.errors import RequestError

Treatment = Literal["checked", "honoured", "removed", "rejected"]


@dataclass(frozen=True, kw_only=True)
class VariableGroup:
    """Variables of one kind."""

    names: str
    """A regular expression of whole names."""
    display: str
    """The names as people write them."""
    does: str
    """Effect the variables would have."""
    fate: Treatment
    handling: str
    """Treatment of the variables by Shardyard."""


SLURM_ADDRESS = VariableGroup(
    names=r"SLURM_CONF|SLURM_CONF_SERVER|SLURM_JWT",
    display="`SLURM_CONF`, `SLURM_CONF_SERVER`, `SLURM_JWT`",
    does="choose the Slurm cluster and the user's token",
    fate="honoured",
    handling="every client of Slurm gets them",
)
SLURM_OPTIONS = VariableGroup(
    names=r"(?:SBATCH|SLURM|SRUN|SALLOC|SQUEUE|SINFO|SACCT|SACCTMGR|SCANCEL|SCONTROL)_.*",
    display="`SBATCH_*`, `SRUN_*`, `SQUEUE_*`, `SACCT_*`, `SCANCEL_*`, `SCONTROL_*`, `SINFO_*`, "
    "other `SLURM_*`",
    does="outrank the lines of a batch script, change what clients print, or what they end",
    fate="removed",
    handling="clients of Slurm do not get them; `launch` warns of each `SBATCH_*`",
)
SLURM_CLUSTER = VariableGroup(
    names=r"SLURM_CLUSTERS|SBATCH_CLUSTERS",
    display="`SLURM_CLUSTERS`, `SBATCH_CLUSTERS`",
    does="send jobs to another cluster than that of `SLURM_CONF`",
    fate="rejected",
    handling="`launch` ends with exit code 2; other clients of Slurm do not get them",
)
SRUN_DEFAULTS = VariableGroup(
    names=r"(?:SRUN|SCANCEL|SCONTROL)_.*|SLURMD_DEBUG|SLURM_(?:ACCOUNT|ACCTG_FREQ|BCAST"
    r"|BCAST_EXCLUDE|BURST_BUFFER|CLUSTERS|COMPRESS|CONSTRAINT|CONTAINER|CORE_SPEC|CPU_BIND"
    r"|CPU_FREQ_REQ|CPUS_PER_GPU|DEBUG|DEBUG_FLAGS|DELAY_BOOT|DEPENDENCY|DISABLE_STATUS"
    r"|DISTRIBUTION|DIST_PLANESIZE|EPILOG|EXACT|EXCLUSIVE|EXIT_ERROR|EXIT_IMMEDIATE|EXPORT_ENV"
    r"|GPU_BIND|GPU_FREQ|GPUS_PER_TASK|GRES|GRES_FLAGS|HINT|HOSTFILE|IMMEDIATE|KILL_BAD_EXIT"
    r"|LABELIO|MEM_BIND|MEM_PER_CPU|MEM_PER_GPU|MEM_PER_NODE|MPI_TYPE|NO_KILL|NTASKS_PER_CORE"
    r"|NTASKS_PER_GPU|NTASKS_PER_SOCKET|OPEN_MODE|OVERCOMMIT|OVERLAP|PARTITION|POWER|PROFILE"
    r"|PROLOG|QOS|REMOTE_CWD|REQ_SWITCH|RESERVATION|RESV_PORTS|SEND_LIBS|SIGNAL|SPREAD_JOB"
    r"|STDERRMODE|STDINMODE|STDOUTMODE|STEP_GRES|TASK_EPILOG|TASK_PROLOG|TEST_EXEC|THREADS"
    r"|THREADS_PER_CORE|THREAD_SPEC|TIMELIMIT|TIME_FORMAT|UNBUFFEREDIO|USE_MIN_NODES|WAIT"
    r"|WAIT4SWITCH|WCKEY|WORKING_DIR)",
    display="options of srun and scancel in the job (`SLURM_MEM_PER_CPU`, `SLURM_TIMELIMIT`, "
    "`SLURM_CPU_BIND`, `SCANCEL_*`)",
    does="change how srun starts the nodes of a job, or end it",
    fate="removed",
    handling="the batch script unsets them before srun",
)
STARTED_BY = VariableGroup(
    names=r"RANK|WORLD_SIZE|SLURM_STEP_NUM_TASKS|SLURM_PROCID|OMPI_COMM_WORLD_SIZE|PMI_SIZE"
    r"|MV2_COMM_WORLD_SIZE|JSM_NAMESPACE_SIZE",
    display="`RANK` with `WORLD_SIZE`, `SLURM_STEP_NUM_TASKS`, `OMPI_COMM_WORLD_SIZE`, `PMI_SIZE`, "
    "`MV2_COMM_WORLD_SIZE`, `JSM_NAMESPACE_SIZE`",
    does="are set by torchrun, srun, mpirun and jsrun, which start a command several times",
    fate="rejected",
    handling="with more than one process, verbs that start something end with exit code 2",
)
OF_TORCH_AGENT = VariableGroup(
    names=r"TORCHELASTIC_(?!LOG_LEVEL).*|TORCH_ELASTIC_.*|PET_.*|ACCELERATE_.*"
    r"|FSDP_CPU_RAM_EFFICIENT_LOADING",
    display="`TORCHELASTIC_*`, `TORCH_ELASTIC_*`, `PET_*`, `ACCELERATE_*`, "
    "`FSDP_CPU_RAM_EFFICIENT_LOADING`",
    does="configure torch's agent and accelerate: other ranks, another way to load weights",
    fate="removed",
    handling="the agent of a node removes them, so that no worker has them",
)
INTERFACE = VariableGroup(
    names=r"GLOO_SOCKET_IFNAME",
    display="`GLOO_SOCKET_IFNAME`",
    does="names the network interface of gloo",
    fate="checked",
    handling="each node checks that the interface is there and has an address; unset, it is chosen",
)
NCCL_INTERFACE = VariableGroup(
    names=r"NCCL_SOCKET_IFNAME",
    display="`NCCL_SOCKET_IFNAME`",
    does="names the network interfaces of NCCL's start and of its socket transport",
    fate="honoured",
    handling="workers get it; unset, also in `/etc/nccl.conf` and `~/.nccl.conf`, it is chosen",
)
PLACE = VariableGroup(
    names=r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    display="`LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT`, `TORCH_DISABLE_SHARE_RDZV_TCP_STORE`",
    does="say where a process is among the others",
    fate="removed",
    handling="set again for each worker",
)
TABLE = (
    SLURM_ADDRESS, SLURM_OPTIONS, SLURM_CLUSTER, SRUN_DEFAULTS, STARTED_BY, OF_TORCH_AGENT,
    INTERFACE, NCCL_INTERFACE, PLACE,
)  # fmt: skip

_STARTERS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "srun", "start it with `srun --ntasks=1`"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "mpirun", "start it without mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "mpirun", "start it without mpirun"),
    ("PMI_SIZE", "PMI_RANK", "mpirun", "start it without mpirun"),
    ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "jsrun", "start it without jsrun"),
    ("WORLD_SIZE", "RANK", "torchrun or a similar starter", "start it without that"),
)
"""Variable of how many, of which, who sets both, what to do instead."""

_SETTING_OF = {
    "SBATCH_PARTITION": "launch.slurm.partition",
    "SBATCH_ACCOUNT": "launch.slurm.account",
    "SBATCH_QOS": "launch.slurm.qos",
    "SBATCH_CONSTRAINT": "launch.slurm.constraint",
    "SBATCH_TIMELIMIT": "launch.time_limit",
    "SBATCH_REQUEUE": "launch.slurm.requeue",
    "SBATCH_NO_REQUEUE": "launch.slurm.requeue",
    "SBATCH_RESERVATION": "launch.slurm.options.reservation",
    "SBATCH_EXCLUSIVE": "launch.slurm.options.exclusive",
    "SBATCH_WCKEY": "launch.slurm.options.wckey",
}


def is_in_group(row: VariableGroup, name: str) -> bool:
    """Whether a variable is one of a row."""
    return re.fullmatch(row.names, name) is not None


def for_slurm_client(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a client of Slurm: without what would outrank its command line."""
    return {
        name: value
        for name, value in environ.items()
        if is_in_group(SLURM_ADDRESS, name) or not is_in_group(SLURM_OPTIONS, name)
    }


def not_for_sbatch(environ: Mapping[str, str]) -> str | None:
    """A warning of options of sbatch in the environment; None: there are none."""
    found = {name: value for name, value in sorted(environ.items()) if name.startswith("SBATCH_")}
    if not found:
        return None
    settings = [
        f"{_SETTING_OF[name]}={value}" for name, value in found.items() if name in _SETTING_OF
    ]
    remedy = f" To use their values, set them there: {' '.join(settings)}." if settings else ""
    named = ", ".join(f"{name}={value}" for name, value in found.items())
    return f"sbatch does not get {named} of this shell: the recipe decides.{remedy}"


def reject_cluster_override(environ: Mapping[str, str]) -> None:
    """Reject a choice of a Slurm cluster that no setting of a recipe makes.

    Raises:
        RequestError: A job would go to another cluster than the shell says.
    """
    found = {name: environ[name] for name in sorted(environ) if is_in_group(SLURM_CLUSTER, name)}
    named = {name: value for name, value in found.items() if value.strip()}
    if not named:
        return
    raise RequestError(
        f"{' and '.join(f'{name}={value}' for name, value in named.items())} of this shell would "
        "send the job to another Slurm cluster, and no setting of a recipe does that. Run this on "
        "a login node of the cluster that you want, or name its configuration: "
        f"`unset {' '.join(named)}; export SLURM_CONF=/path/of/its/slurm.conf`."
    )


def remove_for_agent(environ: MutableMapping[str, str]) -> None:
    """Remove what would configure torch's agent or accelerate in the workers of a node."""
    for name in [name for name in environ if is_in_group(OF_TORCH_AGENT, name)]:
        del environ[name]


def reject_multi_process_start(verb: str, environ: Mapping[str, str]) -> None:
    """Reject a verb that a starter runs several times: each would start the same.

    Raises:
        RequestError: It is one of several.
    """
    for many, which, starter, instead in _STARTERS:
        count = environ.get(many, "")
        if not (count.isdecimal() and int(count) > 1 and environ.get(which)):
            continue
        raise RequestError(
            f"{starter} starts `shardyard {verb}` {count} times ({many}={count}, {which}="
            f"{environ[which]}), and each would do the same on its own. Shardyard starts a process "
            f"per device itself: {instead}. If the variables are left over, `unset {many} {which}`."
        )


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The second is the name of torch before 2.9, which is still read."""


def enable_expandable_segments(device: str, environ: MutableMapping[str, str]) -> None:
    """Have torch take memory of CUDA devices in segments that grow.

    What was freed in other sizes is then not lost to the next request. A setting of the allocator
    that is there stays as it is. torch reads it when it is imported.
    """
    if device == "cuda" and not any(name in environ for name in _ALLOCATOR_VARIABLES):
        environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
