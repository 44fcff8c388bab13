"""docs/errors.md: exit codes, and the whole messages of common errors with their fixes.

The messages are in error_messages.json, as tests/launchers/test_wrong_situations.py made them
happen. It compares them at each run, and writes them where ``SHARDYARD_RECORD_MESSAGES`` is set.
"""

import json
import re
import textwrap
from pathlib import Path

from tests.launchers.wrong_situations import all_situations

MESSAGES = Path(__file__).with_name("error_messages.json")
"""Launcher, as the table of situations has it -> situation -> message."""

_HEAD = """# Errors: exit codes, messages and fixes

Find an exit code or an error message, and what to do. Each message says what is wrong, with the
value, and the likeliest fix. Values such as `acme/llama` and `trainers` are examples; `~` is your
folder. For symptoms, see [troubleshooting](troubleshooting.md).

## Exit codes

| exit code | meaning | what to do |
|---|---|---|
| 0 | done | |
| 1 | failed, or `doctor` found a problem | read the message; `shardyard resume RUN` after the fix |
| 2 | wrong request; no work was started | correct the settings that the message lists |
| 3 | not available now: no capacity, no answer | run the same command again later |
| 4 | no permission | log in, or ask an administrator |
| 10, 11, 12 | memory, budget or deadline of [a check](verbs/plan.md#check-recipes-in-ci) | |
| 75 | a node was lost | a scheduler restarts the job; else `shardyard resume RUN` |
| 130 | interrupted with Ctrl-C; `train` saves its last step | `shardyard resume RUN` |
| 143 | stopped by SIGTERM, time limit or `launch.max_usd`, after saving | `shardyard resume RUN` |
"""
SHOWN: dict[str, dict[tuple[str, str], str]] = {
    "Recipe and launch": {
        ("any launcher", "unknown launcher"): "Unknown launcher",
        ("any launcher", "setting that does not exist"): "Unknown setting",
        ("any launcher", "unknown instance"): "Unknown instance type",
        ("any launcher", "run folder cannot be made"): "Run folder below a file",
        ("any launcher", "number of devices not known"): "Unknown number of devices",
        ("any launcher", "more nodes needed than there are"): "More nodes than the cluster has",
        ("any launcher", "nobody to ask, and no --yes"): "No terminal and no --yes",
        ("any launcher", "plan does not fit"): "Out of memory, predicted",
        ("any launcher", "price above the limit"): "Price above the limit",
        ("any launcher", "price limit without a known price"): "Price limit without a price",
        ("any launcher", "literal secret in launch.env"): "Token in the recipe",
        ("any launcher", "capacity block that is over"): "Capacity block ended",
    },
    "Runs": {
        ("any launcher", "run that does not exist"): "Unknown run",
        ("any launcher", "run that was never launched"): "Run without a job",
        ("any launcher", "run.id in use"): "Run id in use",
        (
            "any launcher",
            "submission died between intent and confirmation",
        ): "Interrupted submission",
        ("slurm", "teardown of a running job"): "Teardown of a running job",
        ("kubernetes", "more nodes than the range has"): "Scale beyond the range",
    },
    "Paths on the nodes": {
        (
            "paths, of any launcher",
            "relative path, and nodes share no folder with this machine",
        ): "Relative path",
        ("paths, of any launcher", "text on no volume of the nodes"): "Path on no volume",
        (
            "paths, of any launcher",
            "path that is not mounted into a container on Slurm",
        ): "Path not mounted into the container",
        ("kubernetes", "run folder on no volume"): "Run folder on no volume",
    },
    "Hugging Face hub": {
        ("Hugging Face hub", "gated model, and no token"): "Gated model without a token",
        (
            "paths, of any launcher",
            "gated model, and no token for pods",
        ): "Gated model without a token for the nodes",
        ("Hugging Face hub", "repository that is not there"): "Repository not found",
        ("Hugging Face hub", "revision that is not there"): "Revision not found",
        (
            "Hugging Face hub",
            "repository without weights that may be opened",
        ): "Repository without safetensors",
        ("Hugging Face hub", "offline, and nothing fetched before"): "Offline",
        ("Hugging Face hub", "folder for models without room"): "No room for the model",
        ("Hugging Face hub", "file that was changed after it was fetched"): "Changed file",
        (
            "paths, of any launcher",
            "model.config of a model that is not built",
        ): "Unknown model",
    },
    "Slurm": {
        ("slurm", "no Slurm here"): "Slurm not installed",
        ("slurm", "this machine belongs to no cluster"): "No Slurm cluster",
        ("slurm", "unknown partition"): "Unknown partition",
        ("slurm", "unknown account"): "Unknown account",
        ("slurm", "time limit above the partition's"): "Time limit too long",
        ("slurm", "more nodes than there are"): "Too many nodes",
        ("slurm", "devices that no node has"): "No such node",
        ("slurm", "GPUs of a Slurm that manages none"): "No GPU resource (gres)",
        ("slurm", "limit of the account reached"): "Limit of the account",
        ("slurm", "not permitted in the partition"): "No permission for the partition",
        ("slurm", "controller away while it is submitted"): "Controller does not answer",
        ("slurm", "secret not in the environment"): "Secret missing in the environment",
    },
    "Kubernetes": {
        ("kubernetes", "context not given"): "No context",
        ("kubernetes", "unknown context"): "Unknown context",
        ("kubernetes", "API server down"): "API server does not answer",
        ("kubernetes", "credentials expired"): "Expired credentials",
        ("kubernetes", "no right to create the job"): "No permission to create the job",
        ("kubernetes", "quota of the namespace used up"): "Quota used up",
        ("kubernetes", "admission webhook denies it"): "Admission webhook",
        ("kubernetes", "job of that name is somebody's"): "Job name in use",
        ("kubernetes", "controller absent"): "JobSet not installed",
        ("kubernetes", "namespace missing"): "Unknown namespace",
        ("kubernetes", "image not given"): "No image",
        ("kubernetes", "secret where no pod can read it"): "Secret that pods cannot read",
        ("kubernetes", "range of nodes on a JobSet"): "Elastic run on a JobSet",
        ("kubernetes", "more EFA interfaces than there are"): "Too many EFA interfaces",
        ("kubernetes", "name too long"): "Name too long",
    },
    "AWS Batch": {
        ("aws-batch", "region not known"): "No region",
        ("aws-batch", "queue missing"): "Unknown queue",
        ("aws-batch", "queue disabled"): "Disabled queue",
        ("aws-batch", "queue too small"): "Queue too small",
        ("aws-batch", "queue with other instances"): "Queue with other instances",
        ("aws-batch", "no credentials"): "No credentials",
        ("aws-batch", "credentials expired"): "Expired credentials",
        ("aws-batch", "no right to submit"): "No permission to submit",
        ("aws-batch", "AWS throttles"): "Throttled",
        ("aws-batch", "secret without a role to read it"): "Secret without a role",
        ("aws-batch", "Spot instances"): "Spot instances",
    },
    "Compare": {
        ("compare", "a single run"): "A single run",
        ("compare", "a run that has not begun"): "Run not started",
        ("compare", "a target that is none"): "Invalid target",
        ("compare", "a target that no run is evaluated by"): "Unknown metric",
    },
    "Study": {
        ("study", "a study neither run nor planned"): "Study without a launcher",
        ("study", "a sum above its limit"): "Study above its price limit",
    },
    "Import": {
        ("import", "a key that this version does not know"): "Unknown key",
        ("import", "files that contradict each other"): "Contradicting files",
        ("import", "a variable that the script does not set"): "Unset shell variable",
        ("import", "files that say neither model nor data"): "No model and no data",
        ("import", "a checkpoint that would run something"): "Checkpoint with code",
        (
            "import",
            "a checkpoint of which a rank's file is missing",
        ): "Checkpoint of only some ranks",
    },
}
"""Section of the page -> launcher and situation of the table -> title."""


def page() -> str:
    """The whole page."""
    codes = {(launcher, row.what): row.exit_code for launcher, row in all_situations()}
    messages = json.loads(MESSAGES.read_text())
    lines = [_HEAD]
    for section, rows in SHOWN.items():
        lines.append(f"## {section}\n")
        for (launcher, what), title in rows.items():
            lines.append(f"**{title}** (exit code {codes[launcher, what]})\n")
            lines.append(f"```text\n{_wrapped(messages[launcher][what])}\n```\n")
    return "\n".join(lines)


def message_of(said: str, folder: Path) -> str:
    """The error in what a command printed, with ``~`` for a folder and one commit of the hub."""
    found = re.search(r"^error: .*", said.replace(str(folder), "~"), re.MULTILINE | re.DOTALL)
    return re.sub(r"\b[0-9a-f]{12}\b", "0123456789ab", found[0].strip()) if found else ""


def _wrapped(message: str) -> str:
    """Message in lines that fit on a page."""
    return "\n".join(
        textwrap.fill(
            line,
            width=110,
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in message.splitlines()
    )
