"""The table of docs/launch-slurm.md: options of sbatch that a recipe may add."""

from shardyard.config.rules.slurm_options import ALLOWED


def table() -> str:
    """A Markdown table: a row an option."""
    lines = ["| option | example | means | side jobs too |", "|---|---|---|---|"]
    for name, option in ALLOWED.items():
        too = "yes" if option.of_side_jobs else ""
        lines.append(f"| `{name}` | `{option.example}` | {option.what} | {too} |")
    return "\n".join(lines) + "\n"
