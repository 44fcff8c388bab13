"""Checks beyond types: settings that contradict each other or are not built yet.

One small function for each kind of problem; all are run, so that a user sees everything at once.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Sequence

from shardyard.config.cluster_choice import chosen_cluster, devices_of_node
from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.endpoints import parse_rendezvous_endpoint
from shardyard.config.formulas import snapshots_enabled
from shardyard.config.load import Sources, name_of, read_settings
from shardyard.config.model.source import with_heads
from shardyard.config.optimizers import (
    OPTIMIZERS,
    factors_of,
    has_factored_states,
    optimizer_of,
    readers_of,
)
from shardyard.config.origins import with_origin
from shardyard.config.phases import check_each_phase, check_phases
from shardyard.config.rules.bucket import check_bucket
from shardyard.config.rules.custom_module import check_custom_module
from shardyard.config.rules.data import (
    check_conversations,
    check_data,
    check_strings,
    formats_of,
    text_settings,
)
from shardyard.config.rules.images import check_images
from shardyard.config.rules.labels import check_labels
from shardyard.config.rules.launch import check_environment, check_launch
from shardyard.config.rules.model import check_lora, check_model
from shardyard.config.rules.node_exclusion import check_node_exclusion
from shardyard.config.rules.observe import check_alerts, check_exporters, check_profile
from shardyard.config.rules.own_code import check_own_code
from shardyard.config.rules.pass_through import check_pass_through
from shardyard.config.rules.plan_only import DEVICES, planned_only, settings_planned_only
from shardyard.config.rules.precision import check_precision
from shardyard.config.rules.preference import check_preference
from shardyard.config.rules.reproducible import check_reproducible
from shardyard.config.rules.tags import check_tags
from shardyard.config.rules.timeouts import check_timeouts
from shardyard.config.schema.base import section_key
from shardyard.config.schema.recipe import Model, Optim, Recipe, TaskSettings
from shardyard.config.secrets import HIDDEN, find_credential, is_variable, parse_references
from shardyard.config.tasks import TASKS, metrics_of, task_row
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.families.images.registry import IMAGE_PRESETS
from shardyard.families.presets import PRESETS, preset_named
from shardyard.hardware.accelerator import device_kind_error
from shardyard.hardware.cluster import ClusterHardware
from shardyard.units import format_list


def check(recipe: Recipe, source: str = "recipe", *, to_train: bool = True) -> None:
    """Reject what cannot be done, before anything is read or started.

    Args:
        source: Name of the recipe in messages: its files.
        to_train: Whether what can be planned but not trained yet is rejected too.

    Raises:
        RecipeError: All problems.
    """
    found = _run_checks(recipe, to_train=to_train)
    if found:
        raise RecipeError(found, source)


def load_checked_recipe(
    sources: Sources = (),
    overrides: Sequence[str] = (),
    *,
    to_train: bool = True,
    of_run: bool = False,
    with_site: bool = False,
    further: Callable[[Recipe], Iterable[Problem]] | None = None,
) -> Recipe:
    """Load and check a recipe, so that wrong settings and contradictions are reported together.

    Args:
        sources: A path, a dict or a ``Recipe``, or several of them; these, ``overrides``,
            ``of_run`` and ``with_site`` are as for ``load_recipe``.
        to_train: Whether what can be planned but not trained yet is rejected too.
        further: More checks of the whole recipe, such as those of a machine or a launcher.

    Raises:
        RequestError: A file cannot be read or is no YAML mapping, or a source is something else.
        RecipeError: All problems of the recipe.
    """
    recipe, problems = read_settings(sources, overrides, of_run=of_run, with_site=with_site)
    # a section that has lost a setting for being wrong is not told that it lacks one
    broken = {problem.path for problem in problems}
    broken |= {problem.path.partition(".")[0] for problem in problems}
    found = _run_checks(recipe, to_train=to_train)
    known = {problem.path for problem in found} | broken
    if further is not None:
        found += [problem for problem in further(recipe) if problem.path not in known]
    problems += [with_origin(each, recipe) for each in found if each.path not in broken]
    if problems:
        raise RecipeError(problems, name_of(sources))
    return recipe


def _run_checks(recipe: Recipe, *, to_train: bool) -> list[Problem]:
    recipe, nameless = _with_valid_task(recipe)
    unwritable = list(check_strings(recipe))
    if unwritable:  # without the others, which open the files that texts name
        return [*unwritable, *nameless, *_credentials(recipe), *check_environment(recipe)]
    found = nameless or list(_unused_sections(recipe))
    found += check_phases(recipe)
    others = list(check_each_phase(recipe, _check_phase))
    found += [problem for problem in others if not nameless or problem.path != "task.name"]
    return [*found, *check_each_phase(recipe, check_trainable)] if to_train else found


def _check_phase(recipe: Recipe) -> Iterable[Problem]:
    return (problem for look in _CHECKS for problem in look(recipe))


def _with_valid_task(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """A recipe whose task the checks can ask, and what is wrong with the one that it names."""
    try:
        task_row(recipe.task.name)
    except RequestError as error:
        task = recipe.task.model_copy(update={"name": TaskSettings().name})
        run = recipe.run.model_copy(update={"target": None})  # of metrics that nobody knows
        problem = Problem("task.name", f"={_show(recipe.task.name)}: {error}")
        return recipe.model_copy(update={"task": task, "run": run}), [problem]
    return recipe, []


def _credentials(recipe: Recipe) -> Iterable[Problem]:
    for path, text in text_settings(recipe.model_dump()):
        kind = find_credential(text)
        if kind:
            yield Problem(
                path,
                f"holds {kind} {HIDDEN}. Recipes are copied into run folders and reports. "
                "Remove it here, replace it at its issuer, and say where the new one is kept: "
                "`secrets: {HF_TOKEN: env}`.",
            )


def _data_format(recipe: Recipe) -> Iterable[Problem]:
    name = recipe.data.format
    if name not in DATA_FORMATS:
        near = difflib.get_close_matches(name, DATA_FORMATS, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(DATA_FORMATS)}."
        yield Problem("data.format", f"={_show(name)}: unknown format. {hint}")
        return
    wanted = task_row(recipe.task.name).data_formats
    if wanted and name not in wanted:
        text = f"={name} does not prepare what task.name={recipe.task.name} reads. "
        yield Problem("data.format", f"{text}Use {', '.join(wanted)}.")
    elif DATA_FORMATS[name].holds_samples and not wanted:
        readers = [task for task, row in TASKS.items() if name in row.data_formats]
        text = f"={name} holds whole samples, which task.name={recipe.task.name} does not read. "
        yield Problem("data.format", f"{text}Use task.name={' or '.join(readers)}.")
    names = formats_of(recipe.data)
    for key in sorted(recipe.data.model_fields_set):
        readers = [other for other, row in DATA_FORMATS.items() if key in row.settings]
        if key == "keys" and task_row(recipe.task.name).labelled is not None:
            continue  # of columns, by ``check_labels``
        is_ignored = bool(names) and all(key in DATA_FORMATS[each].ignores for each in names)
        if (readers and not {*readers} & {*names}) or is_ignored:
            where = " and ".join(names)
            text = f"={_show(getattr(recipe.data, key))} has no effect where data.format is {where}"
            of = f": it is a setting of {' and '.join(readers)}" if readers else ""
            yield Problem(f"data.{key}", f"{text}{of}. Leave it out.")


def _length(recipe: Recipe) -> Iterable[Problem]:
    run = recipe.run
    lengths = {"steps": run.steps, "tokens": run.tokens, "samples": run.samples}
    given = [key for key, value in {**lengths, "epochs": run.epochs}.items() if value is not None]
    if len(given) > 1:
        named = ", ".join(f"run.{key}" for key in given)
        yield Problem("run", f"{named} are all lengths of the run. Keep one, set others to null.")


def _model(recipe: Recipe) -> Iterable[Problem]:
    model = recipe.model
    sources = {"path": model.path, "hub": model.hub, "module": model.module}
    given = [key for key, value in sources.items() if value is not None]
    if not given and model.preset is None:
        yield Problem(
            "model",
            "does not say which model to train. Write `model: {preset: llama-tiny}`, or path "
            f"or hub. Presets are {', '.join(PRESETS)}.",
        )
    if len(given) > 1:
        named = " and ".join(f"model.{key}" for key in given)
        yield Problem("model", f"{named} each name a model. Keep one of them.")
    if model.config is not None and model.preset is not None:
        text = "and model.preset each say what shape the model has. Keep one of them."
        yield Problem("model.config", text)
    elif model.config is not None and not (model.path or model.hub):
        text = "says what shape a model has, and names none. Give model.path or model.hub too."
        yield Problem("model.config", text)
    if model.preset is not None and not _is_preset(model.preset):
        yield Problem(
            "model.preset", f"={_show(model.preset)} is not a preset. {_preset_hint(model)}"
        )
    if model.revision is not None and model.hub is None:
        text = f"={_show(model.revision)} is of a repository on the hub, and model.hub names none. "
        yield Problem("model.revision", f"{text}Name it, or leave the revision out.")
    if model.preset is not None and not given and model.weights == "load":
        text = "=load but a preset has no weights. Use model.path or model.hub, or weights: random."
        yield Problem("model.weights", text)


def _preset_hint(model: Model) -> str:
    name, all_presets = str(model.preset), [*PRESETS, *IMAGE_PRESETS]
    near = difflib.get_close_matches(name.lower(), all_presets, n=1)
    if near:
        return f"Did you mean {near[0]}?"
    if "/" in name:
        kind = "path" if name.startswith((".", "/", "~")) else "hub"
        return f"Did you mean model.{kind}={_show(name)}?"
    return f"Presets are {', '.join(PRESETS)}."


def _is_preset(name: str) -> bool:
    return name in IMAGE_PRESETS or preset_named(name) is not None


def _secrets(recipe: Recipe) -> Iterable[Problem]:
    for name, text in recipe.secrets.items():
        if find_credential(text) or not is_variable(name):
            continue  # told already
        try:
            parse_references({name: text})
        except RequestError as error:
            yield Problem(f"secrets.{name}", str(error).removeprefix(f"secrets.{name}").strip(": "))
        if name in recipe.launch.env:
            why = "is in launch.env too, and a process has one value for it. Keep one of them."
            yield Problem(f"secrets.{name}", why)


def _fit(recipe: Recipe) -> Iterable[Problem]:
    """Legality, as far as it can be decided without a machine or a model's folder."""
    reads_text = task_row(recipe.task.name).reads == "text"
    preset = preset_named(recipe.model.preset) if reads_text else None
    shape = None if preset is None else with_heads(preset.shape, recipe.task.name)
    yield from check_model(recipe, shape, devices_per_node=devices_of_node(recipe.cluster))


