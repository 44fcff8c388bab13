"""Resolve every ``auto`` of a recipe to a value, with its reason.

Pure: what must be looked up (the model's shape, the machine, the prepared data) comes in as
``ResolveContext``. ``config/auto.py`` has the rules for ``auto``, one per setting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardyard.config.auto import (
    AFTER_LAYOUT,
    BEFORE_LAYOUT,
    OPEN_WORDS,
    Draft,
    MemoryFitter,
    NotYetResolved,
    ResolveContext,
    Rule,
    steps_of,
)
from shardyard.config.cluster_choice import devices_of_node
from shardyard.config.fingerprint import (
    MAY_CHANGE_FROM_AN_EARLIER_STEP,
    SECTIONS_THAT_MAY_CHANGE,
    may_change,
)
from shardyard.config.model.files import base_digest
from shardyard.config.model.hub import commit_of, digest_of
from shardyard.config.model.vocabulary import check_vocabulary
from shardyard.config.model_sizes import ModelSizes
from shardyard.config.phases import in_phase, of_phases
from shardyard.config.resolved import DatasetMetadata, Resolved, fingerprint, settings_in
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.rules.images import check_network
from shardyard.config.rules.labels import check_label_targets
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.rules.model import check_model
from shardyard.config.rules.node_exclusion import check_exclusion_device
from shardyard.config.rules.precision import without_bf16
from shardyard.config.run_length import check_run_length
from shardyard.config.schema.base import Own, Section
from shardyard.config.schema.plugin_sections import recipe_with_defaults
from shardyard.config.schema.recipe import Recipe
from shardyard.config.secrets import shown_command
from shardyard.config.tasks import BITS_PER_BYTE
from shardyard.errors import Problem, RecipeError
from shardyard.families.images.network import ImageNetwork
from shardyard.families.shape import ModelShape
from shardyard.hardware.machine import Machine

_LAYOUT_SETTINGS = ("parallel.zero", "parallel.dp_replicate", "parallel.dp_shard")


@dataclass(frozen=True, kw_only=True)
class PartialResolution:
    """A recipe resolved as far as the facts go; what is still ``auto`` says when it is known."""

    recipe: Recipe
    reasons: dict[str, str]
    """Dotted setting -> reason, for each setting that was ``auto``."""
    steps: int | None
    """Optimizer steps of the whole run; None while its length is not known in steps."""
    steps_reason: str
    phases: tuple["PartialResolution", ...] = ()
    """Phases of a run, each by itself; the recipe above is then that of the first."""

    @property
    def of_phases(self) -> tuple["PartialResolution", ...]:
        """Phases to train, one after the other; a run without phases is its only one."""
        return self.phases or (self,)


def resolve(
    recipe: Recipe,
    *,
    shape: ModelShape | None,
    machine: Machine,
    data: DatasetMetadata,
    sizes: ModelSizes | None = None,
    network: ImageNetwork | None = None,
    name: str = "run",
    model_dir: Path | None = None,
    model_has_tokenizer: bool = False,
    previous: Resolved | None = None,
    fitting: MemoryFitter | None = None,
) -> Resolved:
    """Replace every ``auto``; the result is all that training needs to know.

    Args:
        recipe: A checked recipe.
        sizes: What auto follows, of a model of no family.
        network: What classifies images, where the recipe reads images.
        machine: The machine to train on, or one of the cluster's nodes.
        name: Name of the run where ``run.name`` is auto: the recipe's file name.
        model_dir: The model's own files, if it has any (``config/model/source.py``).
        model_has_tokenizer: Whether that folder holds a tokenizer.
        previous: The last attempt, on a resume: an ``auto`` that the fingerprint covers keeps the
            value it had.
        fitting: The planner's word on what fits a device.

    Raises:
        RecipeError: Degrees, batch, data and model do not fit each other, or a resume changes
            what it may not change.
    """
    facts = ResolveContext(
        name=name,
        shape=shape,
        sizes=sizes,
        network=network,
        model_has_tokenizer=model_has_tokenizer,
        machine=machine,
        data=data,
        previous=previous,
        fitting=fitting,
    )
    whole = resolve_partial(recipe, facts)
    resolved = [
        _resolved(each, facts, model_dir=model_dir, machine=machine) for each in whole.of_phases
    ]
    if previous is None:
        _raise_if_too_long(resolved)
    for phase, before in zip(resolved, _each_before(recipe, previous), strict=True):
        if before is not None:
            check_resume(before, phase, run=name)
    back_to = previous.back_to if previous is not None else None
    if back_to is not None:
        resolved[0] = replace(resolved[0], back_to=replace(back_to, is_requested=False))
    if not whole.phases:
        return resolved[0]
    assert whole.steps is not None
    lengths = {phase.recipe.data.seq_len for phase in resolved}
    sets = [data, *(part.data for part in data.parts)]
    if any(each.train_samples is not None for each in sets) and len(lengths) > 1:
        text = (
            f"have samples of {', '.join(map(str, sorted(map(int, lengths))))} tokens, and those "
            "of this data set were made when it was prepared, of one length. Give each phase the "
            "same data.seq_len, or begin a run for each from the weights of the one before."
        )
        raise RecipeError([Problem("phases", text)])
    return replace(resolved[0], recipe=whole.recipe, steps=whole.steps, phases=tuple(resolved))


def _resolved(
    preview: PartialResolution, context: ResolveContext, *, model_dir: Path | None, machine: Machine
) -> Resolved:
    """Return the resolved recipe, in which everything must be settled.

    Raises:
        RecipeError: It does not fit the machine, the model or the data.
    """
    recipe, data = preview.recipe, context.data
    assert data is not None
    assert preview.steps is not None  # all facts are there, so no rule had to wait
    loads = preview.recipe.model.weights == "load"
    resolved = Resolved(
        recipe=preview.recipe,
        reasons=preview.reasons,
        shape=context.shape,
        network=None if context.network is None else _of_data(context.network, data, recipe),
        data=data,
        steps=preview.steps,
        model_dir=str(model_dir) if loads or is_generic(recipe) else None,
        model_commit=None
        if recipe.model.hub is None or model_dir is None
        else commit_of(model_dir),
        model_digest=digest_of(model_dir) if model_dir is not None and loads else None,
        base_digest=base_digest(model_dir)
        if model_dir is not None and loads and recipe.model.lora.rank is not None
        else None,
    )
    found = _check_resolved(resolved, machine)
    if found:
        raise RecipeError(found)
    return resolved


def _of_data(network: ImageNetwork, data: DatasetMetadata, recipe: Recipe) -> ImageNetwork:
    """The network for the images that there are: their size, and a head for their classes."""
    network = network.at_size(int(recipe.data.images.size))
    return network if data.num_classes is None else network.with_classes(data.num_classes)


def _each_before(recipe: Recipe, previous: Resolved | None) -> Sequence[Resolved | None]:
    """Return the last attempt's version of each phase.

    Raises:
        RecipeError: It had another number of phases.
    """
    count = len(of_phases(recipe))
    if previous is None:
        return [None] * count
    before = [replace(each, back_to=previous.back_to) for each in previous.of_phases]
    if len(before) != count:
        text = f"the run began with {len(before)} and continues with as many, not {count}."
        raise RecipeError([Problem("phases", text)], "resume")
    return before


def resolve_partial(recipe: Recipe, context: ResolveContext) -> PartialResolution:
    """Replace each ``auto`` that the facts allow; the others say when they will be known.

    Raises:
        RecipeError: The degrees of ``parallel`` do not fit the number of devices, or a resume
            has another number of phases.
    """
    if recipe.phases:
        before = _each_before(recipe, context.previous)
        each = tuple(
            resolve_partial(phase, replace(context, previous=its))
            for phase, its in zip(of_phases(recipe), before, strict=True)
        )
        steps = [phase.steps for phase in each]
        return replace(
            each[0],
            recipe=each[0].recipe.model_copy(update={"phases": recipe.phases}),
            steps=None if None in steps else sum(filter(None, steps)),
            steps_reason="; ".join(f"phase {n}: {p.steps_reason}" for n, p in enumerate(each, 1)),
            phases=each,
        )
    reasons: dict[str, str] = {}
    recipe, kept = reuse_previous(recipe_with_defaults(recipe), context.previous)
    reasons.update(dict.fromkeys(kept, "as the run began"))
    recipe = _apply(recipe, BEFORE_LAYOUT, context=context, reasons=reasons)
    recipe = _apply_layout(recipe, reasons)
    recipe = _apply(recipe, AFTER_LAYOUT, context=context, reasons=reasons)
    total: int | None
    try:
        total, why_steps = steps_of(Draft(recipe=recipe, context=context))
    except NotYetResolved as not_yet:
        total, why_steps = None, str(not_yet)
    return PartialResolution(recipe=recipe, reasons=reasons, steps=total, steps_reason=why_steps)


def check_resume(previous: Resolved, now: Resolved, *, run: str = "RUN") -> None:
    """Reject a resume that changes what is learnt.

    Args:
        run: Id of the run, for the command that starts another from its weights.

    Raises:
        RecipeError: Lists each setting that the fingerprint covers and that changed, old -> new.
    """
    old, new = fingerprint(previous), fingerprint(now)
    goes_back = previous.back_to is not None and previous.back_to.is_requested
    may_differ = MAY_CHANGE_FROM_AN_EARLIER_STEP if goes_back else ()
    found = [
        Problem(name, f"{old[name]!r} -> {value!r} changes what is learnt.")
        for name, value in new.items()
        # a run that is older than a name goes on
        if name in old and old[name] != value and name not in may_differ
    ]
    if found:
        changed = [f"{each.path}={new[each.path]}" for each in found if _is_plain(new, each.path)]
        start = shown_command(["shardyard", "train", "RECIPE", f"run.from={run}", *changed])
        raise RecipeError(
            found,
            "resume",
            hint="A resumed run keeps its model, data, order and optimisation: leave these as they "
            f"were, or start a new run from its weights: `{start}`. A resume may change the length "
            "(run.steps, ...), optim.micro_batch (not under batch normalisation), when it is "
            "evaluated (task.eval_every_steps, ...), and all of "
            f"{', '.join(SECTIONS_THAT_MAY_CHANGE)}. From an earlier step (`resume --step N`) also "
            f"{' and '.join(MAY_CHANGE_FROM_AN_EARLIER_STEP)}.",
        )


def _is_plain(settings: Mapping[str, Any], name: str) -> bool:
    """Whether a setting of a fingerprint is one of a recipe, with a value for a command line."""
    is_own = not name.startswith("model.") and name in settings_in(Recipe().model_dump())
    return is_own and isinstance(settings[name], str | int | float)


def reuse_previous(recipe: Recipe, previous: Resolved | None) -> tuple[Recipe, list[str]]:
    """On a resume, an open setting that the fingerprint covers keeps the value it had.

    Returns:
        The recipe, and the settings that were kept so.
    """
    reused: list[str] = []
    if previous is None:
        return recipe, reused
    for setting, value in settings_in(recipe.model_dump(mode="json")).items():
        if value == "auto" and not may_change(setting):
            recipe = _set(recipe, setting, _get(previous.recipe, setting))
            reused.append(setting)
    return recipe, reused


def _apply(
    recipe: Recipe, rules: dict[str, Rule], *, context: ResolveContext, reasons: dict[str, str]
) -> Recipe:
    for setting, rule in rules.items():
        if _get(recipe, setting) != OPEN_WORDS.get(setting, "auto"):
            continue
        try:
            value, reasons[setting] = rule(Draft(recipe=recipe, context=context))
        except NotYetResolved as not_yet:
            reasons[setting] = str(not_yet)
        else:
            recipe = _set(recipe, setting, value)
    return recipe


def _apply_layout(recipe: Recipe, reasons: dict[str, str]) -> Recipe:
    """Set the degrees of ``parallel`` once the number of ranks is known."""
    devices = recipe.cluster.devices
    if devices == "auto":
        for setting in _LAYOUT_SETTINGS:
            if _get(recipe, setting) == "auto":
                reasons[setting] = "known once the number of devices is"
        return recipe
    layout, why = resolve_layout(
        recipe.parallel, world_size=recipe.cluster.nodes * devices, devices_per_node=devices
    )
    reasons.update(why)
    for setting in _LAYOUT_SETTINGS:
        recipe = _set(recipe, setting, getattr(layout, setting.removeprefix("parallel.")))
    return recipe


def _check_resolved(resolved: Resolved, machine: Machine) -> list[Problem]:
    """Find problems that only show when recipe, machine, model and data are known together."""
    return [
        *check_devices(resolved.recipe, machine),
        *check_model(
            resolved.recipe,
            resolved.shape,
            devices_per_node=devices_of_node(resolved.recipe.cluster),
        ),
        *([] if resolved.network is None else check_network(resolved.recipe, resolved.network)),
        *_check_sample_counts(resolved),
        *check_vocabulary(
            tokenizer=resolved.recipe.data.tokenizer,
            vocab_size=resolved.data.vocab_size,
            rows=None if resolved.shape is None else resolved.shape.vocab_size,
        ),
    ]


def check_devices(recipe: Recipe, machine: Machine) -> list[Problem]:
    """Find needs of a recipe, resolved so far, that this machine's devices do not meet."""
    found = []
    if recipe.precision.compute == "fp8" and not machine.has_fp8:
        text = (
            f"=fp8 but {machine.name} does not multiply fp8 numbers: that takes an NVIDIA device "
            "of capability 8.9 or more (Ada, Hopper, Blackwell) or AMD's CDNA 3. Use "
            "precision.compute=bf16 here."
        )
        found.append(Problem("precision.compute", text))
    found += check_exclusion_device(recipe)
    device, devices = recipe.cluster.device, recipe.cluster.devices
    if device == "cpu":
        return found  # CPU processes are a choice
    if recipe.precision.compute == "bf16" and not machine.has_bf16:
        found.append(Problem("precision.compute", f"=bf16: {without_bf16(machine.name)}"))
    if device != machine.device:
        named = "instance" if recipe.cluster.instance else "file" if recipe.cluster.file else None
        renting = f" with cluster.{named}=null" if named else ""
        text = (
            f"={device} but {machine.hostname} has only {machine.count} x {machine.name} "
            f"({machine.device}). Use cluster.device={machine.device}{renting}, or a machine that "
            "has it."
        )
        return [Problem("cluster.device", text)]
    if isinstance(devices, int) and devices > machine.count:
        text = (
            f"={devices} but {machine.hostname} has {machine.count} x {machine.name}. Each rank "
            f"needs a device of its own. Use at most {machine.count}."
        )
        found.append(Problem("cluster.devices", text))
    return found


