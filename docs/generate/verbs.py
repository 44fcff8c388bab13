"""docs/verbs.md: all verbs of the command line in their groups, each with an example."""

from shardyard.cli import _EXAMPLES as EXAMPLES
from shardyard.cli import _EXIT_CODES as EXIT_CODES
from shardyard.cli import _GROUPS as GROUPS

HEAD = """\
# All verbs

`shardyard VERB --help` shows options, an example and exit codes. Each verb also has a page.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for heading, verbs in GROUPS.items():
        rows = (
            f"| [`{verb}`](verbs/{verb}.md) | {does.rstrip('.')} | `{EXAMPLES[verb]}` |\n"
            for verb, does in verbs.items()
        )
        parts.append(f"## {heading}\n\n| verb | does | example |\n|---|---|---|\n{''.join(rows)}")
    codes = EXIT_CODES.removeprefix("Exit codes: ").rstrip(".")
    parts.append(f"## Exit codes\n\n{codes}. [Errors and what to do](errors.md).\n")
    return "\n".join(parts)
