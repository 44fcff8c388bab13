"""What can be planned but not trained yet: asked by the verbs that prepare or start a training.

The planner looks further than the training half has come; `plan` and `config` accept what is
refused here.
"""

from collections.abc import Callable, Iterable

from shardyard.config.legality import FP8_MULTIPLE
from shardyard.config.presets import PRESETS, ModelShape
from shardyard.config.schema import Recipe
from shardyard.errors import Problem, RequestError
from shardyard.hardware.chosen import chosen_cluster

TRAINED_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "bert")
"""Model types that ``models/families.py`` knows the blocks of; it needs torch, this does not."""


_DEVICES_WITHOUT_FP8 = ("cpu", "xpu", "hpu", "xla")
"""In torchao, whatever they can do by themselves."""


def trainable_problems(recipe: Recipe) -> list[Problem]:
    """Every setting of a recipe that `plan` can predict and `train` cannot carry out yet.

    A model in a folder or on the hub is judged by ``config/model_source.py``, which reads its
    config.json.
    """
    return [problem for look in _LOOKS for problem in look(recipe)]


def _precision(recipe: Recipe) -> Iterable[Problem]:
    if recipe.precision.compute == "fp16":
        yield _planned_only("precision.compute", "fp16", "a run in fp16", "bf16, fp32 or fp8")
    if recipe.precision.compute != "fp8":
        return
    lacking = _without_fp8(recipe)
    if lacking is not None:
        text = f"=fp8: torchao has no fp8 products for {lacking}. Use bf16 or fp32."
        yield Problem("precision.compute", text)
    seq_len, pieces = recipe.data.seq_len, FP8_MULTIPLE * recipe.parallel.cp
    if isinstance(seq_len, int) and seq_len % pieces:
        text = (
            f"=fp8 needs samples of a multiple of {pieces} tokens ({FP8_MULTIPLE} x cp): tokens "
            f"are a side of what is multiplied in the backward pass. data.seq_len is {seq_len}. "
            f"Use data.seq_len={-(-seq_len // pieces) * pieces}, or bf16."
        )
        yield Problem("precision.compute", text)


def _without_fp8(recipe: Recipe) -> str | None:
    """The device that a recipe names, if fp8 cannot be multiplied there."""
    if recipe.cluster.device in _DEVICES_WITHOUT_FP8:
        return recipe.cluster.device
    try:
        cluster = chosen_cluster(recipe.cluster)
    except RequestError:
        return None  # another check says what is wrong with it
    if cluster is None:
        return None  # this machine: asked when it has been looked at
    accelerator = cluster.accelerator
    lacks = accelerator.device in _DEVICES_WITHOUT_FP8 or "fp8" not in accelerator.peak_tflops
    return accelerator.name if lacks else None


def _offload(recipe: Recipe) -> Iterable[Problem]:
    offload = recipe.memory.offload
    if offload in ("params", "optimizer"):
        remedy = "activations or none; memory.recompute and parallel.zero=3 save memory too"
        yield _planned_only("memory.offload", offload, f"offloading {offload}", remedy)


def _device(recipe: Recipe) -> Iterable[Problem]:
    if recipe.cluster.device == "xla":
        remedy = "a machine with cuda, xpu or hpu"
        yield _planned_only("cluster.device", "xla", "a run on Trainium or TPU", remedy)


def _family(recipe: Recipe) -> Iterable[Problem]:
    preset = PRESETS.get(recipe.model.preset or "")
    if preset is None or preset.shape.model_type in TRAINED_MODEL_TYPES:
        return
    others = [
        name for name, other in PRESETS.items() if other.shape.model_type in TRAINED_MODEL_TYPES
    ]
    what = f"a model of type {preset.shape.model_type}"
    remedy = f"a preset of {' or '.join(TRAINED_MODEL_TYPES)}: {', '.join(others)}"
    yield _planned_only("model.preset", recipe.model.preset, what, remedy)


def _task(recipe: Recipe) -> Iterable[Problem]:
    preset, task = PRESETS.get(recipe.model.preset or ""), recipe.task
    if preset is not None:
        yield from wrong_task(recipe, preset.shape)
    if task.name == "masked_lm" and task.generate_tokens:
        text = f"={task.generate_tokens}: a model that fills gaps does not continue text. Use 0."
        yield Problem("task.generate_tokens", text)


def _compile(recipe: Recipe) -> Iterable[Problem]:
    preset = PRESETS.get(recipe.model.preset or "")
    yield from nothing_to_compile(recipe, None if preset is None else preset.shape)


def nothing_to_compile(recipe: Recipe, shape: ModelShape | None) -> Iterable[Problem]:
    """Compiled blocks that are recomputed, and that torch cannot trace as a whole.

    It would run them operator by operator and say so nowhere.
    """
    recompute, tp = recipe.memory.recompute, recipe.parallel.tp
    if not recipe.model.compile or recompute == "none":
        return
    has_experts = shape is not None and shape.num_experts > 0
    if tp > 1 or has_experts:
        what = f"parallel.tp={tp}" if tp > 1 else "experts"
        text = (
            f"=true with memory.recompute={recompute} and {what}: torch compiles what is "
            "recomputed as a whole or not at all, and cannot trace this. Nothing would be "
            "compiled. Use false, or memory.recompute=none."
        )
        yield Problem("model.compile", text)


def wrong_task(recipe: Recipe, shape: ModelShape) -> Iterable[Problem]:
    """A task that the model cannot learn by the way its tokens see each other."""
    model, task = recipe.model, recipe.task.name
    if shape.is_causal != (task == "causal_lm"):
        fits = "causal_lm" if shape.is_causal else "masked_lm"
        sees = "earlier tokens alone" if shape.is_causal else "tokens on both sides"
        name = model.preset or model.path or model.hub
        yield Problem("task.name", f"={task}: in {name} a token sees {sees}. Use task.name={fits}.")


_LOOKS: tuple[Callable[[Recipe], Iterable[Problem]], ...] = (
    _precision,
    _offload,
    _device,
    _family,
    _task,
    _compile,
)


def _planned_only(path: str, value: object, what: str, remedy: str) -> Problem:
    return Problem(path, f"={value}: {what} can be planned, not trained yet. Use {remedy}.")