def _optim(recipe: Recipe) -> Iterable[Problem]:
    optim = recipe.optim
    row = optimizer_of(optim)
    if not row.knows_lr and optim.lr == "auto":
        known = format_list([name for name, other in OPTIMIZERS.items() if other.knows_lr])
        text = f"=auto is known for {known} only. Give one; {row.typical_lr} is a usual start for"
        yield Problem("optim.lr", f"{text} {optim.module or optim.name}.")
    reads_images = task_row(recipe.task.name).reads == "images"
    if row.gathers_matrices and (recipe.model.module is not None or reads_images):
        what = "a network for images" if reads_images else "model.module"
        text = f"={optim.name} moves the matrices of a language model's blocks, and which of {what}"
        yield Problem("optim.name", f"{text} those are is not known. Use adamw, or optim.module.")
    if row.is_schedule_free:
        yield from _averaged_steps(recipe)
    for key in sorted(optim.model_fields_set):
        readers = readers_of(key)
        if readers and optim.name not in readers and optim.module is None:
            text = f"={getattr(optim, key)} is a setting of {format_list(readers)}"
            reads = format_list(row.settings)
            text = f"{text}; optim.name is {optim.name}, which reads {reads}. Leave it out."
            yield Problem(f"optim.{key}", text)
    if "nesterov" in row.settings and optim.nesterov and not optim.momentum:
        text = "=True steps along the momentum, and optim.momentum is 0. Give one, such as 0.9"
        yield Problem("optim.nesterov", f"{text}, or leave it out.")
    warmup, decay = optim.warmup_steps, optim.decay_steps
    if warmup != "auto" and decay != "auto" and warmup >= decay:
        text = (
            f"={warmup} is not before optim.decay_steps={decay}. The learning rate rises for "
            f"warmup_steps and falls until decay_steps. Use at most {decay - 1}."
        )
        yield Problem("optim.warmup_steps", text)


