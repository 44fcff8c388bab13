"""One attempt of a run on this machine: prepare its data, report it, and write the attempt down."""

import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from shardyard.config.data_choices import SLOTS
from shardyard.config.formulas import first_batch
from shardyard.config.load import dump_recipe
from shardyard.config.model.source import has_tokenizer, table_rows
from shardyard.config.resolve import reuse_previous
from shardyard.config.resolved import DatasetMetadata, EvalSetMetadata, Resolved
from shardyard.config.rules.custom_module import NO_SHAPE
from shardyard.config.rules.images import class_notes
from shardyard.config.run_length import Length, requested_samples
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.config.tokenizer_kinds import TOKENIZER_KINDS
from shardyard.config.versions import plug_ins_of
from shardyard.control.request import Request, check_weights_match_config
from shardyard.control.subprocesses import run_program
from shardyard.doctor.storage import check_space, lock_warning
from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine, local_machine
from shardyard.io.files import break_links, write_json, write_text
from shardyard.log import info, warn
from shardyard.planner.phases import plan
from shardyard.planner.plan import Plan
from shardyard.plugins import PlugIn
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir
from shardyard.rundir.lease import Lease
from shardyard.rundir.manifest import write_manifest

# Log lines about a mixture once its sources are prepared and the length of the run is known.

_SHOWN_LABELS = 8
_MANY_PASSES = 4.0
"""Up to so many passes text is nearly as good as new text (arXiv:2305.16264)."""


def mixture_lines(resolved: Resolved) -> list[str]:
    """A line for each source of a mixture: its share, its tokens, and how often they are read."""
    seq_len = int(resolved.recipe.data.seq_len)
    return [
        f"source {part.name}: {part.slots / SLOTS:.1%} of the samples, {_size_words(part.data)}, "
        f"read {part.passes(resolved.samples, seq_len):.2f} times"
        for part in resolved.data.parts
    ]


def _size_words(data: DatasetMetadata) -> str:
    is_text = data.item_kind is None
    return f"{data.train_tokens:,} tokens" if is_text else f"{data.train_samples:,} items"


def eval_set_words(found: EvalSetMetadata) -> str:
    """Describe a set of data.eval_sets: its size, and the files that it consists of."""
    data = found.data
    size = f"{data.eval_tokens:,} tokens of {data.eval_documents:,} documents"
    return f"{size} ({data.validation_files})"


def mixture_warnings(resolved: Resolved) -> list[str]:
    """One for each source that is read over and over."""
    seq_len = int(resolved.recipe.data.seq_len)
    passes = {part.name: part.passes(resolved.samples, seq_len) for part in resolved.data.parts}
    return [
        f"source {name} of data.mixture is read {times:.1f} times in this run. From about "
        f"{_MANY_PASSES:.0f} times on text teaches less and less (arXiv:2305.16264): lower its "
        "weight, give more of it, or train for less."
        for name, times in passes.items()
        if times > _MANY_PASSES
    ]


# Text into token shards, pictures into theirs, in a process of its own.


def prepare_data(
    request: Request,
    *,
    previous: Resolved | None = None,
    verify: bool = False,
    like: DatasetMetadata | None = None,
) -> DatasetMetadata:
    """Prepare a request's data, or find it prepared; check sizes always, content on demand.

    Args:
        previous: The last attempt, on a resume: its data is prepared again as it was.
        like: The same on another node, whose folders it has; None: named by the request.

    Raises:
        ShardyardError: The error of the data program; its class follows the exit code.
    """
    return DatasetMetadata(**_run(request, previous=previous, verify=verify, like=like))


def prepare_also_h5(request: Request, *, verify: bool = False) -> tuple[DatasetMetadata, str]:
    """Prepare a request's data, and write what a training sees as BERT's h5 files.

    Returns:
        What was prepared, and the folder of the h5 files.

    Raises:
        ShardyardError: What the data program answered; its class follows the exit code.
    """
    answer = _run(request, verify=verify, also="h5")
    folder = str(answer.pop("h5"))
    return DatasetMetadata(**answer), folder


def prepare_and_show(
    request: Request, count: int, *, verify: bool = False
) -> tuple[DatasetMetadata, list[dict[str, Any]]]:
    """Prepare a request's data, and decode the first samples of its training split.

    Returns:
        What was prepared, and for each sample ``tokens``, ``loss_tokens`` and ``parts``, each
        with its ``text`` and whether it has ``loss``.

    Raises:
        ShardyardError: What the data program answered; its class follows the exit code.
    """
    answer = _run(request, verify=verify, show=count)
    samples: list[dict[str, Any]] = answer.pop("samples")
    return DatasetMetadata(**answer), samples


