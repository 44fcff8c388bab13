"""The file of a first recipe: YAML, with what the plan says of it in its comments."""

import shlex
from pathlib import Path
from textwrap import wrap

from shardyard.config.load import dump_recipe
from shardyard.control.init import Planned, RecipeDraft
from shardyard.errors import RequestError, StorageError
from shardyard.io.yaml import read_yaml, write_yaml
from shardyard.planner.format import candidate_name, headline, settings_of
from shardyard.planner.layouts import Candidate, speed_reason
from shardyard.units import format_count

_WIDTH = 100
_ORDER = ("model", "task", "data", "run", "cluster", "parallel", "optim", "memory", "launch")

_SHOWN_AUTOS = ("data.seq_len", "optim.global_batch", "optim.lr", "precision.compute")
"""Settings that decide most of a training and were not asked."""

TO_FILL_IN = {
    "slurm": (
        "slurm: {partition: my-partition, account: me}     # where the cluster has no defaults",
        "time_limit: 24h                                   # the run drains before, and can resume",
    ),
    "kubernetes": (
        "image: registry.example/shardyard@sha256:0123     # shardyard image build, and push",
        "run_dir: /shared/runs                             # on a volume: it outlives the pods",
        "volumes: [{path: /shared, claim: shared}]",
        "kubernetes: {context: my-cluster}",
    ),
    "aws-batch": (
        "image: registry.example/shardyard@sha256:0123     # shardyard image build, and push",
        "run_dir: /shared/runs                             # on a volume: it outlives the job",
        "volumes: [{path: /shared, efs: fs-0123456789abcdef0}]",
        "aws_batch: {queue: gpu}",
    ),
    "ssh": (
        "ssh: {hosts: [gpu1, me@gpu2]}                     # rank 0 first; or hostfile: hosts.txt",
    ),
}
"""Launcher -> values that only the user knows, as lines of the section `launch`, by example."""


def text_of(draft: RecipeDraft, *, today: str) -> str:
    """The whole file.

    Args:
        today: When it was predicted; prices and the planner change.
    """
    content = read_yaml(dump_recipe(draft.recipe), source="the draft")
    if draft.launcher in TO_FILL_IN:
        content.setdefault("launch", {})
    order = [name for name in _ORDER if name in content]
    order += [name for name in content if name not in _ORDER]
    lines = [*_header(draft, today), *_autos(draft), *_advice(draft)]
    for section in order:
        lines += _comments_on(section, draft)
        lines += _section(section, content[section])
        if section == "launch" and draft.launcher in TO_FILL_IN:
            lines += [f"  # {line}" for line in TO_FILL_IN[draft.launcher]]
    return "\n".join(lines) + "\n"


def commands_of(draft: RecipeDraft) -> list[str]:
    """What to type next, in order."""
    file = shlex.quote(str(draft.file))
    if draft.launcher is None:
        train = f"shardyard train {file}"
        return [train] if draft.is_generic else [f"shardyard plan {file}", train]
    on = f"{file} --on {draft.launcher}"
    return [
        *([] if draft.is_generic else [f"shardyard plan {file} --details"]),
        f"shardyard launch {on} --dry-run",
        f"shardyard prepare {on}",
        f"shardyard launch {on}",
    ]


def write(draft: RecipeDraft, *, today: str, is_forced: bool) -> None:
    """Write the file.

    Args:
        is_forced: Whether one that is there is written over.

    Raises:
        RequestError: There is one.
        StorageError: The folder cannot be written.
    """
    try:
        with draft.file.open("w" if is_forced else "x", encoding="utf-8") as file:
            file.write(text_of(draft, today=today))
    except FileExistsError as error:
        raise RequestError(exists_already(draft.file)) from error
    except OSError as error:
        raise StorageError(
            f"{draft.file} cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and is yours: `shardyard init FILE`."
        ) from error


def exists_already(file: Path) -> str:
    """Why a file is not written."""
    return (
        f"{file} exists already. Name another one, `shardyard init FILE`, or write over it with "
        "--force."
    )