def _averaged_steps(recipe: Recipe) -> Iterable[Problem]:
    """Find what contradicts an optimizer that averages its own steps."""
    optim = recipe.optim
    why = f"optim.name={optim.name} averages its steps instead"
    if optim.schedule != "constant" or optim.schedule_module is not None:
        is_own = optim.schedule_module is not None
        path, value = (
            ("schedule_module", optim.schedule_module) if is_own else ("schedule", optim.schedule)
        )
        fix = "Leave it out" if is_own else "Set optim.schedule=constant, which keeps the warm-up"
        yield Problem(f"optim.{path}", f"={value} changes the learning rate, and {why}. {fix}.")
    if optim.ema_decay is not None:
        text = f"={optim.ema_decay} averages weights for validation and exports, and {why}."
        yield Problem("optim.ema_decay", f"{text} Leave it out.")
    if not optim.betas[0]:
        text = "=0 as its first: the average that is evaluated follows from it. Use 0.9."
        yield Problem("optim.betas", text)
    if task_row(recipe.task.name).reads == "images":
        text = f"={optim.name} evaluates averaged weights, and running statistics of batch "
        text += "normalisation are of the trained ones. Use adamw with optim.ema_decay=0.9999."
        yield Problem("optim.name", text)


def _batch(recipe: Recipe) -> Iterable[Problem]:
    """Find settings of batch and schedule that repeat each other, or that no code would read."""
    optim = recipe.optim
    if optim.batch_per_device is not None and optim.global_batch != "auto":
        text = (
            f"={optim.batch_per_device} and optim.global_batch={optim.global_batch} each say how "
            "many samples a step has: the first on each device, so that the batch follows their "
            "number, the second over all of them. Keep one of them."
        )
        yield Problem("optim.batch_per_device", text)
    if optim.lr_scaling != "none" and optim.batch_per_device is None:
        text = (
            f"={optim.lr_scaling} follows a batch that changes with the devices, and here it is "
            "the same on any number of them. Give optim.batch_per_device in place of "
            "optim.global_batch, or leave it out."
        )
        yield Problem("optim.lr_scaling", text)
    if optim.lr_batch is not None and optim.lr_scaling == "none":
        text = f"={optim.lr_batch} is the batch that optim.lr is for, and optim.lr_scaling=none "
        yield Problem("optim.lr_batch", f"{text}never reads it. Use linear or sqrt there.")
    warmups = {
        "optim.warmup_share": optim.warmup_share,
        "optim.warmup_epochs": optim.warmup_epochs,
        "optim.warmup_steps": None if optim.warmup_steps == "auto" else optim.warmup_steps,
    }
    given = [(path, f"{value:g}") for path, value in warmups.items() if value is not None]
    if len(given) > 1:
        others = " and ".join(f"{path}={value}" for path, value in given[1:])
        text = f"={given[0][1]} and {others} each say how long the warm-up is. Keep one of them."
        yield Problem(given[0][0], text)
    yield from _schedule(optim)


