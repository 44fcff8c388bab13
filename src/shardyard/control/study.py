"""`shardyard study`: what one recipe becomes on each number of nodes, and what is planned of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.config.cluster_choice import devices_of_node
from shardyard.config.formulas import first_batch
from shardyard.config.load import Source
from shardyard.config.schema.recipe import Recipe
from shardyard.control.plan import Prediction, predict
from shardyard.control.request import Request
from shardyard.control_groups import usable_cores
from shardyard.errors import RequestError
from shardyard.hardware.machine import probe
from shardyard.launchers.base import Launcher
from shardyard.report.study.forecast import row_of
from shardyard.report.study.rows import Hold, ScalingSeries, SeriesRow

STEPS = 60
"""Default steps of each size: 6 warm up, and 9 stretches of 6 make an interval."""

THREADS = "OMP_NUM_THREADS"
"""Threads of a process on a CPU."""

_NAME_CHARACTERS = 28
"""Most characters of a study's id, so that ids of its runs stay within 63 characters."""

_MEASURED_LENGTH = (
    "run.tokens=null", "run.samples=null", "run.epochs=null", "run.target=null",
    "task.eval_every_steps=null", "task.eval_every_epochs=null", "task.generate_tokens=0",
    "task.generate_every=end", "task.prompts=[]",
    "optim.warmup_steps=auto", "optim.warmup_share=null", "optim.warmup_epochs=null",
    "optim.decay_steps=auto",
    "elastic.min_nodes=auto", "elastic.max_nodes=auto", "elastic.leave_out_for=[]",
)  # fmt: skip
"""Settings that measure a size over its steps only, on the nodes that it is named after."""


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of a study, as the user gives them."""

    sizes: tuple[int, ...]
    """Numbers of nodes; on this machine, of devices or CPU processes."""
    extrapolated: tuple[int, ...] = ()
    """Sizes that are not measured."""
    hold: Hold | None = None
    """None: what the recipe holds."""
    steps: int = STEPS

    def __post_init__(self) -> None:
        both = sorted({*self.sizes} & {*self.extrapolated})
        if both:
            raise RequestError(
                f"--nodes and --extrapolate both name {', '.join(map(str, both))}. A size is "
                "measured or extrapolated: leave it out of one of them."
            )


@dataclass(frozen=True, kw_only=True)
class Study:
    """One recipe on several sizes."""

    id: str
    key: str
    """Key of what all sizes share, without the list of sizes: another key is another study."""
    folder: Path
    words: tuple[Source, ...]
    """Words of the recipe."""
    options: StudyOptions
    hold: Hold
    batch: int
    """Samples of a step: of each device, or of all, as it is held."""
    is_local: bool
    """Whether its sizes are devices, or processes, of this machine."""
    is_cpu: bool
    devices_per_node: int
    names_machines: bool
    """Whether the recipe says on what: then a speed may be predicted."""
    threads: int | None
    """Threads of each process at every size, if they are CPU processes of this machine."""
    run_samples: int | None
    """Samples of the run that the recipe asks for; None: unknown before the data is prepared."""
    run_epochs: float | None
    """Length of that run in passes over the data, where it is given so."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The smallest first."""
        return tuple(sorted(set(self.options.sizes)))

    def run_id(self, size: int, number: int = 1) -> str:
        """Return the id of a size's run, or of the next one if that failed."""
        again = "" if number == 1 else f"-try{number}"
        return f"{self.id}-n{size}{again}"

    def words_of(self, size: int) -> tuple[Source, ...]:
        """The recipe on so many nodes, with its batch; its length is the recipe's."""
        batch = (
            ("optim.global_batch=auto", f"optim.batch_per_device={self.batch}")
            if self.hold == "batch-per-device"
            else (
                "optim.batch_per_device=null", f"optim.global_batch={self.batch}",
                "optim.lr_scaling=none", "optim.lr_batch=null",
            )
        )  # fmt: skip
        return (*self.words, *_size_words(size, is_local=self.is_local, is_cpu=self.is_cpu), *batch)

    def measured_words(self, size: int) -> tuple[Source, ...]:
        """Return the words of a size's run for the measured steps only."""
        steps = self.options.steps
        length = (f"run.steps={steps}", f"checkpoint.every={steps}")
        threads = () if self.threads is None else (f"launch.env.{THREADS}={self.threads}",)
        return (*self.words_of(size), *_MEASURED_LENGTH, *length, *threads)

    def with_lengths(self, rows: Sequence[SeriesRow]) -> tuple[SeriesRow, ...]:
        """Rows that know the samples of an epoch and of the whole run, where one of them does."""
        epoch = next((row.epoch_samples for row in rows if row.epoch_samples), None)
        run = self.run_samples
        if run is None and epoch is not None and self.run_epochs is not None:
            run = round(self.run_epochs * epoch)
        return tuple(replace(row, epoch_samples=epoch, run_samples=run) for row in rows)

    def series(self, rows: Sequence[SeriesRow]) -> ScalingSeries:
        """All rows, with those that are extrapolated."""
        more = [
            SeriesRow(nodes=size, accelerators=size * self.devices_per_node, origin="extrapolated")
            for size in self.options.extrapolated
        ]
        return ScalingSeries(name=self.id, rows=self.with_lengths([*rows, *more]), hold=self.hold)

    def to_json(self) -> dict[str, Any]:
        """study.json: what a second call holds itself against."""
        return {
            "version": 1,
            "id": self.id,
            "key": self.key,
            "hold": self.hold,
            "batch": self.batch,
            "steps": self.options.steps,
            "threads": self.threads,
        }


