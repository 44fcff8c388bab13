"""Profiles of a run as rows and words: the verb, the page and report.md show the same."""

from shardyard.report.format import ABSENT, format_percent
from shardyard.rundir.profiles import ProfileTerm, StepProfile
from shardyard.units import format_bytes, format_seconds

HEADS = ("term", "predicted", "measured", "share", "lowest", "highest", "what")


def profile_rows(profile: StepProfile) -> list[tuple[str, ...]]:
    """The table: where a step's time went, by the plan's terms. The last row is their sum."""
    rows = [_row(term, profile) for term in profile.terms]
    predicted = [term.predicted_s for term in profile.terms if not term.is_part]
    known = [seconds for seconds in predicted if seconds is not None]
    total = format_seconds(sum(known)) if known else ABSENT
    rows.append(("a step", total, format_seconds(profile.step_s), "100 %", "", "", ""))
    return rows


def profile_words(profile: StepProfile) -> str:
    """What was profiled and what that cost, in one paragraph."""
    last = profile.step + profile.steps - 1
    which = f"step {profile.step}" if profile.steps == 1 else f"steps {profile.step} to {last}"
    ranks = "1 rank" if len(profile.ranks) == 1 else f"{len(profile.ranks)} ranks"
    before = "no step came before to compare with"
    if profile.usual_s is not None and profile.slowdown is not None:
        change = f"{abs(profile.slowdown):.0%} {'longer' if profile.slowdown >= 0 else 'shorter'}"
        before = f"{change} than the {format_seconds(profile.usual_s)} of those before"
    told = (
        f"{which[0].upper()}{which[1:]} on {ranks} of {profile.world_size}: "
        f"{format_seconds(profile.step_s)} a step, {before}. The run stood still for "
        f"{format_seconds(profile.stood_still_s)}; the traces have "
        f"{format_bytes(profile.trace_bytes)}."
    )
    gaps = "; ".join(f"rank {rank}: {why}" for rank, why in profile.missing.items())
    return f"{told} No trace of {gaps}." if gaps else told


def _row(term: ProfileTerm, profile: StepProfile) -> tuple[str, ...]:
    several = len(profile.ranks) > 1
    share = format_percent(term.measured_s / profile.step_s) if profile.step_s else ABSENT
    return (
        f"- {term.name}" if term.is_part else term.name,
        ABSENT if term.predicted_s is None else format_seconds(term.predicted_s),
        format_seconds(term.measured_s),
        share,
        f"{format_seconds(term.lowest_s)} (rank {term.lowest_rank})" if several else "",
        f"{format_seconds(term.highest_s)} (rank {term.highest_rank})" if several else "",
        term.reason,
    )