def _header(draft: RecipeDraft, today: str) -> list[str]:
    recipe, planned = draft.recipe, draft.planned
    model = recipe.model.preset or recipe.model.hub or recipe.model.path
    machines = "this machine"
    if planned is not None:
        machines = planned.plan.devices_words()
    elif draft.launcher is not None:
        machines = f"{recipe.cluster.nodes} x {draft.machines}"
    lines = _comment(f"{model} learns {recipe.data.source} on {machines}.")
    lines += ["#", *(f"#   {command}" for command in commands_of(draft)), "#"]
    if planned is None:
        why = f"No prediction: {draft.no_plan_reason}"
        again = "" if draft.is_generic else " `shardyard plan` tries again."
        return [*lines, *_comment(f"{why}{again}")]
    lines += _comment(f"What `shardyard plan` predicts, {today} (docs/accuracy.md: how well):")
    rows = [row for row in headline(planned.plan) if row[1:] != ("", "")]
    wide, middle = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, reason in rows:
        lead = f"  {name:<{wide}}  {value:<{middle}}  "
        lines += _comment(f"{lead}{reason}", indent=" " * len(lead))
    return lines


def open_issues(draft: RecipeDraft) -> list[str]:
    """List what to fix before it runs, and what may go wrong."""
    return [*draft.errors(), *([] if draft.planned is None else _risks(draft.planned))]


def _advice(draft: RecipeDraft) -> list[str]:
    found = open_issues(draft)
    lines = ["#", "# Look at:"] if found else []
    for problem in found:
        lines += _comment(f"  - {problem}", indent="    ")
    return lines


def _risks(planned: Planned) -> list[str]:
    plan, found = planned.plan, []
    if plan.fits == "tight":
        found.append(
            f"memory is tight: {plan.fits_reason}. Less is taken by memory.recompute=full, a "
            "smaller optim.micro_batch or more nodes."
        )
    if plan.speed.tokens_per_s is None:
        found.append(f"no speed is predicted: {plan.speed.reason}. The first steps show it.")
    if not plan.advances:
        found.append(plan.failures_reason)
    outlook = plan.failures
    if outlook is not None and outlook.expected_failures >= 1:
        found.append(
            f"{outlook.expected_failures:.2g} failures are expected: "
            f"checkpoint.every={outlook.best_interval_steps} loses least time."
        )
    return found


def _comments_on(section: str, draft: RecipeDraft) -> list[str]:
    """Why a section is as it is."""
    planned = draft.planned
    if planned is None:
        return []
    plan = planned.plan
    match section:
        case "model":
            return _comment(f"{format_count(plan.parameters)} parameters.")
        case "run":
            return _on_length(draft, planned)
        case "parallel":
            return _on_layout(planned)
    return []


def _on_length(draft: RecipeDraft, planned: Planned) -> list[str]:
    plan = planned.plan
    if plan.steps is None or plan.tokens is None:
        return _comment(f"Steps: {planned.preview.steps_reason}; known once the data is prepared.")
    asked = f"As many steps as {draft.length} allow: " if draft.length else ""
    return _comment(
        f"{asked}{plan.steps:,} steps of {plan.samples_per_step:,} samples x {plan.seq_len:,} "
        f"tokens, {format_count(plan.tokens)} tokens in all."
    )


def _on_layout(planned: Planned) -> list[str]:
    """The layout with its reason, what else was ranked, and what is left to auto."""
    found = planned.search_result
    if found is None:
        return []
    first, *others = found.best
    which = f"{found.fitting or found.more_fitting:,} that fit" if found.fits else "the tight ones"
    lines = _comment(f"{candidate_name(first)}: the fastest of {which}. {speed_reason(first)}.")
    for other in others:
        lines += _comment(f"  next: {_ranked(other)}", indent="    ")
        lines += _comment(f"    {' '.join(settings_of(other))}", indent="    ")
    return lines


def _ranked(candidate: Candidate) -> str:
    full = f"{candidate.device_bytes / candidate.limit_bytes:.0%} full"
    return f"{format_count(candidate.tokens_per_s)} tokens/s, {full}, {candidate_name(candidate)}"


def _autos(draft: RecipeDraft) -> list[str]:
    """List the settings that were not asked and decide much, with their reasons."""
    if draft.planned is None:
        return []
    preview, lines = draft.planned.preview, ["#", "# Left to auto, which becomes:"]
    for name in _SHOWN_AUTOS:
        if name in preview.reasons:
            section, _, key = name.partition(".")
            value = getattr(getattr(preview.recipe, section), key)
            lines += _comment(f"  {name}={value}: {preview.reasons[name]}", indent="    ")
    return lines


def _section(name: str, content: object) -> list[str]:
    return write_yaml({name: content}).splitlines() if content else [f"{name}:"]


def _comment(text: str, *, indent: str = "") -> list[str]:
    """Comment lines of a paragraph; its first line keeps the spaces that it begins with."""
    lead = text[: len(text) - len(text.lstrip())]
    lines = wrap(
        text.strip(), _WIDTH - 2, initial_indent=lead, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [f"# {line}" for line in lines]
