"""Options of sbatch and srun that ``launch.slurm.options`` may add, each with its form.

Only options in the table are passed on. Others may change how many tasks start, where they
write or what they get. That would break a run in ways that its recipe does not show.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from shardyard.config.secrets import show
from shardyard.errors import Problem

SETTING = "launch.slurm.options"

Value = str | int | bool


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option."""

    form: str
    """Pattern that its whole value must match; empty: it has no value, and is true or false."""
    example: str
    what: str
    client: Literal["sbatch", "srun"] = "sbatch"
    of_side_jobs: bool = False
    """Whether a side job in the training's partition gets it too: it asks for no devices."""


_HOSTS = r"[A-Za-z0-9][A-Za-z0-9_.-]*(\[[0-9,-]+\])?[A-Za-z0-9_.-]*"
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.@+-]*"
_GRES = r"[A-Za-z][A-Za-z0-9_]*(:[A-Za-z][A-Za-z0-9_.-]*)?(:\d+[KMGT]?)?"
_TIME = r"\d{1,3}-\d{1,2}(:\d{2}){0,2}|\d+(:\d{2}){0,2}"
_MOMENT = (
    r"now(\+\d+(seconds|minutes|hours|days|weeks)?)?|midnight|noon|teatime|today|tomorrow"
    r"|(\d{4}-\d{2}-\d{2}T)?\d{2}:\d{2}(:\d{2})?|\d{4}-\d{2}-\d{2}"
)
_MAIL = "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT(_(90|80|50))?"


def _list(item: str, separator: str = ",") -> str:
    return rf"({item})({separator}({item}))*"


# Source: sbatch(1) of Slurm 22.05 to 25.05; auto-resume: Amazon SageMaker Developer Guide, HyperPod
# with Slurm, Automatic node recovery and auto-resume.
ALLOWED: dict[str, Option] = {
    "exclude": Option(
        form=_list(_HOSTS), example="node[3-4,7]", what="nodes that the job must not get",
        of_side_jobs=True,
    ),
    "nodelist": Option(
        form=_list(_HOSTS), example="node[1-2]", what="nodes that it must get, among others",
    ),
    "reservation": Option(
        form=_list(_NAME), example="training", what="reservation of the cluster to run in",
        of_side_jobs=True,
    ),
    "gres": Option(
        form=_list(_GRES), example="gpu:h100:8", what="generic resources of each node; in place of "
        "--gpus-per-node where it names gpu",
    ),
    "switches": Option(
        form=rf"\d+(@({_TIME}))?", example="1@12:00:00",
        what="most switches between the nodes, and how long to wait for that",
    ),
    "contiguous": Option(form="", example="true", what="nodes that follow each other"),
    "prefer": Option(
        form=r"[A-Za-z0-9_.&|*()\[\]:-]+", example="fast&quiet", what="features, if possible",
    ),
    "licenses": Option(
        form=_list(r"[A-Za-z0-9_.-]+(@[A-Za-z0-9_.-]+)?(:\d+)?", "[,|]"), example="lustre:1",
        what="licenses of the cluster",
    ),
    "core-spec": Option(form=r"\d+", example="2", what="cores of each node for the system"),
    "tmp": Option(form=r"\d+[KMGT]?", example="200G", what="least local disk of each node"),
    "network": Option(
        form=r"[A-Za-z0-9_=,.-]+", example="sn_all", what="what the site's network plugin reads"
    ),
    "dependency": Option(
        form=_list(r"singleton|after(any|ok|notok|burstbuffer)?(:\d+(\+\d+)?)+", "[,?]"),
        example="afterok:123", what="jobs that must be over before",
    ),
    "begin": Option(form=_MOMENT, example="now+2hours", what="not before"),
    "deadline": Option(
        form=_MOMENT, example="2027-01-31T08:00", what="removed if it cannot end by then"
    ),
    "nice": Option(form=r"-?\d+", example="100", what="lower priority", of_side_jobs=True),
    "priority": Option(form=r"\d+", example="1000", what="for operators", of_side_jobs=True),
    "wckey": Option(form=_NAME, example="project", what="workload key", of_side_jobs=True),
    "mail-type": Option(
        form=_list(_MAIL), example="END,FAIL", what="when Slurm writes a mail", of_side_jobs=True
    ),
    "mail-user": Option(
        form=r"[A-Za-z0-9][^\s,'\"\\;]*", example="me@example.org", what="to whom",
        of_side_jobs=True,
    ),
    "auto-resume": Option(
        form="[01]", example="1", client="srun",
        what="SageMaker HyperPod: a faulty node is replaced and the step started again",
    ),
}  # fmt: skip

