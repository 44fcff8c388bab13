"""The batch script of a run on Slurm: the options for sbatch, and the work of the job.

One task per node; each is the node's own program, which starts a process per device. The
script around them only waits and passes a request to stop on. It puts the job back into the
queue when the time limit was the reason.
"""

import math
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Literal

from shardyard.config.machines import reject_capacity_settings
from shardyard.config.rules.slurm_options import gpus_in, words_of
from shardyard.config.rules.tags import tag_words
from shardyard.config.rules.timeouts import check_timeouts
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import parse_references
from shardyard.errors import RecipeError, RequestError
from shardyard.foreign_variables import SRUN_DEFAULTS
from shardyard.launchers.base import LaunchRequest
from shardyard.launchers.ledger import SIDE_DETAIL
from shardyard.own_processes import ISOLATED, word

NODE_PROGRAM = (*ISOLATED, "shardyard.node")
SIDE_PROGRAM = (*ISOLATED, "shardyard.node.side_job")

SIGNAL_SLACK_S = 60
"""Slurm may send the warning this much earlier than asked (sbatch(1), --signal)."""

COMMENT = "shardyard-run="
"""Begins the comment of each of our jobs; the run's id follows, then its tags."""

_UNSET = (
    "# Options of srun and scancel that a login shell may set; tasks get all of this script.",
    f"options='^({SRUN_DEFAULTS.names.replace('?:', '')})$'",
    'for name in "${!S@}"; do',
    '  if [[ $name =~ $options ]]; then unset "$name"; fi',
    "done",
)
"""Lines that leave srun its defaults."""

_GPUS = ("cuda", "xpu")
"""Accelerators that Slurm's gpu plugins find; for others each cluster has its own name."""

_BODY = r"""
newest() { cat "$run_dir/checkpoints/latest" 2>/dev/null || true; }
before=$(newest)
stop_file="$run_dir/launch/stop-$SLURM_JOB_ID"  # written by `shardyard cancel`
step='' reason='' forwarding='' woken=''

# SIGTERM makes a node finish its step, save and end with 143. It goes to the tasks past srun, which
# would kill them. Slurm loses a signal to a step that it is still launching, so it is sent until
# the nodes have ended; they heed the first that they get and no other.
forward() {
  [[ -n $step && -z $forwarding ]] || return 0
  forwarding=yes
  local sent=''
  while kill -0 "$step" 2>/dev/null; do
    if [[ -z $sent ]] || (( SECONDS - sent >= 10 )); then
      scancel --signal=TERM "$SLURM_JOB_ID" || true
      sent=$SECONDS
    fi
    sleep 1
  done
}
drain() { woken=yes reason=${reason:-$1}; echo "shardyard: draining: $1"; forward; }
trap 'drain "time limit"' USR1
trap 'drain cancel' USR2
trap 'woken=yes forwarding=yes reason=${reason:-signal}' TERM  # Slurm sends it to the tasks as well

echo "shardyard: start ${SLURM_RESTART_COUNT:-0}"  # a requeued job goes on in the same log
"${environment[@]}" "${srun[@]}" "${node[@]}" &
step=$!
if [[ -e $stop_file ]]; then drain cancel; fi
if [[ -n $reason ]]; then forward; fi

while true; do  # a trap ends `wait` early
  code=0
  wait "$step" || code=$?
  [[ -n $woken ]] || break
  woken=''
done
# Where nodes may be lost, srun tells how they ended; how the run did, whoever led it wrote down.
if [[ $code != 0 && $outlives_nodes == yes ]]; then
  session="$run_dir/sessions/$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.json"
  ended=$(sed -n 's/.*"exit_code": *\([0-9]*\).*/\1/p' "$session" 2>/dev/null || true)
  code=${ended:-75}  # nobody: too few are left
fi
echo "shardyard: the nodes ended with exit code $code"

again=''
if [[ $code == 143 && $reason == 'time limit' ]]; then again='at the time limit'; fi
if [[ $code == 75 && $outlives_nodes == yes && -z $reason ]]; then again='without lost nodes'; fi
if [[ -n $again && ! -e $stop_file && $requeue == yes ]]; then
  if [[ $(newest) == "$before" ]]; then
    echo "shardyard: not requeued: no checkpoint was written since this start, so the next one" \
      "would end the same way. Raise launch.time_limit, then resume the run." >&2
  else
    echo "shardyard: requeued $again, to go on from $(newest)"
    scontrol requeue "$SLURM_JOB_ID" || echo "shardyard: not requeued; resume the run by hand" >&2
  fi
fi
exit "$code"
"""


