"""Check the user's own functions in a recipe: source, arguments and the layouts they work with.

Nothing is imported here; ``own_code.py`` reads the source.
"""

from collections.abc import Iterable

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.schema.data import Data, Images
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import TASKS, own_metric_name, task_row
from shardyard.errors import Problem
from shardyard.own_code import Contract, find_source

LOSS = Contract(
    call="loss(outputs, batch)",
    arguments=2,
    returns="two things: the sum of the losses of the batch (a tensor of one number, not their "
    "mean) and how many they are",
)
METRIC = Contract(
    call="metric(outputs, batch)",
    arguments=2,
    returns="a value for each sample, a tensor (samples,); or two such tensors, sums and counts, "
    "whose totals are divided once",
)
DATASET = Contract(
    call="dataset(split, **data.module_settings)",
    arguments=None,
    returns="the dataset of split 'train' or 'eval', with items by number (__getitem__ and "
    "__len__) or to iterate over; for 'eval' also None: then data.eval_fraction is held out",
)
CALLBACK = Contract(
    call="callback(kind, values)",
    arguments=2,
    returns="nothing: kind is step, evaluation or checkpoint, and values a dict",
)
OPTIMIZER = Contract(
    call="optimizer(params, lr=..., **optim.module_settings)",
    arguments=None,
    returns="a torch.optim.Optimizer of all params",
)
SCHEDULE = Contract(
    call="schedule(step, steps)",
    arguments=2,
    returns="a factor of optim.lr, a finite number of at least 0, that depends only on the two: "
    "the step (1 is the first) and optim.decay_steps",
)


def own_functions(recipe: Recipe) -> dict[str, tuple[str, Contract]]:
    """Import path and contract of every function that a recipe names, by its setting."""
    named: dict[str, tuple[str, Contract]] = {}
    if recipe.task.loss is not None:
        named["task.loss"] = (recipe.task.loss, LOSS)
    for path in recipe.task.metrics:
        named[f"task.metrics.{own_metric_name(path)}"] = (path, METRIC)
    for path in recipe.observe.callbacks:
        named[f"observe.callbacks.{own_metric_name(path)}"] = (path, CALLBACK)
    if recipe.data.module is not None:
        named["data.module"] = (recipe.data.module, DATASET)
    for place, share in enumerate(recipe.data.mixture):
        if share.module is not None:
            named[f"data.mixture[{place}].module"] = (share.module, DATASET)
    if recipe.optim.module is not None:
        named["optim.module"] = (recipe.optim.module, OPTIMIZER)
    if recipe.optim.schedule_module is not None:
        named["optim.schedule_module"] = (recipe.optim.schedule_module, SCHEDULE)
    return named


def check_own_code(recipe: Recipe) -> Iterable[Problem]:
    """Everything that is wrong with the user's own functions, as far as their source says it."""
    for setting, (path, contract) in own_functions(recipe).items():
        found = find_source(path, contract)
        # A node unpacks launch.code after this check, and its workers import from there.
        if found.wrong and not (found.is_missing and recipe.launch.code):
            lists = ("task.metrics", "observe.callbacks")
            of_list = next((each for each in lists if setting.startswith(f"{each}.")), setting)
            yield Problem(of_list, found.wrong)
    yield from _check_metric_names(recipe)
    if recipe.task.loss is not None or recipe.task.metrics:
        yield from _check_objective(recipe)
    yield from _check_dataset(recipe)
    yield from _check_optimizer(recipe)
    yield from _check_schedule(recipe)


def _check_metric_names(recipe: Recipe) -> Iterable[Problem]:
    task = recipe.task
    names = [own_metric_name(path) for path in task.metrics]
    known = task_row(task.name).targets
    for name in dict.fromkeys(names):
        if name in known:
            text = f"names {name}, which {task.name} has already. Give your function another name."
            yield Problem("task.metrics", text)
        elif names.count(name) > 1:
            text = f"names {name} twice, and evaluations show one number of a name. Rename one."
            yield Problem("task.metrics", text)
    for name in task.lower_is_better:
        if name not in names:
            has = f" It has {', '.join(names)}." if names else ""
            text = f"names {name}, which is no function of task.metrics.{has}"
            yield Problem("task.lower_is_better", text)
    has_eval_source = recipe.data.eval_source is not None or recipe.data.module is not None
    if task.metrics and recipe.data.eval_fraction == 0 and not has_eval_source:
        text = "=0 holds nothing out, but task.metrics needs a validation split. Use 0.05, say."
        yield Problem("data.eval_fraction", text)


def _check_objective(recipe: Recipe) -> Iterable[Problem]:
    """Layouts and settings with which no function gets the outputs of whole samples."""
    task, parallel, setting = recipe.task, recipe.parallel, "task.loss"
    if task.loss is None:
        setting = "task.metrics"
    if not task_row(task.name).accepts_own_loss:
        others = " or ".join(name for name, row in TASKS.items() if row.accepts_own_loss)
        text = f"is not supported with task.name={task.name}, whose loss has parts of its own."
        yield Problem(setting, f"{text} Use task.name={others}.")
    for axis, splits in (("cp", "the tokens of a sample"), ("pp", "the blocks")):
        if (degree := getattr(parallel, axis)) > 1:
            text = f"={degree}: {setting} gets the outputs of whole samples, and {axis} splits "
            text += f"{splits}. Use {axis}=1 with dp_replicate, dp_shard or tp."
            yield Problem(f"parallel.{axis}", text)
    if task.loss is None:
        return
    if isinstance(recipe.memory.loss_chunk, int):
        text = f"={recipe.memory.loss_chunk}: task.loss gets all outputs of a batch. Use none."
        yield Problem("memory.loss_chunk", text)
    if recipe.precision.reduce == "exact":
        text = "=exact: the sums inside of task.loss are not known. Use precision.reduce=fp32."
        yield Problem("precision.reduce", text)
    if recipe.task.label_smoothing:
        text = f"={task.label_smoothing} smooths the task's own loss. Smooth in task.loss, use 0."
        yield Problem("task.label_smoothing", text)


