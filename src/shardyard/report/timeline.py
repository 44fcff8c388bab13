"""The events of a run in words, at most as many as a person reads."""

from shardyard.report.run_data import Line, RunRecord
from shardyard.units import format_bytes, format_seconds

MAX_EVENTS = 120

_FREQUENT = (
    "checkpoint_started",
    "checkpoint_durable",
    "checkpoint_uploaded",
    "evaluated",
    "generated",
    "spent",
)


def timeline(record: RunRecord) -> tuple[list[Line], int]:
    """Events in order of time, and how many frequent ones were left out to keep it readable."""
    events = sorted(
        (event for attempt in record.attempts for event in attempt.events),
        key=lambda event: event["t"],
    )
    if len(events) <= MAX_EVENTS:
        return events, 0
    rare = [event for event in events if event["kind"] not in _FREQUENT]
    return rare, len(events) - len(rare)


def describe(event: Line) -> str:
    """Describe the event in a few words; empty where its kind is enough."""
    fields = {key: value for key, value in event.items() if value is not None}
    kind = fields["kind"]
    if kind in ("attempt_started", "rendezvous"):
        return _describe_workers(fields)
    if kind in ("worker_lost", "device_problem", "device_well", "program_error"):
        return _describe_problem(fields)
    if kind == "worker_hung":
        who = "all ranks" if fields.get("rank") is None else f"rank {fields['rank']}"
        return f"{who} on {fields.get('node', '?')}: {fields.get('reason', 'reason not known')}"
    if kind in ("node_lost", "node_left_out"):
        return f"{fields.get('node', '?')}: {fields.get('cause', 'cause not known')}"
    if kind == "straggler":
        return _describe_straggler(fields)
    if kind == "slow_link":
        return _describe_link(fields)
    if kind == "model_ready" and "seconds" in fields:
        count = "" if fields.get("parameters") is None else f"{fields['parameters']:,} parameters, "
        return f"{count}{format_seconds(fields['seconds'])}"
    if kind in ("checkpoint_loaded", "snapshot_restored"):
        return f"step {fields.get('step', '?')}, {format_seconds(fields.get('seconds', 0.0))}"
    if kind in ("snapshot_interval", "checkpoint_interval"):
        return describe_interval(fields)
    if kind == "checkpoint_started":
        return (
            f"step {fields.get('step', '?')}, blocked {format_seconds(fields.get('blocked_s', 0))}"
        )
    if kind == "checkpoint_durable":
        size, seconds = format_bytes(fields.get("bytes", 0)), fields.get("seconds", 0.0)
        return f"step {fields.get('step', '?')}, {size} in {format_seconds(seconds)}"
    if kind == "evaluated":
        return f"step {fields.get('step', '?')}, loss {fields.get('loss', float('nan')):.4f}"
    if kind == "run_finished":
        loss = fields.get("loss")
        why = ", run.patience ended" if fields.get("is_out_of_patience") else ""
        return f"step {fields.get('step', '?')}" + (f", loss {loss:.4f}" if loss else "") + why
    if kind == "attempt_ended":
        return (
            f"exit code {fields.get('exit_code', '?')}: {fields.get('reason', 'no reason given')}"
        )
    return _describe_rest(fields)


def _describe_problem(fields: Line) -> str:
    """Describe a problem of a rank, of a device, or of a node's network."""
    node, cause = fields.get("node", "?"), fields.get("cause", "cause not known")
    if "device" in fields:
        return f"device {fields['device']} on {node}: {cause}"
    if "problem" in fields:
        return f"{node}: {cause}"
    return f"rank {fields.get('rank', '?')} on {node}: {cause}"


def _describe_straggler(fields: Line) -> str:
    who = f"rank {fields.get('rank', '?')} on {fields.get('node', '?')}"
    over = ", no longer a straggler" if fields.get("is_over") else ""
    if fields.get("what") == "stopped":
        if over:
            return f"{who}: its process is stopped no more"
        share = fields.get("stopped_share", 0.0)
        return f"{who}: its process is stopped now and then, {share:.0%} of the time"
    over = ", so since the start" if fields.get("is_since_start") else over
    does = "computes and waits for samples" if fields.get("what") == "data" else "computes"
    held_up = " on average, held up now and then" if fields.get("is_held_up") else ""
    mine = f"{format_seconds(fields.get('compute_s', 0.0))} a step{held_up}"
    return f"{who}: {does} {mine}, its peers {format_seconds(fields.get('peers_s', 0.0))}{over}"


def _describe_link(fields: Line) -> str:
    ranks, nodes = fields.get("ranks") or ["?"], fields.get("nodes") or ["?"]
    took_s, peers_s = fields.get("exchange_s", 0.0), fields.get("peers_s", 0.0)
    over = ", no longer slow" if fields.get("is_over") else ""
    over = ", so since the start" if fields.get("is_since_start") else over
    return (
        f"link of {len(ranks)} ranks from {ranks[0]} to {ranks[-1]} on {', '.join(nodes[:4])}"
        f"{', ...' if len(nodes) > 4 else ''}: collectives take {format_seconds(took_s)} a step, "
        f"those of its peers {format_seconds(peers_s)}{over}"
    )


def describe_interval(fields: Line) -> str:
    """Describe the new interval between snapshots or checkpoints, and its reason."""
    return (
        f"every {fields.get('every', 0):,} steps: one stops training for "
        f"{format_seconds(fields.get('blocked_s', 0.0))}, and failures come "
        f"{format_seconds(fields.get('mtbf_s', 0.0))} apart"
    )


def _describe_workers(fields: Line) -> str:
    workers = fields.get("workers") or []
    nodes = sorted({str(worker.get("node")) for worker in workers})
    words = f"{fields.get('world_size', len(workers))} processes"
    if nodes:
        words += f" on {', '.join(nodes[:4])}" + (", ..." if len(nodes) > 4 else "")
    return words


def _describe_rest(fields: Line) -> str:
    if fields["kind"] in ("router_collapsed", "callback_failed"):
        return str(fields.get("reason", "reason not known"))
    if fields["kind"] == "not_sent":
        return f"{fields.get('service', '?')}: {fields.get('reason', 'reason not known')}"
    if fields["kind"] == "tracked":
        return f"{fields.get('service', '?')}: {fields.get('address', '?')}"
    skipped = ("t", "kind", "attempt", "generation")
    words = []
    for key, value in fields.items():
        if key in skipped or isinstance(value, dict | list):
            continue
        shown = f"{value:,}" if isinstance(value, int) else str(value)
        if key == "seconds":
            shown = format_seconds(value)
        words.append(shown if key == "seconds" else f"{key.replace('_', ' ')} {shown}")
    return ", ".join(words)
