"""TAB in real shells, each in a terminal of its own."""

import re
import sys
from pathlib import Path

import pytest

from tests.debian_packages import need
from tests.terminal import terminal

SETUP = {
    "bash": ['eval "$(_SHARDYARD_COMPLETE=bash_source shardyard)"', "bind 'set bell-style none'"],
    "zsh": [
        "autoload -U compinit; compinit -u",
        'eval "$(_SHARDYARD_COMPLETE=zsh_source shardyard)"',
    ],
    "fish": ["_SHARDYARD_COMPLETE=fish_source shardyard | source"],
}
COMMANDS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
FOLDER = ("runs/alpha/recipe.yaml", "my-recipe.yaml", "my-text.jsonl")
COMPLETED = [
    ("shardyard pl\t", "shardyard plan"),
    ("shardyard plan my-r\t", "shardyard plan my-recipe.yaml"),
    ("shardyard plan optim.na\tadam\trun.steps=3", "shardyard plan optim.name=adamw run.steps=3"),
    ("shardyard plan run.target.lo\t2.5", "shardyard plan run.target.loss=2.5"),
    ("shardyard train data.source=my-t\t", "shardyard train data.source=my-text.jsonl"),
    ("shardyard status a\t", "shardyard status alpha"),
    ("shardyard launch x.yaml --on sl\t", "shardyard launch x.yaml --on slurm"),
]
"""Keys -> the line that they make."""
TO_THE_BEGINNING = "\x01"


PACKAGES = ("zsh", "fish")
"""Of Debian; bash is everywhere."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bash", marks=pytest.mark.heavy),
        *(pytest.param(name, marks=pytest.mark.system) for name in PACKAGES),
    ],
)
def test_tab_completes_in_a_shell(name: str, tmp_path: Path) -> None:
    if name in PACKAGES:
        need(name)
    for path in FOLDER:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}\n")
    programs = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = {"PATH": programs, "TERM": "xterm", "HOME": str(tmp_path), "PS1": "$ "}
    with terminal(COMMANDS[name], folder=tmp_path, environ=environ) as shell:
        for line in [*SETUP[name], "echo rea''dy"]:
            shell.type(f"{line}\n")
        shell.wait(r"\nready")
        for keys, line in COMPLETED:
            shell.type(f"{keys}{TO_THE_BEGINNING}echo it is \n")
            shell.wait(rf"\nit is {re.escape(line)} *\n")