def _schedule(optim: Optim) -> Iterable[Problem]:
    """Settings of one schedule, where another is chosen; and a schedule without its own."""
    for key, schedule in _OF_SCHEDULE.items():
        if key in optim.model_fields_set and optim.schedule != schedule:
            value = getattr(optim, key)
            values = value if isinstance(value, tuple) else (value,)
            shown = ", ".join(v if isinstance(v, str) else f"{v:g}" for v in values)
            text = f"={shown} is of schedule {schedule}, and optim.schedule={optim.schedule} does "
            yield Problem(f"optim.{key}", f"{text}not read it. Use {schedule}, or leave it out.")
    if optim.schedule == "inverse_sqrt":
        for key in ("min_lr_ratio", "decay_steps"):
            if key in optim.model_fields_set:
                text = f"={getattr(optim, key)}: with optim.schedule=inverse_sqrt the rate falls "
                yield Problem(f"optim.{key}", f"{text}for as long as the run. Leave it out.")
    if optim.schedule != "step":
        return
    if not optim.milestones or sorted(set(optim.milestones)) != list(optim.milestones):
        text = "says at which epochs the learning rate falls, each after the one before"
        yield Problem("optim.milestones", f"{text}. Give them, such as [30, 60, 80].")
    for key in ("min_lr_ratio", "decay_steps"):
        if key in optim.model_fields_set:
            text = f"={getattr(optim, key)}: with optim.schedule=step the rate falls by "
            text += "optim.milestone_factor at optim.milestones, and has no other end."
            yield Problem(f"optim.{key}", f"{text} Leave it out.")