def recipe_file(side: Mapping[str, str]) -> str:
    """Return the recipe that the nodes read, in the run's folder.

    Args:
        side: ``LaunchRequest.side_details``, or details of a ledger's line.
    """
    return f"launch/{side[SIDE_DETAIL]}.yaml" if SIDE_DETAIL in side else "launch/recipe.yaml"


def script_file(side: Mapping[str, str]) -> str:
    """Return the script for sbatch, in the run's folder; arguments as of ``recipe_file``."""
    return f"launch/{side[SIDE_DETAIL]}.sbatch" if SIDE_DETAIL in side else "launch/slurm.sbatch"


def render_script(request: LaunchRequest, program: tuple[str, ...] = NODE_PROGRAM) -> str:
    """Return the whole script; pure.

    Args:
        program: Python's arguments on each node.

    Raises:
        RequestError: A value cannot be in a batch script, or the time limit leaves no time.
    """
    slurm = request.recipe.launch.slurm
    _check_script_values(request)
    directives = [f"#SBATCH {_option(name, value)}" for name, value in _directives(request)]
    return "\n".join(
        [
            "#!/bin/bash",
            *directives,
            "",
            "set -euo pipefail",
            # Before srun, which reads these variables as options.
            *_UNSET,
            f"run_dir={word(request.run_dir)}",
            f"requeue={'yes' if slurm.requeue and request.side is None else 'no'}",
            f"outlives_nodes={'yes' if _outlives_nodes(request) else 'no'}",
            _array("environment", _environment(request)),
            _array("srun", _srun(request)),
            _array("node", _node(request, program)),
            _BODY.strip("\n"),
            "",
        ]
    )


def logged_exit_code(output: str) -> int | None:
    """The exit code that the newest start of the script printed; None: it did not come to that."""
    newest = re.split(r"^shardyard: start \d+$", output, flags=re.MULTILINE)[-1]
    found = re.search(r"^shardyard: the nodes ended with exit code (\d+)$", newest, re.MULTILINE)
    return int(found[1]) if found else None


def exported_names(recipe: Recipe) -> tuple[str, ...]:
    """Environment variables of the submitter that hold secrets of the run."""
    return tuple(
        sorted(
            reference.name or name
            for name, reference in parse_references(recipe.secrets).items()
            if reference.kind == "env"
        )
    )


def warnings(recipe: Recipe) -> tuple[str, ...]:
    """Return warnings about settings that are allowed but may be regretted."""
    kept = [
        f"secrets.{name}"
        for name, reference in sorted(parse_references(recipe.secrets).items())
        if reference.kind == "env"
    ]
    if not kept:
        return ()
    return (
        f"{', '.join(kept)}: kept in env, so sbatch hands the value to Slurm's controller, which "
        "keeps it in clear in its StateSaveLocation as long as the job, where Slurm's "
        "administrators can read it. Keep it in a private file on the shared file system "
        "instead: secrets: {NAME: file:/path}.",
    )


def unused_image(recipe: Recipe) -> str | None:
    """Warning about an image that no node runs; None: there is none."""
    launch = recipe.launch
    if launch.image is None or launch.slurm.container_image is not None:
        return None
    return (
        f"launch.image={launch.image} is not used on Slurm: the nodes run their own Python. With "
        "Pyxis on the cluster, set launch.slurm.container_image to the image."
    )


def _directives(request: LaunchRequest) -> list[tuple[str, str | int | None]]:
    """Options of sbatch; None: without a value."""
    slurm = request.recipe.launch.slurm
    directives: list[tuple[str, str | int | None]] = [
        ("job-name", f"{request.run_id}{request.side_suffix}"),
        ("comment", _comment(request)),
        ("nodes", request.nodes),
        ("ntasks-per-node", 1),
        *_devices(request),
    ]
    if request.time_limit_s is not None:
        directives.append(("time", _minutes(request)))
    directives += [*_queue(request), *_added(request, "sbatch")]
    directives += [
        # Always given: otherwise the JobRequeue of the cluster decides.
        ("requeue" if slurm.requeue and request.side is None else "no-requeue", None),
        ("signal", f"B:USR1@{slurm.signal_before_s}"),
        # Slurm truncates the log of a requeued job without this option.
        ("open-mode", "append"),
        ("output", f"{_in_pattern(request.run_dir)}/logs/slurm-%j.log"),
        # sbatch hands over the submitter's whole environment by default.
        ("export", ",".join(exported_names(request.recipe)) or "NONE"),
    ]
    return directives


