"""Sources of a model's shape and files: a preset, a Hugging Face folder, or the hub.

``families/config_json.py`` says what a config.json means.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardyard.config.formulas import seq_len_of
from shardyard.config.model.hub import HubRequest, LogFunction, fetch
from shardyard.config.model_sizes import sizes_of
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.rules.custom_module import is_generic
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.config.secrets import show
from shardyard.config.tasks import task_row
from shardyard.config.weight_files import ADAPTER, INDEX, SINGLE, has_weight_files
from shardyard.errors import RequestError, StorageError
from shardyard.families.config_json import shape_of_config
from shardyard.families.images.network import ImageNetwork
from shardyard.families.images.registry import IMAGE_PRESETS, KINDS, is_image_config
from shardyard.families.presets import PRESETS
from shardyard.families.registry import family_of, is_family
from shardyard.families.shape import ModelShape
from shardyard.file_faults import broken_link_error, content_error
from shardyard.io.files import MOST_JSON_BYTES, parse_json, read_user_file

_USUAL_LABELS = 2


def model_folder(
    model: Model,
    *,
    needs_weights: bool = True,
    commit: str | None = None,
    log: LogFunction = lambda _: None,
) -> Path | None:
    """Return the folder of the model's own files on this machine, or None for a preset.

    Args:
        needs_weights: Whether weights that the recipe loads are fetched too, and must be there.
            Without them, the cache of this machine is enough, as model.dir may be remote.
        commit: Commit of the hub that the run has found before; it is taken again.
        log: Called before a long fetch.

    Raises:
        RequestError: There is no such folder or repository.
        AccessError: The hub asks for permission.
        CapacityError: The hub cannot be reached.
        StorageError: There is no room for what is fetched.
    """
    loads = needs_weights and model.weights != "random"
    if model.path is not None:
        folder = Path(model.path).expanduser().resolve()
        if not folder.is_dir():
            link = broken_link_error(Path(model.path).expanduser())
            if link is not None:
                raise RequestError(f"model.path={model.path} {link}")
            is_file = "is a file" if folder.is_file() else "does not exist"
            raise RequestError(
                f"model.path={model.path} {is_file}. Give a Hugging Face folder that holds "
                "config.json, or name a hub repository with model.hub."
            )
        if not os.path.lexists(folder / "config.json"):
            raise RequestError(
                f"model.path={model.path}: {folder} holds no config.json. {_other_folder(folder)}"
            )
    elif model.hub is not None:
        wanted = HubRequest(
            kind="model.hub",
            name=model.hub,
            revision=commit or model.revision,
            level="weights" if loads else "config",
        )
        store = None if model.dir is None or not needs_weights else Path(model.dir).expanduser()
        folder = fetch(wanted, store, log=log)
    else:
        return None
    if loads:
        _require_weights(folder, model)
    return folder


def _other_folder(folder: Path) -> str:
    """Say what to write for a folder that is no model's, by what it is."""
    if (folder / ADAPTER).is_file():
        return (
            "It is an adapter. Give its base in model.path, and the adapter in model.lora.path "
            "with its model.lora.rank."
        )
    checkpoint = folder.name.startswith("step-") and (folder / "manifest.json").is_file()
    run = folder.parent.parent if checkpoint else folder
    if (run / "recipe.yaml").is_file():
        step = f"@{folder.name.removeprefix('step-').lstrip('0')}" if checkpoint else ""
        return f"It is a run's. Leave model.path out, and start from the run: run.from={run}{step}."
    return "Give the folder that save_pretrained wrote, or a snapshot of the hub."


def has_tokenizer(folder: Path | None) -> bool:
    """Whether the model brings a tokenizer that can be opened."""
    names = ("tokenizer.json", "vocab.txt")
    return folder is not None and any((folder / name).is_file() for name in names)


def shape_or_none(recipe: Recipe, folder: Path | None, vocab_size: int) -> ModelShape | None:
    """Return the shape of ``read_shape``, with the heads that the task needs.

    None for a module of the user's own, which is unknown before it runs, and for a network that
    classifies images.
    """
    if recipe.model.module is not None or task_row(recipe.task.name).reads == "images":
        return None
    shape = with_heads(read_shape(recipe.model, folder, vocab_size), recipe.task.name)
    if shape.label_head is None or folder is None:
        return shape
    config = _read_config(folder / "config.json")
    dropped = config.get("classifier_dropout")
    drops = shape.family.head_dropout is not None and recipe.model.dropout == "auto"
    if drops and dropped not in (None, shape.hidden_dropout):
        raise RequestError(
            f"{folder / 'config.json'}: classifier_dropout={dropped}, and the rest of the model "
            f"drops {shape.hidden_dropout}. Shardyard drops one share everywhere. Set "
            f"model.dropout={shape.hidden_dropout}, or another share."
        )
    own = config.get("id2label")
    if not isinstance(own, dict) or not own or task_row(recipe.task.name).gives_reward:
        return shape
    return replace(shape, num_labels=len(own))


