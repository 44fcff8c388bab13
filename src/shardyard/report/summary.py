"""The numbers of a report, computed once: the page, the Markdown and ``--json`` print the same."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from shardyard.config.tasks import BITS_PER_BYTE
from shardyard.report.against_plan import (
    PlanRow,
    against_plan,
    steady,
)
from shardyard.report.attempts import AttemptResult, RanksPace, main_lines, paces, results
from shardyard.report.cost import RunCost, cost_of
from shardyard.report.health import Health, health_of
from shardyard.report.next_steps import Command, Lever, commands, findings
from shardyard.report.run_data import Line, RunRecord
from shardyard.report.walltime import (
    EFFECTIVE_DEFINITION,
    WAITING,
    AttemptTime,
    account,
    effective_share,
    total_phases,
    trained_s,
)
from shardyard.rundir.network import ObservedNetwork, network_of
from shardyard.units import format_count, format_seconds

Suggest = Callable[[RunRecord, float], Sequence[Lever]]
"""From a run and its measured step time in seconds to levers, the best first."""


def no_levers(_record: RunRecord, _step_time_s: float) -> tuple[Lever, ...]:
    """Plan none."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Main facts of a run. None: not measured, or it has no meaning here."""

    run_id: str
    state: str
    """A word of `rundir/state.py`."""
    state_reason: str
    steps_done: int
    steps_planned: int | None
    unit: str
    """Unit of the counts: tokens, or images."""
    loss_unit: str
    """Unit of the losses, in words."""
    tokens: int | None
    """Tokens read so far, as the metrics count them."""
    loss: float | None
    """Loss of the last step, nats per token or image."""
    skipped_steps: int
    """Measured steps that were not applied because they were not finite."""
    loss_scale: float | None
    """Loss scale of the last step in fp16."""
    eval_loss: float | None
    scores: dict[str, float | None]
    """Other metrics of that evaluation, by name."""
    unigram_entropy: float | None
    """Nats per token of a model that only knows how frequent each token is."""
    best_eval_loss: float | None
    tokens_per_s: float | None
    """Median of all ranks together, over the steps of the first of ``paces``."""
    step_time_s: float | None
    """Median of the same steps."""
    paces: tuple[RanksPace, ...]
    """Speed by number of ranks, the one with most steps first."""
    mfu: dict[str, float] | None
    """0 to 1, by FLOP convention."""
    mfu_note: str
    """Peak and source, or why there is no MFU."""
    peak_memory_bytes: int | None
    """Highest known peak of any rank in any attempt."""
    world_size: int | None
    """Ranks of the last step."""
    wall_s: float
    """From the start of the first attempt to the end of the last."""
    running_s: float
    """Wall time without the waits between attempts."""
    between_s: float
    """Waits between attempts."""
    trained_s: float
    """Seconds in steps whose result counts, with their data wait."""
    attempts: tuple[AttemptTime, ...]
    results: tuple[AttemptResult, ...]
    """Result of each of ``attempts``."""
    phases: dict[str, float]
    effective_share: float | None
    """``trained_s`` / ``running_s`` (ETTR)."""
    effective_share_predicted: float | None
    """By the plan; None: it could not tell failures or speed."""
    restarts: int
    """Losses of processes that a new generation followed."""
    data_limit: str
    """Reason why steps waited for samples that could come no quicker; empty: none found."""
    health: Health
    comparisons: tuple[PlanRow, ...]
    network: ObservedNetwork | None
    """Network used between nodes; None: one node, or not reported."""
    trackers: dict[str, str]
    """Name of a tracker that the run was sent to -> where it shows the run."""
    tags: dict[str, str]
    """``run.tags`` of the newest attempt."""
    started_from: str | None
    """Run and step whose weights it started from (``run.from``)."""
    cost: RunCost | None
    """None: no price of its machines was known."""
    levers: tuple[Lever, ...]
    """Changes of settings that make a step faster by the plan, the best first."""
    findings: tuple[str, ...]
    """Sentences on data wait, communication and memory beyond their thresholds."""
    commands: tuple[Command, ...]
    """Commands to copy."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; each comparison with its error, each attempt with its result."""
        content = asdict(self)
        del content["results"]
        attempts = [
            {**asdict(time), **asdict(result)}
            for time, result in zip(self.attempts, self.results, strict=True)
        ]
        rows = [{**asdict(row), "error": row.error} for row in self.comparisons]
        cost = None if self.cost is None else self.cost.to_json()
        return {**content, "attempts": attempts, "comparisons": rows, "cost": cost}

    def effective_words(self) -> str:
        """Describe the effective share, measured and predicted, with its definition."""
        measured, predicted = self.effective_share, self.effective_share_predicted
        if measured is None:
            return ""
        plan = "not predicted" if predicted is None else f"{predicted:.1%} predicted"
        return (
            f"Effective share: {measured:.1%} ({plan}). {EFFECTIVE_DEFINITION} {self.data_limit}"
        ).rstrip()

    def steps_words(self) -> str:
        """``620 of 630 steps on 2 ranks``: the steps that the median step time is of."""
        if not self.paces:
            return "no step was measured"
        pace, total = self.paces[0], sum(each.steps for each in self.paces)
        ranks = f"{pace.ranks or 1} rank{_s(pace.ranks or 1)}"
        if len(self.paces) == 1:
            return f"{total:,} step{_s(total)} on {ranks}"
        return f"{pace.steps:,} of {total:,} steps on {ranks}"

    def sentence(self) -> str:
        """The run in words."""
        planned = "" if self.steps_planned is None else f" of {self.steps_planned:,}"
        words = [f"{self.state.capitalize()}: {self.steps_done:,}{planned} steps"]
        if self.tokens:
            words.append(f", {format_count(self.tokens)} {self.unit}s")
        what = "running time" if self.between_s else "wall time"
        words.append(f", in {format_seconds(self.running_s)} of {what}")
        if len(self.attempts) > 1 or self.restarts:
            count = len(self.attempts)
            words.append(
                f" over {count} attempt{_s(count)} with {self.restarts} restart{_s(self.restarts)}"
            )
        if self.between_s:
            words.append(f"; another {format_seconds(self.between_s)} lie between the attempts")
        words.append(".")
        if self.started_from is not None:
            words.append(f" Started from the weights of {self.started_from}.")
        if self.network is not None:
            words.append(f" Nodes talked over {self.network.words}.")
        if self.skipped_steps or self.loss_scale is not None:
            skipped = f"{self.skipped_steps:,} step{'' if self.skipped_steps == 1 else 's'}"
            words.append(f" Skipped as not finite: {skipped}")
            if self.loss_scale is not None:
                words.append(f"; loss scale at the end {self.loss_scale:,.6g}")
            words.append(".")
        if self.eval_loss is not None:
            words.append(f" Validation loss {self.eval_loss:.3f} {self.loss_unit}")
            per_byte = self.scores.get(BITS_PER_BYTE)
            if per_byte is not None:
                words.append(f" ({per_byte:.3f} bits per byte)")
            if self.unigram_entropy:
                gap = self.unigram_entropy - self.eval_loss
                side = "below" if gap >= 0 else "above"
                words.append(
                    f", {abs(gap):.2f} {side} the unigram entropy of the corpus "
                    f"({self.unigram_entropy:.3f})"
                )
            words.append(".")
        return "".join(words)