_OF_IMAGE_FILES = (
    "pack", "check", "broken", "image_key", "label_key", "threads", "cache_mib", "complete",
    "crop_area", "crop_ratio", "flip", "interpolation", "rand_augment", "rand_augment_magnitude",
    "erase", "eval_crop",
)  # fmt: skip
"""Settings of ``data.images`` that are read where image files become arrays."""


def _check_dataset(recipe: Recipe) -> Iterable[Problem]:
    """Settings that name other data, or that only a dataset of the user's own reads."""
    data, given = recipe.data, recipe.data.model_fields_set
    if data.module is None:
        for key in ("module_settings", "module_workers"):
            is_mixed = key == "module_workers" and any(share.module for share in data.mixture)
            if getattr(data, key) not in ({}, "auto") and not is_mixed:
                text = "is for data.module, and the recipe has none. Set it, or leave this out."
                yield Problem(f"data.{key}", text)
        return
    for key in ("source", "mixture", "eval_source", "eval_sets"):
        if key in given and getattr(data, key) != getattr(Data(), key):
            text = f"and data.module={data.module} both say where data comes from. Remove one "
            text += "of the two from the recipe."
            yield Problem(f"data.{key}", text)
    if task_row(recipe.task.name).reads == "images":
        for key in _OF_IMAGE_FILES:
            if key in data.images.model_fields_set:
                value = getattr(data.images, key)
                if value != getattr(Images(), key):
                    shown = list(value) if isinstance(value, tuple) else value
                    text = f"={shown} is for image files, and data.module={data.module} makes "
                    yield Problem(f"data.images.{key}", f"{text}its images. Do it there.")
    if "split" in data.module_settings:
        text = "has split, which the function gets anyway. Leave it out."
        yield Problem("data.module_settings", text)
    if DATA_FORMATS.get(data.format) is not None and DATA_FORMATS[data.format].only:
        text = f"={data.format} names files, and data.module={data.module} makes the data. Leave "
        yield Problem("data.format", f"{text}it out.")


_OF_OPTIMIZERS = (
    "betas", "eps", "weight_decay", "decay_vectors", "momentum", "nesterov", "trust_coefficient",
)  # fmt: skip
"""Settings of ``optim`` that only Shardyard's own optimizers read."""


def _check_optimizer(recipe: Recipe) -> Iterable[Problem]:
    """Settings that an optimizer of the user's own would not read, or that need ours."""
    optim, given = recipe.optim, recipe.optim.model_fields_set
    if optim.module is None:
        for key in ("module_settings", "module_states"):
            if getattr(optim, key):
                text = "is for optim.module, and the recipe has none. Set it, or leave this out."
                yield Problem(f"optim.{key}", text)
        return
    if "name" in given:
        text = f"={optim.name} and optim.module={optim.module} each name an optimizer. Keep one."
        yield Problem("optim.name", text)
    for key in _OF_OPTIMIZERS:
        if key in given:
            value = getattr(optim, key)
            shown = list(value) if isinstance(value, tuple) else value
            text = f"={shown} is read by Shardyard's own optimizers only. Give it to yours: "
            yield Problem(f"optim.{key}", f"{text}optim.module_settings={{{key}: {shown}}}.")
    for key in ("params", "lr"):
        if key in optim.module_settings:
            text = f"has {key}, which the optimizer gets anyway. Leave it out"
            rate = ", and set optim.lr." if key == "lr" else "."
            yield Problem("optim.module_settings", f"{text}{rate}")
    precision, offload = recipe.precision, recipe.memory.offload
    what = "an optimizer of your own"
    if precision.optimizer_states != "fp32":
        text = f"={precision.optimizer_states}: {what} chooses the format of its states. Use fp32."
        yield Problem("precision.optimizer_states", text)
    if precision.reduce == "exact":
        text = f"=exact cuts shards into pieces that {what} does not know. Use fp32."
        yield Problem("precision.reduce", text)
    if offload in ("optimizer", "params"):
        text = f"={offload} moves states, and those of {what} stay where it made them. Use none."
        yield Problem("memory.offload", text)


_OF_SCHEDULES = (
    "schedule", "warmup_steps", "warmup_share", "warmup_epochs", "min_lr_ratio", "milestones",
    "milestone_factor", "poly_power", "decay_share", "decay_shape",
)  # fmt: skip
"""Settings of ``optim`` that only Shardyard's own schedules read."""


def _check_schedule(recipe: Recipe) -> Iterable[Problem]:
    """Settings of a schedule that a function of the user's own would not read."""
    optim = recipe.optim
    if optim.schedule_module is None:
        return
    for key in _OF_SCHEDULES:
        if key in optim.model_fields_set and getattr(optim, key) not in (None, "auto"):
            value = getattr(optim, key)
            shown = list(value) if isinstance(value, tuple) else value
            text = f"={shown} is not read with optim.schedule_module={optim.schedule_module}, "
            text += "which decides all factors. Leave it out."
            yield Problem(f"optim.{key}", text)