def study_of(
    words: Sequence[Source],
    options: StudyOptions,
    launcher: Launcher | None,
) -> Study:
    """Settle what is held over all sizes of a run without phases, without creating anything.

    Args:
        launcher: Launcher that runs them; None: they are only planned.

    Raises:
        RequestError: The recipe is wrong, or cannot be studied as it is.
    """
    is_run = launcher is not None
    request = Request.read(
        words, to_train=is_run, needs_weights=False, only_looks=True,
        sees=None if launcher is None else launcher.node_paths,
    )  # fmt: skip
    recipe = request.recipe
    is_here = launcher is not None and launcher.capabilities.is_this_machine
    is_cpu = recipe.cluster.device == "cpu"
    if is_here and recipe.cluster.device == "auto":
        is_cpu = probe().device == "cpu"
    smallest = min(options.sizes)
    first = _resolve_recipe(words, _size_words(smallest, is_local=is_here, is_cpu=is_cpu), launcher)
    per_node = 1 if is_here else _devices(first)
    hold, batch = _resolve_hold(recipe, first, options, devices=smallest * per_node)
    as_written = request.preview()
    key = _key(request, hold=hold, batch=batch, steps=options.steps if is_run else None,
               on="" if launcher is None else launcher.name)  # fmt: skip
    name = str(as_written.recipe.run.name)[:_NAME_CHARACTERS]
    study_id = recipe.run.id or f"{name}-study-{key}"
    parent = Path(recipe.run.dir)
    run_samples, run_epochs = _length(recipe, as_written.recipe, as_written.steps)
    return Study(
        id=study_id,
        key=key,
        folder=parent.expanduser().resolve() / study_id,
        words=tuple(words),
        options=options,
        hold=hold,
        batch=batch,
        is_local=is_here,
        is_cpu=is_cpu,
        devices_per_node=per_node,
        threads=_threads(recipe, max(options.sizes)) if is_here and is_cpu else None,
        names_machines=recipe.cluster.instance is not None or recipe.cluster.file is not None,
        run_samples=run_samples,
        run_epochs=run_epochs,
    )


def planned_rows(study: Study) -> list[SeriesRow]:
    """The plan of every size; one that cannot be planned says why.

    Raises:
        RequestError: None of them can.
    """
    rows: list[SeriesRow] = []
    errors: list[RequestError] = []
    for size in study.sizes:
        try:
            rows.append(planned_row(predict(study.words_of(size), layouts=0)))
        except RequestError as error:
            errors.append(error)
            rows.append(failed_row(study, size, str(error)))
    if len(errors) == len(study.sizes):
        raise errors[0]
    return rows


def planned_row(prediction: Prediction) -> SeriesRow:
    """Return the row of one size; a size that does not fit has no forecast."""
    row = row_of(prediction.plan, prediction.workload, prediction.cluster)
    if prediction.plan.fits != "does not fit":
        return row
    return replace(
        row, origin="failed", forecast=None, note=f"it does not fit: {prediction.plan.fits_reason}."
    )


def failed_row(study: Study, size: int, reason: str) -> SeriesRow:
    """A size without any number."""
    devices = size * study.devices_per_node
    return SeriesRow(nodes=size, accelerators=devices, origin="failed", note=reason)


def add_forecasts(published: ScalingSeries, planned: Sequence[SeriesRow]) -> ScalingSeries:
    """Return published results with the plan of the same sizes.

    Raises:
        RequestError: A size of the plan is not in the table.
    """
    by_size = {row.accelerators: row for row in planned}
    sizes = {row.accelerators for row in published.rows}
    lacking = sorted(by_size.keys() - sizes)
    if lacking:
        raise RequestError(
            f"--table {published.name} has no row of {', '.join(map(str, lacking))} accelerators, "
            f"which --nodes asks for; it has {', '.join(map(str, sorted(sizes)))}. Ask for those."
        )
    rows = tuple(
        replace(
            row,
            forecast=by_size[row.accelerators].forecast,
            usd_per_hour=row.usd_per_hour or by_size[row.accelerators].usd_per_hour,
        )
        if row.accelerators in by_size
        else row
        for row in published.rows
    )
    return replace(published, rows=rows)