def _check_sample_counts(resolved: Resolved) -> list[Problem]:
    """Find fewer samples than ranks, none for validation, or a target without its metric."""
    recipe, data = resolved.recipe, resolved.data
    draft = Draft(recipe=recipe, context=ResolveContext(data=data))
    ranks, samples = draft.data_ranks, draft.train_samples
    found = []
    if samples < ranks:
        is_text = not draft.reads_images and data.item_kind is None
        what = "images" if draft.reads_images else "items of data.module"
        made = (
            f"{data.train_tokens:,} training tokens make {samples} samples of "
            f"{draft.seq_len} tokens"
            if is_text
            else f"{samples} {what} are trained on"
        )
        less = " a smaller data.seq_len," if is_text else ""
        text = (
            f"{made}, fewer than the {ranks} data-parallel ranks: some would never have work. "
            f"Use more data,{less} or fewer devices."
        )
        setting = "data.source" if recipe.data.module is None else "data.module"
        found.append(Problem(setting, text))
    kind = "image" if draft.reads_images else "document"
    kind = kind if data.item_kind is None else "item"
    task, run = recipe.task, recipe.run
    wants = (task.eval_every_steps, task.eval_every_epochs, run.target, run.patience)
    wants_eval = any(wants) or bool(recipe.data.eval_sets)
    if wants_eval and not data.num_samples("eval", draft.seq_len):
        text = (
            f"={recipe.data.eval_fraction} leaves no {kind} for validation. "
            f"Raise it, or give data with more {kind}s."
        )
        found.append(Problem("data.eval_fraction", text))
    elif BITS_PER_BYTE in (recipe.run.target or ()) and data.too_long:
        text = (
            f"names {BITS_PER_BYTE}, and {data.too_long:,} documents are cut or left out by "
            f"data.too_long={recipe.data.too_long}, so the bytes of what is predicted are not "
            "known. Name loss, or raise data.seq_len."
        )
        found.append(Problem("run.target", text))
    elif BITS_PER_BYTE in (recipe.run.target or ()) and not data.eval_bytes:
        text = (
            f"names {BITS_PER_BYTE}, but the size in bytes of the validation split in {data.dir} "
            "is not known: an older version prepared it. Move that folder away to prepare it "
            "again, or name another metric."
        )
        found.append(Problem("run.target", text))
    return [*found, *check_label_targets(recipe, data)]


