"""The recipe of each source of a mixture, as if it were all of the data."""

from shardyard.config.schema.data import Data, Share
from shardyard.config.schema.recipe import Recipe


def single_source_recipes(recipe: Recipe) -> list[Recipe]:
    """The recipe of each source of a mixture; the recipe itself where there is none."""
    shares = recipe.data.mixture
    return [source_recipe(recipe, share) for share in shares] or [recipe]


def source_recipe(recipe: Recipe, share: Share) -> Recipe:
    """The recipe of one source of a mixture."""
    data = recipe.data
    update = {
        "mixture": (),
        "source": Data().source if share.source is None else share.source,
        "module": share.module,
        "module_settings": share.module_settings,
        "eval_source": share.eval_source,
        "format": data.format if share.format is None else share.format,
        "text_key": data.text_key if share.text_key is None else share.text_key,
    }
    return recipe.model_copy(update={"data": data.model_copy(update=update)})


def recipe_of_items(source: Recipe) -> Recipe:
    """The recipe of a source of items: how the other sources make samples of text is left out."""
    usual = Data()
    update = {key: getattr(usual, key) for key in ("pack", "bos", "tokenizer_kind")}
    update["attend_across_documents"] = source.data.attends_across
    return source.model_copy(update={"data": source.data.model_copy(update=update)})