def network_or_none(recipe: Recipe, folder: Path | None) -> ImageNetwork | None:
    """Return the image network of the preset or the folder's config.json; None: for text.

    Raises:
        RequestError: config.json is missing or damaged, or says something that is not built.
    """
    if task_row(recipe.task.name).reads != "images":
        return None
    if folder is None:
        return IMAGE_PRESETS[str(recipe.model.preset)]
    path = folder / "config.json"
    content = _read_config(path)
    kind = KINDS.get(str(content.get("model_type")))
    if kind is None:
        raise RequestError(
            f"{path}: model_type={content.get('model_type')!r} is not a known network for images. "
            f"Known are {', '.join(KINDS)}."
        )
    return kind.of_config(content, str(path))


def with_heads(shape: ModelShape, task: str) -> ModelShape:
    """A shape with what a task needs of it, where its family has that.

    The number of labels is a usual one, until the data is known (``with_labels``).
    """
    row = task_row(task)
    if row.labelled is not None or row.gives_reward:
        return replace(
            shape, judges_pairs=False, label_head=row.labelled or "samples",
            num_labels=1 if row.gives_reward else _USUAL_LABELS, tie_word_embeddings=False,
        )  # fmt: skip
    judges_pairs = row.judges_pairs and shape.family.pair_head is not None
    return replace(shape, judges_pairs=judges_pairs)


def with_labels(shape: ModelShape | None, data: DatasetMetadata) -> ModelShape | None:
    """A shape with a head for the labels of prepared data, where its head is over labels."""
    if shape is None or shape.label_head is None or data.num_labels is None:
        return shape
    return replace(shape, num_labels=data.num_labels, label_names=data.label_names)


def read_shape(model: Model, folder: Path | None, vocab_size: int) -> ModelShape:
    """Sizes of the model, from its folder's config.json, or from its preset where it has none.

    Args:
        folder: What ``model_folder`` returned.
        vocab_size: That of the tokenizer; used by presets that leave theirs open.

    Raises:
        RequestError: config.json is missing or damaged, says something that is not built, or is
            not what the recipe says of the model's shape.
    """
    stated = stated_shape(model, vocab_size)
    if folder is None:
        assert stated is not None, "check() saw to it that a model is named"
        return stated
    path = folder / "config.json"
    shape = _parse_shape(_read_config(path), str(path), model)
    if stated is not None:
        _check_same_shape(model, stated, shape, path)
    return shape


def stated_shape(model: Model, vocab_size: int) -> ModelShape | None:
    """Return the shape that the recipe itself gives; None: only the model's folder has it.

    Raises:
        RequestError: model.config cannot be read, or says something that is not built.
    """
    if model.preset is not None and model.preset not in IMAGE_PRESETS:
        shape = PRESETS[model.preset].shape
        if shape.vocab_size:
            return shape
        mask_rows = 0 if shape.is_causal else 1  # the tokenizer that we train has no mask token
        return replace(shape, vocab_size=vocab_size + mask_rows)
    if model.config is not None:
        return _parse_shape(config_content(model.config), "model.config", model)
    return None


def config_content(config: str | dict[str, Any]) -> dict[str, Any]:
    """Return the content of model.config: the file's, or that sent with the recipe.

    Raises:
        RequestError: The file cannot be read.
    """
    return config if isinstance(config, dict) else _read_config(Path(config).expanduser())


def _parse_shape(config: dict[str, Any], source: str, model: Model) -> ModelShape:
    if is_image_config(config):
        raise RequestError(
            f"{source}: model_type={config['model_type']!r} classifies images, and the task reads "
            "text. Set task.name=image_classification, and data.source to a folder of images."
        )
    return shape_of_config(
        config,
        source,
        is_random=model.weights == "random",
        overrides_dropout=model.dropout != "auto",
    )


_BY_THE_FOLDER = ("hidden_dropout", "head_dim", "moe_intermediate_size")
"""Fields of a shape that are no size or renamed (``head_width``, ``expert_width``)."""