def _comment(request: LaunchRequest) -> str:
    """Return the run's mark, and its tags: ``sacct`` and ``squeue`` show them."""
    tags = tag_words(request.recipe.run.tags, " ")
    return f"{COMMENT}{request.run_id}{f' {tags}' if tags else ''}"


def _minutes(request: LaunchRequest) -> int:
    """The time limit; a block's end is no time to be rounded up to."""
    # A plain number in --time is minutes, the unit in which Slurm counts limits.
    minutes = (request.time_limit_s or 0.0) / 60
    is_of_block = request.time_limit_s == request.block_left_s
    return math.floor(minutes) if is_of_block else math.ceil(minutes)


def _queue(request: LaunchRequest) -> list[tuple[str, str | int | None]]:
    """Return the options of the queue; a side partition drops the training's constraint."""
    slurm = request.recipe.launch.slurm
    partition, constraint = slurm.partition, slurm.constraint
    if request.side is not None and slurm.side_partition is not None:
        partition, constraint = slurm.side_partition, None
    asked = {
        "partition": partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": constraint,
    }
    return [(name, value) for name, value in asked.items() if value is not None]


def _added(
    request: LaunchRequest, client: Literal["sbatch", "srun"]
) -> list[tuple[str, str | None]]:
    """Return the options that the recipe adds; none for side jobs in their own partition."""
    slurm, is_side = request.recipe.launch.slurm, request.side is not None
    if is_side and slurm.side_partition is not None:
        return []
    return words_of(slurm.options, client, is_side=is_side)


def _devices(request: LaunchRequest) -> list[tuple[str, str | int | None]]:
    """Whole nodes where there are accelerators; on others a core for each process."""
    if request.side is not None:
        side = request.recipe.launch.side
        return [("cpus-per-task", side.cpus), ("mem", f"{side.memory_gib}G")]
    kind = _device_kind(request)
    # The devices of the nodes are not known, so the partition's defaults decide.
    if kind == "auto":
        return []
    if kind == "cpu":
        return [("cpus-per-task", request.devices_per_node)]
    slurm = request.recipe.launch.slurm
    # --exclusive gives all CPUs of a node, but only the default memory; --mem=0 is all of it.
    whole: list[tuple[str, str | int | None]] = [("exclusive", None), ("mem", 0)]
    is_asked = kind in _GPUS and slurm.request_gpus and _gpus_by_gres(request) is None
    return [("gpus-per-node", request.devices_per_node), *whole] if is_asked else whole


def _gpus_by_gres(request: LaunchRequest) -> int | None:
    """GPUs of each node that ``launch.slurm.options.gres`` asks for in place of our own option."""
    return gpus_in(str(request.recipe.launch.slurm.options.get("gres", "")))


def _outlives_nodes(request: LaunchRequest) -> bool:
    """Return whether the job continues without a lost task; a lost machine restarts all.

    ``--no-kill`` is not used: a job whose first machine is lost would then run on without its
    script, and would not be drained or ended.
    """
    fewest = request.recipe.elastic.min_nodes
    return request.side is None and fewest != "auto" and fewest < request.nodes


def _device_kind(request: LaunchRequest) -> str:
    asked = request.recipe.cluster.device
    if asked == "auto" and request.cluster is not None:
        return request.cluster.accelerator.device
    return asked


def _srun(request: LaunchRequest) -> list[str]:
    """Return the command that starts one task per node, each with a log of its own.

    ``--kill-on-bad-exit`` is off: a drained node ends with 143, and the others, which may still
    be saving, would be killed for it. They get as long as a drain may take. If they continue
    without a lost one, their time is not limited.
    """
    recipe = request.recipe
    slurm = recipe.launch.slurm
    wait_s = math.ceil(recipe.elastic.drain_timeout_s)
    words = ["srun", "--kill-on-bad-exit=0"]
    words.append("--wait=0" if _outlives_nodes(request) else f"--wait={wait_s}")
    words.append("--cpu-bind=none")  # the only task of a node would be bound to one core
    words += [f"--{name}={value}" for name, value in _added(request, "srun")]
    cpus = dict(_devices(request)).get("cpus-per-task")
    if cpus is not None:
        words.append(f"--cpus-per-task={cpus}")  # not inherited since 22.05
    words += [
        "--open-mode=append",
        # %t is the task's rank, which is the node's where each node has one task.
        f"--output={_in_pattern(request.run_dir)}/logs/slurm-%j-node-%t.log",
    ]
    if slurm.container_image is not None:
        mounts = (*slurm.container_mounts, f"{request.run_dir}:{request.run_dir}")
        words += [
            f"--container-image={slurm.container_image}",
            f"--container-mounts={','.join(mounts)}",
        ]
    return words


