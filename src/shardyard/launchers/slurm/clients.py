"""Slurm's command line clients: run one, and say what its refusal means and what to do about it."""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardyard.errors import AccessError, CapacityError, RequestError, ShardyardError
from shardyard.foreign_variables import for_slurm_client

_PAGE = "launch-slurm#error-messages"

QUERY_TIMEOUT_S = 60.0
"""A client whose controller is away tries again for SlurmctldTimeout, often two minutes."""


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """Result of a client."""

    exit_code: int
    out: str
    err: str


Shell = Callable[[Sequence[str]], ClientResult]
"""Runs one client to its end; may raise FileNotFoundError or subprocess.TimeoutExpired."""


def run_client(argv: Sequence[str]) -> ClientResult:
    """Run a client on this machine, without variables that outrank its options."""
    done = subprocess.run(
        argv,
        # SBATCH_* outrank the lines of a batch script, and SQUEUE_* change what squeue prints.
        env=for_slurm_client(os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=QUERY_TIMEOUT_S,
        check=False,
    )
    return ClientResult(exit_code=done.returncode, out=done.stdout, err=done.stderr)


class UnknownJobError(ShardyardError):
    """Slurm's controller knows no such job, or knows it no more."""


class NoAnswerError(CapacityError):
    """Slurm did not answer: what it did with the request is not known."""


class NoAccountingError(ShardyardError):
    """This Slurm keeps no accounts."""


_AWAY = (
    "Slurm's controller does not answer, so the state is unknown, and only confirmed changes were "
    "made. Running jobs continue. Try again; `scontrol ping` says when it is back."
)

# Patterns are of Slurm's own messages (slurm_errno.c, and those of its clients). The first that is
# found counts, so that a general word cannot take the place of an exact one.
_REFUSALS: tuple[tuple[str, type[ShardyardError], str], ...] = (
    (r"Invalid job id", UnknownJobError, "It ended long ago, or was never there: `sacct -j ID`."),
    (r"accounting storage is disabled", NoAccountingError, "Only the controller can be asked."),
    (
        r"Unable to contact slurm controller|Connection (refused|timed out)|Socket timed out"
        r"|Zero Bytes were transmitted|Communication connection failure"
        r"|not responding|backup controller",
        NoAnswerError,
        _AWAY,
    ),
    (
        r"(configuration source|fetch_config|Unable to open|No such file).*slurm.conf"
        r"|Could not establish a configuration source",
        RequestError,
        "This machine belongs to no Slurm cluster. Run this on a login node, or set SLURM_CONF.",
    ),
    (
        r"[Ii]nvalid partition",
        RequestError,
        "Set launch.slurm.partition to one of `sinfo -s`.",
    ),
    (
        r"Invalid account or account/partition",
        RequestError,
        "Set launch.slurm.account to one of yours, in a partition that takes it: "
        "`sacctmgr show assoc user=$USER format=account,partition,qos`.",
    ),
    (
        r"Invalid qos",
        RequestError,
        "Set launch.slurm.qos to one of yours: `sacctmgr show assoc user=$USER format=qos`.",
    ),
    (
        r"QOS\w*(Submit|Max|Grp|Job)\w*|accounting/QOS policy|Assoc\w*(Submit|Max|Grp)\w*",
        CapacityError,
        "A limit of your account or quality of service is reached. Wait until jobs of yours end "
        "(`squeue --me`), cancel one, or ask for less; `sacctmgr show qos` has the limits.",
    ),
    (
        r"[Tt]ime limit|--time specification",
        RequestError,
        "Set launch.time_limit below the partition's: `sinfo -o '%P %l'`.",
    ),
    (
        r"[Nn]ode count|[Tt]oo many nodes|Requested partition configuration not available",
        RequestError,
        "Ask for fewer nodes (cluster.nodes), or for another partition: `sinfo -o '%P %D %s'`.",
    ),
    (
        r"[Ii]nvalid feature|--constraint",
        RequestError,
        "Set launch.slurm.constraint to features that nodes have: `sinfo -o '%P %f'`.",
    ),
    (
        r"[Ii]nvalid generic resource|gres/gpu|[Ii]nvalid Trackable RESource",
        RequestError,
        "No node of the partition offers what was asked as a generic resource: `sinfo -o '%P %G'`. "
        "If this Slurm manages no GPUs, set launch.slurm.request_gpus=false; if it calls them "
        "otherwise, ask for them with launch.slurm.options.gres.",
    ),
    (
        r"[Ii]nvalid node name|Invalid host",
        RequestError,
        "Name nodes of `sinfo -N` in launch.slurm.options.nodelist and exclude.",
    ),
    (
        r"[Rr]eservation is invalid|[Ii]nvalid reservation|reservation.*(not|denied)",
        RequestError,
        "Set launch.slurm.options.reservation to one that is there and that you may use: `scontrol "
        "show reservation`.",
    ),
    (
        r"[Ii]nvalid license|[Ii]nvalid wckey|[Dd]ependency problem|[Ii]nvalid (begin|deadline)",
        RequestError,
        "Fix that option in launch.slurm.options.",
    ),
    (
        r"node configuration is not available|can not be satisfied|More processors requested",
        RequestError,
        "No node of the partition has what was asked. Compare cluster.instance and "
        "cluster.devices with `sinfo -o '%P %D %c %m %G'`.",
    ),
    (
        r"Requested nodes are busy|Unable to allocate resources",
        CapacityError,
        "Try again later: `sinfo` shows what is free.",
    ),
    (
        r"[Aa]ccess/permission denied|not permitted|Invalid user|[Pp]ermission denied"
        r"|[Aa]uthentication|[Mm]unge",
        AccessError,
        "Ask the administrators of the cluster for permission; `id` and `sacctmgr show assoc "
        "user=$USER` show what you have.",
    ),
    (
        # The most general words are last: `disabled` is also in the message on accounting.
        r"temporarily unable|disabled|draining|Reached the maximum|system limit",
        CapacityError,
        "Try again later; the administrators know when.",
    ),
)


def ask(shell: Shell, argv: Sequence[str]) -> str:
    """Run a client and return its output.

    Raises:
        RequestError: The client is not installed, or the request can never be met.
        AccessError: Slurm does not permit it.
        CapacityError: Not now: a limit is reached, or the controller is away (NoAnswerError).
        UnknownJobError: There is no such job.
        NoAccountingError: ``sacct`` has no accounts to read.
        ShardyardError: It failed with words that are not known.
    """
    try:
        done = shell(argv)
    except FileNotFoundError as error:
        raise RequestError(
            f"{argv[0]} is not installed here. Runs reach Slurm through its command line clients. "
            "Run this on a login node of the cluster.",
            page=_PAGE,
        ) from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(
            f"`{argv[0]}` gave no answer for {error.timeout:g} s. {_AWAY}", page=_PAGE
        ) from error
    if done.exit_code == 0:
        return done.out
    said = " ".join(done.err.split()) or f"no output, exit code {done.exit_code}"
    raise client_error(argv[0], said)


def client_error(client: str, message: str) -> ShardyardError:
    """Return the error that a client's output means."""
    for pattern, kind, remedy in _REFUSALS:
        if re.search(pattern, message):
            return kind(f"`{client}` failed: {message.removesuffix('.')}. {remedy}", page=_PAGE)
    return ShardyardError(
        f"`{client}` failed: {message.removesuffix('.')}. These words of Slurm are not known here. "
        "Look at the script with `shardyard launch --dry-run`, and at the cluster with `sinfo`.",
        page=_PAGE,
    )
