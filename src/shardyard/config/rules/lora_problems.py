"""What a recipe with adapters (LoRA) may not ask: what is not built, and what says nothing."""

from collections.abc import Iterable

from shardyard.config.schema.recipe import Recipe
from shardyard.errors import Problem


def lora_problems(recipe: Recipe) -> Iterable[Problem]:
    """Everything that is wrong with ``model.lora`` before the model's shape is known."""
    model, lora = recipe.model, recipe.model.lora
    if lora.rank is None:
        for key in sorted(lora.model_fields_set - {"rank"}):
            text = "says how adapters are, and without model.lora.rank there are none. Give"
            yield Problem(f"model.lora.{key}", f"{text} model.lora.rank too, or leave it out.")
        return
    setting = "model.lora.rank"
    if model.module is not None:
        text = f"={lora.rank} puts adapters beside known matrices, and what is inside of "
        yield Problem(setting, f"{text}model.module is not known. Put them into the module.")
    if model.frozen:
        text = f"={', '.join(model.frozen)} with model.lora.rank={lora.rank}: adapters alone are "
        text += "trained, and all else is frozen. Leave it out."
        yield Problem("model.frozen", text)
    if recipe.precision.compute == "fp8":
        text = f"={lora.rank} with precision.compute=fp8: adapters beside fp8 products are not "
        yield Problem(setting, f"{text}built. Use precision.compute=bf16.")
