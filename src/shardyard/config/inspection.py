"""Inspection of a model's folder before anything is planned, launched or trained.

Weights are compared with config.json by their headers, and a tokenizer has to come with them: both
would otherwise show as a run that trains another model. Needs no torch and reads no tensor, but for
the head of a tied model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.model.source import has_tokenizer
from shardyard.config.schema.recipe import Lora, Recipe
from shardyard.config.tasks import task_row
from shardyard.config.weight_files import has_weight_files, read_weight_files
from shardyard.config.weights_match import Match, match_weights
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.families.file_tensors import stored_names
from shardyard.families.lora import trained_modules
from shardyard.families.shape import ModelShape
from shardyard.file_faults import content_error
from shardyard.io.digests import StoredTensor

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_OLDER_TOKENIZERS = ("tokenizer.model", "spiece.model", "vocab.json")


def loads_weights(recipe: Recipe) -> bool:
    """Whether a recipe begins from the weights of a folder or of the hub."""
    model = recipe.model
    return model.weights != "random" and (model.path is not None or model.hub is not None)


def inspect_folder(
    recipe: Recipe, folder: Path, shape: ModelShape | None, *, has_weights: bool = True
) -> Match | None:
    """Compare the weights of a model's folder with its config.json, and look for its tokenizer.

    Args:
        folder: Folder of ``model.path``, or what was fetched of ``model.hub``.
        shape: Shape in config.json, of a known family; None: only files are checked.
        has_weights: Whether weights have been fetched; of the hub an index may be there without.

    Returns:
        The shape that the files decide on, with notes; None: there are no weights to compare.

    Raises:
        RecipeError: The weights are not those of config.json, damaged, or without a tokenizer; all
            that is wrong.
    """
    if not loads_weights(recipe):
        return None
    setting = "model.path" if recipe.model.path is not None else "model.hub"
    found, match = list(_check_tokenizer(recipe, folder)), None
    if has_weights and has_weight_files(folder):
        try:
            stored = read_weight_files(folder)
        except RequestError as error:
            found.append(Problem(setting, str(error)))
        else:
            match = None if shape is None else match_weights(folder, stored, shape)
            problems = () if match is None else match.errors
            found += [Problem(setting, problem) for problem in problems]
            if match is not None:
                found += _random_pooler(recipe.model.lora, folder, stored, match.shape)
    if found:
        raise RecipeError(found)
    return match


def _random_pooler(
    lora: Lora, folder: Path, stored: Mapping[str, StoredTensor], shape: ModelShape
) -> Iterator[Problem]:
    """A pooler that the folder lacks, and that adapters would leave random."""
    row = shape.family.pooler
    if lora.rank is None or shape.label_head is None or row is None:
        return
    name, pooler = f"{row.module}.{row.parameter}", row.module.split(".")[-2]
    is_stored = name in stored_names(stored, (name,), shape.family)
    if not is_stored and name not in trained_modules(shape, lora.modules_to_save):
        saved = ", ".join((*lora.modules_to_save, pooler))
        text = f": {folder} has no {row.module}, which would begin at random and stay so. Train it "
        text += f"next to the adapters: model.lora.modules_to_save=[{saved}]."
        yield Problem("model.lora.modules_to_save", text)


def tokenizer_notes(recipe: Recipe, folder: Path | None) -> list[str]:
    """Warn of a new tokenizer for weights that were learnt with another one."""
    if recipe.data.tokenizer != "train" or folder is None or not loads_weights(recipe):
        return []
    return [
        f"data.tokenizer=train: {folder} brings weights that were learnt with other tokens, so the "
        "rows of its table begin with another meaning. data.tokenizer=auto keeps its tokenizer."
    ]


def _check_tokenizer(recipe: Recipe, folder: Path) -> list[Problem]:
    if task_row(recipe.task.name).reads == "images" or recipe.data.tokenizer != "auto":
        return []
    if DATA_FORMATS[recipe.data.format].holds_samples:
        return []
    faults = []
    for name in (*TOKENIZER_FILES, "vocab.txt"):
        try:
            why = content_error(folder / name, is_text=name == "vocab.txt")
        except OSError as error:
            why = f"cannot be read: {error.strerror}."
        if why is not None:
            faults.append(Problem("data.tokenizer", f"{folder / name} {why}"))
    is_incomplete = recipe.model.path is not None and not has_weight_files(folder)
    if faults or has_tokenizer(folder) or is_incomplete:
        return faults
    older = [name for name in _OLDER_TOKENIZERS if (folder / name).is_file()]
    if older:
        text = (
            f"{folder} has only {', '.join(older)}, the older form of a tokenizer. Save it once "
            "with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    else:
        text = (
            f"{folder} has weights and no tokenizer.json, so the token of each row of its table is "
            "unknown. Copy the model's tokenizer.json there, or name its tokenizer: "
            "data.tokenizer=FOLDER. To train a new tokenizer all the same, set "
            "data.tokenizer=train or model.weights=random."
        )
    return [Problem("data.tokenizer", text)]
