"""docs/verbs.md: all verbs of the command line in their groups, each with an example."""

from shardyard.cli import _EXAMPLES as EXAMPLES
from shardyard.cli import _EXIT_CODES as EXIT_CODES
from shardyard.cli import _GROUPS as GROUPS

HEAD = """\
# All verbs

`shardyard VERB --help` shows options, an example and exit codes.
"""

TAIL = r"""## Shell completion (TAB)

Complete commands, options, run ids, recipe files and settings with TAB in bash, zsh and fish. Add
one line to your shell's startup file:

| shell | line | file |
|---|---|---|
| bash, 4.4 or newer | `eval "$(_SHARDYARD_COMPLETE=bash_source shardyard)"` | `~/.bashrc` |
| zsh, after `compinit` | `eval "$(_SHARDYARD_COMPLETE=zsh_source shardyard)"` | `~/.zshrc` |
| fish | `_SHARDYARD_COMPLETE=fish_source shardyard \| source` | `~/.config/fish/config.fish` |

The shell must find `shardyard`: activate its environment, or write its whole path in the line.

For example, `shardyard train recipe.yaml optim.<TAB>` lists the optimizer settings. TAB also offers
values (`optim.name=`, `model.preset=`, `cluster.instance=`, `run.target.` and others), files of
this machine (`data.source=`), and run ids, newest first. Settings of installed
[plug-ins](plug-ins.md) are included. Without any offer, run the line to see its error.
"""


SECTIONS = {
    "chat": ("evaluate", "chat"),
    "logs": ("status", "logs"),
    "scale": ("resume", "scale"),
    "teardown": ("cancel", "teardown"),
    "top": ("status", "top"),
    "watch": ("status", "watch"),
}
"""Verb without a page of its own -> verb whose page has it, and the section there."""


def verb_page(verb: str) -> str:
    """The page that has a verb, from the folder of docs."""
    return "launch.md" if verb == "launch" else f"verbs/{SECTIONS.get(verb, (verb,))[0]}.md"


def _link(verb: str) -> str:
    section = f"#{SECTIONS[verb][1]}" if verb in SECTIONS else ""
    return f"{verb_page(verb)}{section}"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, verbs in GROUPS.items():
        rows = (
            f"| [`{verb}`]({_link(verb)}) | {does.rstrip('.')} | `{EXAMPLES[verb]}` |\n"
            for verb, does in verbs.items()
        )
        parts.append(f"## {heading}\n\n| verb | does | example |\n|---|---|---|\n{''.join(rows)}")
    codes = EXIT_CODES.removeprefix("Exit codes: ").rstrip(".")
    parts.append(f"## Exit codes\n\n{codes}. [Errors and what to do](errors.md).\n")
    parts.append(TAIL)
    return "\n".join(parts)