_DEVICES = "cluster.devices and cluster.device, or launch.slurm.request_gpus=false for none"
_ONE_TASK = "Leave it out: one program on each node starts a process per device (cluster.devices)"
_LOGS = "Leave it out: logs are in the run's folder, where `shardyard logs` finds them"
_WHOLE = "Leave it out: nodes with accelerators are taken whole"

RESERVED: dict[str, str] = {
    "job-name": "run.name, or run.id",
    "nodes": "cluster.nodes",
    "ntasks": _ONE_TASK,
    "ntasks-per-node": _ONE_TASK,
    "ntasks-per-gpu": _ONE_TASK,
    "tasks-per-node": _ONE_TASK,
    "cpus-per-task": "cluster.devices",
    "gpus": _DEVICES,
    "gpus-per-node": _DEVICES,
    "gpus-per-task": _DEVICES,
    "exclusive": _WHOLE,
    "oversubscribe": _WHOLE,
    "mem": "Leave it out: nodes are taken whole; or give the partition's memory of each core",
    "time": "launch.time_limit",
    "partition": "launch.slurm.partition",
    "account": "launch.slurm.account",
    "qos": "launch.slurm.qos",
    "constraint": "launch.slurm.constraint",
    "requeue": "launch.slurm.requeue",
    "no-requeue": "launch.slurm.requeue=false",
    "signal": "launch.slurm.signal_before_s",
    "comment": "Leave it out: `shardyard runs --on slurm` knows our jobs by it",
    "export": "launch.env, or secrets",
    "output": _LOGS,
    "error": _LOGS,
    "open-mode": _LOGS,
    "chdir": "run.dir",
    "kill-on-bad-exit": "Leave it out: nodes that may be saving must not be killed",
    "no-kill": "Leave it out: a job without the machine of its batch script would not end",
    "wait": "elastic.drain_timeout_s",
    "container-image": "launch.slurm.container_image",
    "container-mounts": "launch.slurm.container_mounts",
    "array": "Leave it out: a run is one job; launch each of several by itself",
}
"""Options that a launch sets itself -> what to set in their place."""


def check_slurm_options(options: Mapping[str, Value]) -> Iterable[Problem]:
    """Each option that cannot be passed on, with what to do."""
    for name, value in options.items():
        if name not in ALLOWED:
            yield Problem(SETTING, f"{show(name)} {_rejection_reason(name.lstrip('-'))}")
        elif not _has_form(ALLOWED[name], value):
            option = ALLOWED[name]
            wanted = "true or false" if not option.form else f"such as {option.example}"
            text = (
                f"={show(value)} is not a value of --{name} ({option.what}): Slurm would reject it "
                f"or misread it. Give {wanted}; quote what has a colon."
            )
            yield Problem(f"{SETTING}.{name}", text)


def words_of(
    options: Mapping[str, Value], client: Literal["sbatch", "srun"], *, is_side: bool
) -> list[tuple[str, str | None]]:
    """Options for one client, in the order of the table: name, and value or None for a flag.

    Args:
        is_side: Of a side job in the training's own partition.
    """
    return [
        (name, str(options[name]) if option.form else None)
        for name, option in ALLOWED.items()
        if option.client == client
        and (option.of_side_jobs or not is_side)
        and options.get(name, False) is not False
    ]


def gpus_in(gres: str) -> int | None:
    """Return how many GPUs of a node ``gres`` names; None: it names none."""
    counts = [
        int(found[1] or 1)
        for item in gres.split(",")
        if (found := re.fullmatch(r"gpu(?::[A-Za-z][^:]*)?(?::(\d+))?", item))
    ]
    return sum(counts) if counts else None


def _has_form(option: Option, value: Value) -> bool:
    if not option.form or isinstance(value, bool):
        return not option.form and isinstance(value, bool)
    return re.fullmatch(option.form, str(value), re.ASCII) is not None


def _rejection_reason(name: str) -> str:
    if name in RESERVED:
        remedy = RESERVED[name]
        verb = "" if remedy.startswith("Leave") else "Set "
        return f"is set by the launch itself. {verb}{remedy}."
    if name in ALLOWED:
        return f"is written without dashes. Write {name}."
    near = difflib.get_close_matches(name, [*ALLOWED, *RESERVED], n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    if near and near[0] in RESERVED and not RESERVED[near[0]].startswith("Leave"):
        meant = f"Did you mean {RESERVED[near[0]]}? "
    return f"is not an option that Shardyard passes on. {meant}Allowed are {', '.join(ALLOWED)}."
