"""docs/errors.md: what can go wrong when launching, from the table that a test makes happen."""

from tests.launchers.wrong_situations import all_situations

_HEAD = """# Errors and their messages

Made from the table that `tests/launchers/test_wrong_situations.py` makes happen, one by one,
through the command line: each with its exit code, words that its message has, and words of the
next step that it names. After each one nothing is left outside that the run's ledger does not name.
Exit codes: 0 done, 1 the run failed or the doctor found a problem, 2 the request is wrong, 3 not
available now, 4 no permission, 75 a node was lost and a restart may continue, 130 interrupted, 143
saved, stopped and resumable.
"""


def page() -> str:
    """The whole page."""
    rows = list(all_situations())
    lines = [_HEAD]
    for launcher in dict.fromkeys(name for name, _ in rows):
        lines.append(f"## {launcher}\n")
        lines += ["| situation | exit code | it says | and what to do |", "|---|---|---|---|"]
        for name, row in rows:
            if name == launcher:
                says, do = _cell(row.says), _cell(row.do) or "nothing"
                lines.append(f"| {row.what} | {row.exit_code} | {says} | {do} |")
        lines.append("")
    return "\n".join(lines)


def _cell(words: str) -> str:
    """Words of a message as a cell shows them; they may end inside of a command."""
    return words.replace("|", "\\|") + "`" * (words.count("`") % 2)