def _check_same_shape(model: Model, stated: ModelShape, actual: ModelShape, path: Path) -> None:
    """Raise if the folder holds another model than the one that was planned."""
    is_open = model.preset is not None and not PRESETS[model.preset].shape.vocab_size
    skipped = (*_BY_THE_FOLDER, *(("vocab_size",) if is_open else ()))
    compared = {
        **{name: value for name, value in stated.to_dict().items() if name not in skipped},
        "head_width": stated.head_width,
        "expert_width": stated.expert_width,
    }
    wrong = [
        f"{name}={show(getattr(actual, name))}, not {show(value)}"
        for name, value in compared.items()
        if getattr(actual, name) != value
    ]
    if wrong:
        said = "model.config" if model.preset is None else f"model.preset={model.preset}"
        raise RequestError(
            f"{path} is not what {said} says of the model: {'; '.join(wrong)}. Memory, speed and "
            "price were planned for another model. Give the preset or config.json of this one, or "
            "leave it out."
        )


def config_notes(model: Model, folder: Path | None) -> list[str]:
    """Note what a folder's config.json asks for that is done in another way.

    transformers weighs one balance loss over the visits of all blocks together
    (``load_balancing_loss_func`` of 5.23), ours one for each block and sample: the same number
    would be another weight, and which one depends on the model.
    """
    if folder is None or "router_aux_loss" in model.model_fields_set:
        return []
    config = _read_config(folder / "config.json")
    theirs = config.get("router_aux_loss_coef")
    model_type = str(config.get("model_type"))
    if theirs is None or not is_family(model_type) or family_of(model_type).sparse is None:
        return []
    return [
        f"{folder / 'config.json'} has router_aux_loss_coef={show(theirs)}, which weighs another "
        "loss (of all blocks together) than is added here (for each block and sample), so it is "
        "not taken. "
        f"model.router_aux_loss={model.router_aux_loss} is; give it in the recipe to choose."
    ]


def head_notes(recipe: Recipe, folder: Path | None) -> list[str]:
    """Note what the task needs of a folder's model and the folder does not have.

    Only transformers' BertForPreTraining has both heads.
    """
    is_needed = recipe.model.weights != "random" and task_row(recipe.task.name).judges_pairs
    if folder is None or not is_needed:
        return []
    architectures = _read_config(folder / "config.json").get("architectures") or ["no model"]
    if any(str(each).endswith("ForPreTraining") for each in architectures):
        return []
    return [
        f"{folder / 'config.json'} is of {', '.join(map(str, architectures))}: what judges pairs "
        f"in task.name={recipe.task.name} is not in it, and begins with random weights."
    ]


def table_rows(model: Model, shape: ModelShape | None) -> int | None:
    """Rows of the model's table of tokens; None: as many as its tokenizer wants."""
    if shape is None:
        return None
    is_preset = model.preset is not None and model.path is None and model.hub is None
    is_open = is_preset and not PRESETS[str(model.preset)].shape.vocab_size
    return None if is_open else shape.vocab_size


def _read_config(path: Path) -> dict[str, Any]:
    try:
        why = content_error(path)
        if why is not None:
            raise RequestError(f"{path} {why}")
        config = parse_json(read_user_file(path, limit_bytes=MOST_JSON_BYTES).decode())
    except FileNotFoundError as error:
        raise RequestError(
            f"{path} does not exist. A Hugging Face folder has one; give the folder that "
            "save_pretrained wrote, or a snapshot of the hub."
        ) from error
    except StorageError as error:
        raise RequestError(f"{error} Fetch or save it again.") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}). Fetch or save it again.") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds no JSON object. Fetch or save it again.")
    return config


def _require_weights(folder: Path, model: Model) -> None:
    if has_weight_files(folder):
        return
    setting = f"model.path={model.path}" if model.path else f"model.hub={model.hub}"
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    parts = sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))
    if parts:
        raise RequestError(
            f"{setting} has {len(parts)} files such as {parts[0]}, and no {INDEX} that lists them. "
            "Copy or fetch that file too."
        )
    why = f"only {pickles[0]}, and opening a pickle runs code" if pickles else f"no {SINGLE}"
    raise RequestError(
        f"{setting} has no weights to load: {why}. Save it once with transformers' "
        "save_pretrained, or start from random weights with model.weights=random."
    )


def sample_tokens(recipe: Recipe, model_dir: Path | None) -> int:
    """Return the tokens of a sample, as ``data.seq_len`` is resolved once the data is known."""
    seq_len = recipe.data.seq_len
    if seq_len != "auto":
        return seq_len
    if model_dir is not None and is_generic(recipe):
        sizes = sizes_of(_read_config(model_dir / "config.json"))
        assert sizes is not None, "checked: without sizes data.seq_len has a value"
        return seq_len_of(sizes)[0]
    return seq_len_of(read_shape(recipe.model, model_dir, recipe.data.vocab_size))[0]