_OF_SCHEDULE = {
    "poly_power": "poly",
    "milestones": "step",
    "milestone_factor": "step",
    "decay_share": "wsd",
    "decay_shape": "wsd",
}
"""Setting of ``optim`` -> the one schedule that reads it."""


def _optimizer_states(recipe: Recipe) -> Iterable[Problem]:
    """Find averages that bf16 would freeze: it keeps 8 bits, and rounds smaller changes away."""
    if recipe.precision.optimizer_states == "fp32":
        return
    if has_factored_states(recipe.optim):
        text = f"=bf16 with optim.name={recipe.optim.name}: its states are a few vectors, always "
        yield Problem("precision.optimizer_states", f"{text}fp32. Leave it out.")
    for key, value in factors_of(recipe.optim).items():
        if value > MOST_AVERAGING_IN_BF16:
            text = (
                f"=bf16 with optim.{key} of {value}: a step moves such an average by "
                f"{1 - value:.2g} of a difference, and bf16 rounds changes below 1/256 away. Use "
                f"at most {MOST_AVERAGING_IN_BF16} there, or precision.optimizer_states=fp32."
            )
            yield Problem("precision.optimizer_states", text)


MOST_AVERAGING_IN_BF16 = 0.99
"""An average then settles within 40 % of what it averages; within 8 % at 0.95, the default."""


def _generation(recipe: Recipe) -> Iterable[Problem]:
    task = recipe.task
    if task.generate_tokens and not task_row(task.name).continues_text:
        text = f"={task.generate_tokens}: a model of task.name={task.name} does not continue text. "
        yield Problem("task.generate_tokens", f"{text}Use 0.")
    wanted = {"task.generate_every": task.generate_every, "task.prompts": task.prompts}
    for setting, value in wanted.items():
        if value not in ("end", ()) and not task.generate_tokens:
            shown = json.dumps(value, ensure_ascii=False)
            text = f"={shown} has no effect with task.generate_tokens=0, which generates no text. "
            yield Problem(setting, f"{text}Set task.generate_tokens=64, for example.")
    if task.prompts and task.prompt != TaskSettings().prompt:
        text = "task.prompt and task.prompts both name prompts. Keep task.prompts."
        yield Problem("task.prompt", f"={json.dumps(task.prompt)}: {text}")
    if task.top_k and not task.temperature:
        text = f"={task.top_k} has no effect at temperature 0, where each token is the likeliest. "
        yield Problem("task.top_k", f"{text}Set task.temperature=0.8, or task.top_k=0.")