def _s(number: int) -> str:
    return "" if number == 1 else "s"


def summarize(record: RunRecord, *, suggest: Suggest = no_levers) -> Summary:
    """Compute a report's numbers.

    Args:
        suggest: Plans the levers; ``control/suggestions.py`` has one that does.
    """
    last = record.steps[-1] if record.steps else {}
    evaluations = [line["eval"] for line in record.evaluations]
    newest_eval = evaluations[-1] if evaluations else {}
    losses = [line["loss"] for line in evaluations if line.get("loss") is not None]
    times = account(record)
    phases, attempts, by_ranks = total_phases(times), results(record, times), paces(record)
    wall_s, between_s = sum(time.seconds for time in times), phases.get(WAITING, 0.0)
    main = by_ranks[0] if by_ranks else None
    mfu, mfu_note = _mfu(record, main_lines(record, main))
    return Summary(
        run_id=record.run.run_id,
        state=record.state,
        state_reason=_state_reason(record),
        steps_done=last.get("step", 0),
        steps_planned=_steps_planned(record),
        unit=record.unit,
        loss_unit=record.loss_unit,
        tokens=last.get("tokens"),
        loss=last.get("loss"),
        skipped_steps=sum(line.get("grad_norm", 0.0) is None for line in record.steps),
        loss_scale=last.get("loss_scale"),
        eval_loss=newest_eval.get("loss"),
        scores={name: value for name, value in newest_eval.items() if name != "loss"},
        unigram_entropy=record.resolved.data.unigram_entropy if record.resolved else None,
        best_eval_loss=min(losses, default=None),
        tokens_per_s=None if main is None else main.tokens_per_s,
        step_time_s=None if main is None else main.step_time_s,
        paces=by_ranks,
        mfu=mfu,
        mfu_note=mfu_note,
        peak_memory_bytes=max((a.peak_memory_bytes or 0 for a in attempts), default=0) or None,
        world_size=last.get("world_size") or _world_size(record),
        wall_s=wall_s,
        running_s=wall_s - between_s,
        between_s=between_s,
        trained_s=trained_s(phases),
        attempts=tuple(times),
        results=attempts,
        phases=phases,
        effective_share=effective_share(phases),
        effective_share_predicted=_predicted_share(record),
        restarts=_restarts(record),
        data_limit=str((record.last("data_limit") or {}).get("reason", "")),
        health=health_of(record),
        comparisons=tuple(against_plan(record, times)),
        network=network_of(record.last("network") or {}),
        trackers=_trackers(record),
        tags=_tags(record),
        started_from=None if record.resolved is None else record.resolved.recipe.run.from_,
        cost=cost_of(record, times, last_step=_steps_planned(record)),
        levers=()
        if main is None or main.step_time_s is None
        else tuple(suggest(record, main.step_time_s)),
        findings=findings(record, main_lines(record, main)),
        commands=commands(record),
    )


