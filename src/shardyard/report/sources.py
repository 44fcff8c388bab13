"""Of a mixture: what was read of each source, and how well its held-out text is predicted."""

from shardyard.config.mixture import SLOTS
from shardyard.report.format import ABSENT, format_nats
from shardyard.report.markup import esc, render_section, render_table
from shardyard.report.run_data import RunRecord


def sources_section(record: RunRecord) -> str:
    """A table with a row a source; nothing if there was one source."""
    resolved = record.resolved
    if resolved is None or not resolved.data.parts:
        return ""
    seq_len = int(resolved.recipe.data.seq_len)
    last = record.steps[-1] if record.steps else {}
    # samples, as tokens leave padding out; phases have samples of several lengths
    samples = (last.get("tokens") or 0) // seq_len if resolved.phases else last.get("samples") or 0
    newest = record.evaluations[-1].get("eval_sources", {}) if record.evaluations else {}
    rows = [
        (
            esc(part.name),
            f"{part.slots / SLOTS:.1%}",
            f"{part.data.train_tokens:,}",
            f"{part.passes(samples, seq_len):.2f}",
            format_nats(newest[part.name].get("loss")) if part.name in newest else ABSENT,
        )
        for part in resolved.data.parts
    ]
    names = ["source", "#share of the samples", "#tokens", "#times read", "#held-out loss"]
    table = render_table(names, rows)
    return render_section("sources", "Sources", f'<div class="card">{table}</div>')