def _unused_sections(recipe: Recipe) -> Iterable[Problem]:
    """Find settings of other tasks: a recipe may have several launchers, but one task."""
    for key in recipe.task.model_extra or ():
        if key != section_key(recipe.task.name):
            text = f"holds settings of a task, and task.name={recipe.task.name} does not read them."
            yield Problem(f"task.{key}", f"{text} Name that task, or leave them out.")


def _evaluation(recipe: Recipe) -> Iterable[Problem]:
    task = recipe.task
    if task.eval_every_steps is not None and task.eval_every_epochs is not None:
        text = "eval_every_steps and eval_every_epochs say the same in two ways. Keep one."
        yield Problem("task", text)
    wants = {
        "task.eval_every_steps": task.eval_every_steps,
        "task.eval_every_epochs": task.eval_every_epochs,
        "task.generate_every": task.generate_every == "validation" or None,
        "run.target": recipe.run.target,
        "run.patience": recipe.run.patience,
        "data.eval_sets": recipe.data.eval_sets or None,
        "data.eval_tasks": recipe.data.eval_tasks or None,
    }
    if recipe.run.patience is not None and not (task.eval_every_steps or task.eval_every_epochs):
        text = f"={recipe.run.patience} counts validations, and there is one at the end only. Set "
        yield Problem("run.patience", f"{text}task.eval_every_steps=100, for example.")
    wanting = [name for name, value in wants.items() if value is not None]
    if wanting and recipe.data.eval_fraction == 0:
        text = (
            f"=0 leaves no validation split, but {wanting[0]} needs an evaluation. Use 0.05, for "
            "example."
        )
        yield Problem("data.eval_fraction", text)


def _target(recipe: Recipe) -> Iterable[Problem]:
    """A metric that the task does not have would never be reached."""
    metrics = list(metrics_of(recipe.task, recipe.data.eval_sets, recipe.data.eval_tasks))
    for name in recipe.run.target or ():
        if name not in metrics:
            near = difflib.get_close_matches(name, metrics, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(metrics)}."
            text = f"names {_show(name)}, which is not a metric of {recipe.task.name}. {hint}"
            yield Problem("run.target", text)


def _cluster(recipe: Recipe) -> Iterable[Problem]:
    nodes, elastic = recipe.cluster.nodes, recipe.elastic
    if elastic.min_nodes != "auto" and elastic.min_nodes > nodes:
        text = f"={elastic.min_nodes} is more than cluster.nodes={nodes}. Use at most {nodes}."
        yield Problem("elastic.min_nodes", text)
    if elastic.max_nodes != "auto" and elastic.max_nodes < nodes:
        text = f"={elastic.max_nodes} is less than cluster.nodes={nodes}. Use at least {nodes}."
        yield Problem("elastic.max_nodes", text)
    yield from _check_peer_snapshots(recipe)
    try:
        parse_rendezvous_endpoint(elastic.rendezvous)
    except RequestError as error:
        yield Problem("elastic.rendezvous", str(error))


def _check_peer_snapshots(recipe: Recipe) -> Iterable[Problem]:
    elastic, setting = recipe.elastic, "elastic.snapshot_neighbour"
    if elastic.snapshot_neighbour is not True:
        return
    if not snapshots_enabled(recipe):
        text = "=true copies snapshots, but snapshots are off. Set elastic.snapshot_every=auto."
        yield Problem(setting, text)
    if recipe.cluster.nodes == 1 and elastic.max_nodes in ("auto", 1):
        text = "=true needs a second node, which keeps the copies. Leave it at auto."
        yield Problem(setting, text)