def _predicted_share(record: RunRecord) -> float | None:
    outlook = None if record.plan is None else record.plan.failures
    return None if outlook is None else outlook.ettr


def _state_reason(record: RunRecord) -> str:
    """Return the reason for the state: its last attempt's final event, or the lack of one."""
    ended = record.latest.last("attempt_ended") if record.latest else None
    if record.state == "lost":
        return "its processes ended without a word, and no agent holds its lease"
    if record.state in ("running", "draining"):
        return "it continues; write the report again for newer numbers"
    return str((ended or {}).get("reason", ""))


def _mfu(record: RunRecord, lines: tuple[Line, ...]) -> tuple[dict[str, float] | None, str]:
    """MFU in both conventions, and the peak it refers to; or why there is none."""
    plan = record.plan
    if plan is None:
        return None, "plan.json is missing, so neither FLOP nor peak are known"
    if plan.peak.flops_per_s is None:
        return None, plan.peak.source
    full = _median(steady(lines, "mfu"))
    if full is None:
        return None, "no step was measured"
    flops = plan.flops_per_token
    note = f"of {plan.peak.flops_per_s / 1e12:,.0f} TFLOP/s a device ({plan.peak.source})"
    return {"full": full, "causal": full * flops["causal"] / flops["full"]}, note


def _trackers(record: RunRecord) -> dict[str, str]:
    told = record.all("tracked")
    return {str(event.get("service")): str(event.get("address")) for event in told}


def _tags(record: RunRecord) -> dict[str, str]:
    if record.script is not None:
        return record.script.tags
    return {} if record.resolved is None else record.resolved.recipe.run.tags


def _restarts(record: RunRecord) -> int:
    return sum(max(0, len(attempt.all("rendezvous")) - 1) for attempt in record.attempts)


def _world_size(record: RunRecord) -> int | None:
    rendezvous = record.last("rendezvous") or record.last("attempt_started") or {}
    return rendezvous.get("world_size")


def _steps_planned(record: RunRecord) -> int | None:
    """The step at which it ends, on as many devices as it had last."""
    ready = record.last("model_ready")
    if ready is not None and "last_step" in ready:
        return int(ready["last_step"])
    return None if record.resolved is None else record.resolved.steps


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