def _run(
    request: Request,
    *,
    previous: Resolved | None = None,
    verify: bool = False,
    like: DatasetMetadata | None = None,
    also: str | None = None,
    show: int = 0,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shardyard-") as scratch:
        recipe = Path(scratch) / "recipe.json"
        recipe.write_text(reuse_previous(request.recipe, previous)[0].model_dump_json())
        options = [] if request.model_dir is None else ["--model-dir", str(request.model_dir)]
        rows = table_rows(request.recipe.model, request.shape)
        options += [] if rows is None else ["--rows", str(rows)]
        options += ["--verify"] if verify else []
        if like is not None:
            options += ["--folder", like.dir]
            options += [
                word
                for each in like.eval_sets
                for word in ("--set-folder", each.name, each.data.dir)
            ]
        options += [] if also is None else ["--also", also]
        options += ["--show", str(show)] if show else []
        return run_program("shardyard.data", [str(recipe), *options])


def would_prepare(request: Request) -> dict[str, str]:
    """Describe what ``prepare_data`` would read and write, without reading the data."""
    data = request.recipe.data
    write = f"a folder named by fingerprint in {Path(data.dir).expanduser().resolve()}"
    if data.module is not None:
        validation = (
            f"the function's eval split; if that is None, {data.eval_fraction:.0%} of train"
        )
        return {"read": f"data.module={data.module}", "write": write, "validation": validation}
    read = ", ".join(entry for _, entry in data.entries)
    if task_row(request.recipe.task.name).reads == "images":
        return {"read": read, "write": write, "validation": _validation(data, "pictures")}
    kind = TOKENIZER_KINDS[data.tokenizer_kind].words
    trained = f"train a {kind} of {data.vocab_size:,} tokens"
    own = str(request.model_dir) if has_tokenizer(request.model_dir) else trained
    tokenizer = {"auto": own, "train": trained}.get(data.tokenizer, data.tokenizer)
    validation = _validation(data, "documents")
    if data.eval_sets:
        validation += f"; each by itself: {', '.join(data.eval_sets)}"
    if data.eval_tasks:
        validation += f"; tasks: {', '.join(data.eval_tasks)}"
    return {"read": read, "tokenizer": tokenizer, "write": write, "validation": validation}


def _validation(data: Data, unit: str) -> str:
    """Describe the data that is validated on."""
    if data.eval_source is not None:
        return "data.eval_source"
    if data.eval_fraction == 0 and unit == "documents":
        return "none, as data.eval_fraction=0; files named validation or test are left out"
    held_out = "val, else test" if unit == "pictures" else "validation"
    return f"what is named {held_out}; without it {data.eval_fraction:.0%} of the {unit}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Everything that is known before an attempt starts."""

    run_dir: RunDir
    number: int
    requested: Recipe
    """With the overrides of this attempt, before resolving."""
    resolved: Resolved
    machine: Machine
    lease: Lease | None = None
    """Held from before its first file is written; the agent takes it over."""

    def plan(self) -> Plan | None:
        """The prediction for this attempt; None for a module of the user's own."""
        if self.resolved.shape is None and self.resolved.network is None:
            return None
        devices = self.resolved.recipe.cluster.devices
        assert isinstance(devices, int)
        return plan(
            self.resolved,
            world_size=devices * self.resolved.recipe.cluster.nodes,
            devices_per_node=devices,
            machine=self.machine,
        )


def resolve_locally(
    request: Request,
    *,
    previous: Resolved | None = None,
    data: DatasetMetadata | None = None,
    check: Callable[[Machine], None] | None = None,
) -> tuple[Machine, Resolved]:
    """Describe this machine, reject what it cannot do, prepare the data, resolve everything.

    In this order, errors are reported before anything is tokenised.

    Args:
        previous: The last attempt, on a resume.
        data: A dataset that is prepared already; None: prepare it, or find it prepared.
        check: Called with the machine before the data is prepared, to reject the request.

    Raises:
        RecipeError: Recipe, machine, model and data do not fit each other or ``previous``.
    """
    machine = local_machine(request.recipe.cluster.device)
    request.check_compatibility(machine, previous)
    check_weights_match_config(request)
    if check is not None:
        check(machine)
    data = data or prepare_data(request, previous=previous)
    resolved = request.resolve(machine, data, previous=previous)
    sets = [f"eval set {each.name}: {eval_set_words(each)}" for each in data.eval_sets]
    for line in (*split_lines(data), *mixture_lines(resolved), *sets, *length_lines(resolved)):
        info(line)
    notes = class_notes(resolved) if previous is None else []  # else a checkpoint has the head
    for warning in [*mixture_warnings(resolved), *notes]:
        warn(warning)
    return machine, resolved


def check_storage(attempt: Attempt) -> None:
    """Warn where the run folder has no file locks, or room for too few checkpoints.

    Raises:
        StorageError: Not even one checkpoint fits there.
    """
    folder, prediction = attempt.run_dir.path, attempt.plan()
    if prediction is not None:
        warning = check_space(
            folder,
            attempt.resolved.recipe.checkpoint,
            checkpoint_bytes=prediction.checkpoint_bytes,
            written=len(attempt.run_dir.checkpoint_steps()),
        )
        if warning is not None:
            warn(warning)
    if (warning := lock_warning(folder)) is not None:
        warn(warning)


def no_plan() -> str:
    """Return the text shown instead of a plan."""
    return f"no plan: {NO_SHAPE}"


def write_down(
    attempt: Attempt, prediction: Plan | None, *, launched_by: PlugIn | None = None
) -> None:
    """Write the attempt's files; resolved.json last: an attempt that has it is whole.

    Args:
        launched_by: The launcher, where a package adds it.
    """
    run_dir, number = attempt.run_dir, attempt.number
    for shared in (run_dir.events, run_dir.metrics):  # before several processes append to them
        break_links(shared)
    write_text(run_dir.attempt_recipe(number), dump_recipe(attempt.requested))
    if prediction is not None:
        write_json(run_dir.plan(number), prediction.to_json())
    nodes = plug_ins_of(attempt.resolved.recipe, attempt.resolved.shape)
    used = [*nodes, *([] if launched_by is None else [launched_by])]
    write_manifest(
        run_dir,
        number,
        command=sys.argv,
        machine=None if attempt.machine is None else asdict(attempt.machine),
        plug_ins=[*(each.to_json() for each in used), *attempt.resolved.data.readers],
    )
    write_resolved(run_dir.resolved(number), attempt.resolved)


def check_single_node(recipe: Recipe) -> None:
    """Raise if a recipe wants more machines than this one.

    Raises:
        RequestError: It does.
    """
    if recipe.cluster.nodes > 1:
        raise RequestError(
            f"cluster.nodes={recipe.cluster.nodes} but this verb trains on one node, this machine. "
            "Use cluster.nodes=1 here; `shardyard launch RECIPE --on local` starts several nodes "
            "on this machine, and --on slurm, kubernetes, aws-batch or ssh elsewhere."
        )


def length_lines(resolved: Resolved) -> list[str]:
    """A line for each phase whose length is rounded up."""
    found = []
    for number, phase in enumerate(resolved.of_phases, 1):
        seq_len = int(phase.recipe.data.seq_len)
        epoch = phase.data.num_samples("train", seq_len)
        asked = requested_samples(phase.recipe, epoch)
        if asked is None:
            continue
        length = Length(requested=asked, batch=first_batch(phase.recipe.optim))
        if length.factor != 1:
            of = f" of phase {number}" if resolved.phases else ""
            epochs = float(Fraction(length.samples, epoch)) if epoch else 0
            found.append(
                f"length{of}: {float(asked):,.10g} samples are asked for, and {length.steps:,} "
                f"steps of {length.batch:,} train {length.samples:,} ({epochs:.4g} epochs)"
            )
    return found


def split_rows(metadata: DatasetMetadata) -> list[tuple[str, str]]:
    """List files by split, as their names or data.eval_source decided: (label, files)."""
    found = [(part.name, part.data) for part in metadata.parts] or [("", metadata)]
    return [row for name, each in found for row in _split_rows(name, each)]


def split_lines(metadata: DatasetMetadata) -> list[str]:
    """The same as lines of a log."""
    return [f"{label}: {files}" for label, files in split_rows(metadata)]


def _split_rows(name: str, metadata: DatasetMetadata) -> list[tuple[str, str]]:
    of = f" of {name}" if name else ""
    rows = []
    if metadata.validation_files is not None:
        number = (
            metadata.eval_samples if metadata.num_classes is not None else metadata.eval_documents
        )
        unit = "pictures" if metadata.num_classes is not None else "documents"
        rows.append((f"validation files{of}", f"{metadata.validation_files} ({number:,} {unit})"))
    if metadata.left_out_files is not None:
        why = "not training data by name; to train on one, name the file in data.source"
        rows.append((f"left out{of}", f"{metadata.left_out_files} ({why})"))
    if metadata.num_labels is not None:
        rows.append((f"labels{of}", _labels(metadata)))
    if metadata.rejected is not None:
        of_all = f"{metadata.rejected:,} of {metadata.rejected_of or 0:,} dialogues"
        rows.append((f"left out{of}", f"{of_all}, which the chat template rejects"))
    if metadata.true_pairs is not None:
        rows.append((f"true pairs{of}", f"{metadata.true_pairs:.1%} of the training pairs"))
    if metadata.empty_classes is not None:
        rows.append(("class folders without a picture", metadata.empty_classes))
    if metadata.broken_images:
        what = f"{metadata.broken_images:,} broken pictures, listed in left-out.txt"
        rows.append((f"left out{of}", what))
    if metadata.unvalidated_classes is not None:
        by_hash = metadata.validation_files is None
        more = " (a larger data.eval_fraction takes more)" if by_hash else ""
        rows.append(("classes without validation pictures", metadata.unvalidated_classes + more))
    if metadata.asked_files is not None:
        why = "named as validation or test data, and data.source names it"
        rows.append((f"trained on all the same{of}", f"{metadata.asked_files} ({why})"))
    return rows


def _labels(metadata: DatasetMetadata) -> str:
    """Names of the labels, the first of many."""
    names, number = metadata.label_names, metadata.num_labels or 0
    if not names:
        return "numbers to predict (regression)"
    more = f" and {number - _SHOWN_LABELS:,} more" if number > _SHOWN_LABELS else ""
    return f"{', '.join(names[:_SHOWN_LABELS])}{more}"