def _environment(request: LaunchRequest) -> list[str]:
    """Set the run's variables for srun, and so for its tasks, but not for this script.

    bash would lose some: it keeps names such as UID to itself, and the script has its own.
    """
    return ["env", *(f"{name}={value}" for name, value in sorted(request.environment.items()))]


def _node(request: LaunchRequest, program: tuple[str, ...]) -> list[str]:
    slurm = request.recipe.launch.slurm
    python = slurm.python
    if python == "auto":
        # The path of this Python means nothing inside a container.
        python = sys.executable if slurm.container_image is None else "python3"
    words = [f"{request.run_dir}/{recipe_file(request.side_details)}", "--run-dir", request.run_dir]
    if request.side is not None:
        return [python, *SIDE_PROGRAM, *words, "--side", request.side.to_text()]
    moves = ["--store-moves"] if _outlives_nodes(request) else []
    return [python, *program, *words, "--place", "slurm", *moves]


def _check_script_values(request: LaunchRequest) -> None:
    launch, slurm = request.recipe.launch, request.recipe.launch.slurm
    place = "run.dir" if launch.run_dir is None else "launch.run_dir"
    values = {
        f"{place}: run folder": request.run_dir,
        "launch.slurm.partition": slurm.partition,
        "launch.slurm.side_partition": slurm.side_partition,
        "launch.slurm.account": slurm.account,
        "launch.slurm.qos": slurm.qos,
        "launch.slurm.constraint": slurm.constraint,
    }
    for name, value in values.items():
        if value is not None and (not value.isprintable() or "\\" in value or not value):
            raise RequestError(
                f"{name}={value!r} cannot be in a batch script: sbatch reads its options line by "
                "line and a backslash changes what follows. Choose another without them."
            )
    if request.run_dir.count("%") > 1 or re.search(r"%\d", request.run_dir):
        raise RequestError(
            f"{place}: run folder={request.run_dir!r} holds several % or one before a digit. Slurm "
            "gives % a meaning in names of output files and loses track of such ones: logs would "
            "go elsewhere. Choose another."
        )
    if slurm.container_image is not None and set(":,") & set(request.run_dir):
        raise RequestError(
            f"{place}: run folder={request.run_dir!r} holds a colon or a comma, which separate "
            "paths where it is mounted into launch.slurm.container_image. Choose another."
        )
    if not request.run_dir.startswith("/"):
        raise RequestError(
            f"launch.run_dir={request.run_dir!r} is not an absolute path. Nodes start elsewhere "
            "than here. Write the whole path, on a file system that this machine and the nodes "
            "share."
        )
    gpus = _gpus_by_gres(request)
    if gpus is not None and request.side is None and gpus != request.devices_per_node:
        raise RequestError(
            f"launch.slurm.options.gres={slurm.options['gres']} asks for {gpus} GPUs of each node, "
            f"where {request.devices_per_node} processes start (cluster.devices, or the "
            "catalogue's count for cluster.instance). Give both the same number."
        )
    inverted = list(check_timeouts(request.recipe, on="slurm"))
    if inverted:
        raise RecipeError(inverted)
    reject_capacity_settings(
        request.recipe.cluster,
        launcher="Slurm",
        instead="name its partition (launch.slurm.partition) or its own reservation "
        "(launch.slurm.options.reservation)",
    )
    least_s = slurm.signal_before_s + SIGNAL_SLACK_S
    if request.time_limit_s is not None and request.time_limit_s <= least_s:
        given = f"launch.time_limit={launch.time_limit}"
        if request.time_limit_s == request.block_left_s:
            given = f"what is left of cluster.capacity={request.recipe.cluster.capacity}"
        raise RequestError(
            f"{given} is not longer than the {least_s} s before its end at which the run may be "
            f"asked to drain (launch.slurm.signal_before_s, and {SIGNAL_SLACK_S} s of Slurm's "
            "own). Raise the one or lower the other."
        )


def _option(name: str, value: str | int | None) -> str:
    return f"--{name}" if value is None else f"--{name}={shlex.quote(str(value))}"


def _array(name: str, words: list[str]) -> str:
    # An array, so that a path with blanks stays one word.
    return f"{name}=({' '.join(map(word, words))})"


def _in_pattern(path: str) -> str:
    """A path inside a file name pattern, where Slurm gives ``%`` a meaning."""
    return path.replace("%", "%%")