def _raise_if_too_long(phases: Sequence[Resolved]) -> None:
    """Raise if whole steps make a run, or a phase of it, much longer than was asked for.

    Raises:
        RecipeError: Lists each such length.
    """
    found = []
    for number, phase in enumerate(phases, 1):
        problems = _check_length(phase)
        found += problems if len(phases) == 1 else [in_phase(each, number) for each in problems]
    if found:
        raise RecipeError(found)


def _check_length(resolved: Resolved) -> list[Problem]:
    recipe, data = resolved.recipe, resolved.data
    draft = Draft(recipe=recipe, context=ResolveContext(data=data))
    samples = draft.train_samples
    what = "pictures" if draft.reads_images else "items of data.module"
    made_of = (
        f"{samples:,} {what} are an epoch"
        if draft.reads_images or data.item_kind is not None
        else f"{data.train_tokens:,} training tokens make {samples:,} samples of "
        f"{draft.seq_len:,} tokens"
    )
    is_epochs = recipe.run.tokens is None and recipe.run.samples is None
    return check_run_length(recipe, train_samples=samples, description=made_of if is_epochs else "")


def _get(section: Section, setting: str) -> Any:
    key, _, inner = setting.partition(".")
    value = getattr(section, key)
    return _get(value, inner) if inner else value


def _set(section: Own, setting: str, value: Any) -> Own:
    key, _, inner = setting.partition(".")
    if inner:
        value = _set(getattr(section, key), inner, value)
    return section.model_copy(update={key: value})