# --- what is held -------------------------------------------------------------------------------


def _size_words(size: int, *, is_local: bool, is_cpu: bool) -> tuple[str, ...]:
    """A size is so many nodes; on this machine, so many nodes of one device each."""
    if not is_local:
        return (f"cluster.nodes={size}",)
    if is_cpu:
        return (f"cluster.nodes={size}", "cluster.devices=1")
    return ("cluster.nodes=1", f"cluster.devices={size}")  # its nodes would share the devices


def _resolve_recipe(
    words: Sequence[Source], more: Sequence[str], launcher: Launcher | None
) -> Recipe:
    """The recipe of a size, as far as it can be settled."""
    every = (*words, *more)
    request = Request.read(
        every, to_train=False, needs_weights=False, only_looks=True,
        sees=None if launcher is None else launcher.node_paths,
    )  # fmt: skip
    return request.preview().recipe


def _threads(recipe: Recipe, largest: int) -> int:
    """Return threads of a process: as many as the largest size leaves each, for fair comparison."""
    given = recipe.launch.env.get(THREADS, "")
    return int(given) if given.isdecimal() and int(given) else max(1, usable_cores() // largest)


def _devices(recipe: Recipe) -> int:
    devices = devices_of_node(recipe.cluster)
    if devices is None:
        raise RequestError(
            "how many devices a node has is not known here, so that no efficiency could be said. "
            "Name the machines with cluster.instance or cluster.file, or give cluster.devices."
        )
    return devices


def _resolve_hold(
    recipe: Recipe, first: Recipe, options: StudyOptions, *, devices: int
) -> tuple[Hold, int]:
    """Return the quantity that is held, and its number of samples."""
    given = recipe.optim.batch_per_device
    hold: Hold = options.hold or ("global-batch" if given is None else "batch-per-device")
    if hold == "batch-per-device" and given is not None:
        return hold, given
    if given is not None:
        return hold, given * devices
    if not isinstance(first.optim.global_batch, int):
        raise RequestError(
            "optim.global_batch=auto is not settled before the data is prepared, and a study holds "
            "it, or a device's share, over all sizes. Give optim.global_batch or "
            "optim.batch_per_device."
        )
    batch = first_batch(first.optim)
    if hold == "global-batch":
        return hold, batch
    if batch % devices:
        raise RequestError(
            f"--hold batch-per-device: a step of the smallest size has {batch:,} samples on "
            f"{devices:,} devices, which is not a whole number for each. Give "
            "optim.batch_per_device."
        )
    return hold, batch // devices


def _length(recipe: Recipe, resolved: Recipe, steps: int | None) -> tuple[int | None, float | None]:
    """The run as it is written: its samples, or its passes over the data."""
    run, optim = recipe.run, resolved.optim
    if run.samples is not None:
        return run.samples, None
    if run.tokens is not None and isinstance(resolved.data.seq_len, int):
        return -(-run.tokens // resolved.data.seq_len), None
    if run.steps is not None and steps is not None and isinstance(optim.global_batch, int):
        return steps * first_batch(optim), None
    if run.steps is not None or run.tokens is not None:
        return None, None
    return None, run.epochs or 1.0


def _key(request: Request, *, hold: Hold, batch: int, steps: int | None, on: str) -> str:
    """Eight digits of what all sizes share."""
    content = request.as_written.model_dump(mode="json")
    for section, name in (
        ("run", "id"),
        ("run", "dir"),
        ("cluster", "nodes"),
        ("launch", "max_usd"),
    ):
        content[section].pop(name, None)
    shared = {"recipe": content, "hold": hold, "batch": batch, "steps": steps, "on": on}
    text = json.dumps(shared, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def check_same_study(study: Study, before: dict[str, Any]) -> None:
    """Raise if a folder holds another study than the requested one."""
    is_same = before.get("threads", study.threads) == study.threads
    if before.get("key") == study.key and is_same:
        return
    now = study.to_json()
    named = [
        f"{name}={before.get(name)} there, {now[name]} now"
        for name in ("hold", "batch", "steps", "threads")
        if before.get(name) != now[name]
    ]
    differs = "; ".join(named) or "the recipe, or the launcher"
    raise RequestError(
        f"run.id={study.id!r} is another study already: {differs}. Sizes of both in one table "
        "would be no scaling. Ask for the same again, or choose another run.id."
    )