def _device(recipe: Recipe) -> Iterable[Problem]:
    """Words for an accelerator that torch has another name for; any other may be a vendor's."""
    wrong = device_kind_error(recipe.cluster.device)
    if wrong is not None:
        yield Problem("cluster.device", wrong)


def _machines(recipe: Recipe) -> Iterable[Problem]:
    """Check the machines that cluster.instance or cluster.file names."""
    cluster = recipe.cluster
    if cluster.instance is not None and cluster.file is not None:
        text = f"={_show(cluster.file)} and cluster.instance={cluster.instance} each name the "
        yield Problem("cluster.file", f"{text}machines. Keep one of them.")
        return
    try:
        chosen = chosen_cluster(cluster)
        if chosen is not None and cluster.device not in ("auto", "cpu", chosen.accelerator.device):
            text = (
                f"={cluster.device} but {chosen.name} has {chosen.accelerator.name}, which is "
                f"{chosen.accelerator.device}. Use auto, or other machines."
            )
            yield Problem("cluster.device", text)
    except RecipeError as error:
        for problem in error.problems:
            yield Problem("cluster.file", f"={_show(cluster.file)}: {problem}")
    except RequestError as error:
        text = str(error)
        setting = text.partition("=")[0] if text.startswith("cluster.") else "cluster.file"
        yield Problem(setting, text.removeprefix(setting))


def _bits(recipe: Recipe) -> Iterable[Problem]:
    every, parallel = recipe.elastic.check_bits_every, recipe.parallel
    if every is None:
        return
    for axis in ("tp", "pp", "cp", "ep"):
        if (degree := getattr(parallel, axis)) > 1:
            text = (
                f"={every} compares ranks that compute the same, and with parallel.{axis}={degree} "
                "each computes a part of its own. Only data axes can be checked: leave one of the "
                "two out."
            )
            yield Problem("elastic.check_bits_every", text)


_CHECKS: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    _credentials,
    _data_format,
    check_data,
    check_conversations,
    _length,
    _model,
    check_custom_module,
    check_own_code,
    check_images,
    check_labels,
    check_preference,
    check_lora,
    _secrets,
    check_environment,
    _fit,
    _generation,
    check_precision,
    check_reproducible,
    _optim,
    _batch,
    _optimizer_states,
    _evaluation,
    _target,
    _cluster,
    _device,
    _machines,
    check_launch,
    check_bucket,
    check_timeouts,
    check_node_exclusion,
    check_alerts,
    check_profile,
    check_exporters,
    check_tags,
    check_pass_through,
    _bits,
)


def _show(value: object) -> str:
    return HIDDEN if find_credential(str(value)) else str(value)


def check_trainable(recipe: Recipe) -> list[Problem]:
    """Every setting of a recipe that `plan` can predict and `train` cannot carry out yet.

    A model in a folder or on the hub is judged by its config.json.
    """
    return [
        *settings_planned_only(recipe),
        *_untrainable_machines(recipe),
        *_untrainable_model(recipe),
    ]


def _untrainable_model(recipe: Recipe) -> Iterable[Problem]:
    named = preset_named(recipe.model.preset)
    if named is not None and named.shape.is_planned_only:
        what = "a model with latent attention"
        remedy = "a preset of another family, such as qwen3-30b-a3b"
        yield planned_only("model.preset", recipe.model.preset, what, remedy)


def _untrainable_machines(recipe: Recipe) -> Iterable[Problem]:
    cluster, chosen = recipe.cluster, _chosen(recipe)
    if chosen is None or chosen.accelerator.device != "xla" or cluster.device == "xla":
        return  # or told already
    setting = "file" if cluster.instance is None else "instance"
    what = f"a run on {chosen.accelerator.name}"
    yield planned_only(f"cluster.{setting}", getattr(cluster, setting), what, DEVICES)


def _chosen(recipe: Recipe) -> ClusterHardware | None:
    """The machines that a recipe names; None: this one, or another check says what is wrong."""
    try:
        return chosen_cluster(recipe.cluster)
    except RequestError:
        return None
