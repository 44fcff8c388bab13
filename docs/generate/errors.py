"""docs/errors.md: exit codes, and the whole messages of the commonest errors with their fixes.

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

Find an exit code and what to do. Every message says what is wrong, with the value, and the
likeliest fix; the messages that users meet most are below. Values such as `acme/llama` are
examples, `~` is your folder. Slurm's are in [its guide](launch-slurm.md#error-messages),
symptoms in [troubleshooting](troubleshooting.md).

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
        ("any launcher", "setting that does not exist"): "Unknown setting",
        ("any launcher", "number of devices not known"): "Unknown number of devices",
        ("any launcher", "nobody to ask, and no --yes"): "No terminal and no --yes",
        ("any launcher", "plan does not fit"): "Out of memory, predicted",
        ("any launcher", "price limit without a known price"): "Price limit without a price",
        ("any launcher", "literal secret in launch.env"): "Token in the recipe",
    },
    "Runs": {
        ("any launcher", "run.id in use"): "Run id in use",
    },
    "Paths on the nodes": {
        ("kubernetes", "run folder on no volume"): "Run folder on no volume",
    },
    "Hugging Face hub": {
        ("Hugging Face hub", "gated model, and no token"): "Gated model without a token",
        ("Hugging Face hub", "offline, and nothing fetched before"): "Offline",
        ("Hugging Face hub", "folder for models without room"): "No room for the model",
    },
    "Kubernetes": {
        ("kubernetes", "unknown context"): "Unknown context",
        ("kubernetes", "API server down"): "API server does not answer",
        ("kubernetes", "image not given"): "No image",
        ("kubernetes", "secret where no pod can read it"): "Secret that pods cannot read",
    },
    "AWS Batch": {
        ("aws-batch", "queue missing"): "Unknown queue",
        ("aws-batch", "queue too small"): "Queue too small",
        ("aws-batch", "no right to submit"): "No permission to submit",
    },
    "Import": {
        ("import", "a key that this version does not know"): "Unknown key",
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
