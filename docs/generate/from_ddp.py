"""The tables of docs/from-ddp.md: habits of other frameworks' scripts, from the tested rows."""

from tests.library.habits import HABITS, Habit

_HEADS = {
    "DDP": ("each rank holds the whole model", "ranks share the parameters"),
    "FSDP2": ("here",),
    "accelerate": ("here",),
    "DeepSpeed": ("here",),
}


def tables() -> dict[str, str]:
    """Framework -> its table in Markdown."""
    return {name: _table(_HEADS[name], rows) for name, rows in HABITS.items()}


def _table(heads: tuple[str, ...], rows: tuple[Habit, ...]) -> str:
    lines = [f"| in the script | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for row in rows:
        cells = [row.sharded] if row.whole is None else [row.whole, row.sharded]
        lines.append(f"| {row.script} | {' | '.join(each.cell for each in cells)} |")
    return "\n".join(lines) + "\n"
