"""Where a model's shape and files come from: a preset, a Hugging Face folder, or the hub.

Reads config.json itself, so that the control half needs no torch. What ``ModelShape`` cannot say
is refused with the reason: a model is trained as it is, or not at all.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardyard.config.hub import Say, Wanted, fetch
from shardyard.config.load import show
from shardyard.config.presets import PRESETS, ModelShape
from shardyard.config.schema import Model
from shardyard.errors import RequestError

_CONFIG_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "sliding_window": None},
    "mistral": {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096},
    "mixtral": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "head_dim": 128,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    "bert": {
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "sliding_window": None,
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
    },
}
"""Model type -> what a config.json that leaves a key out means by it. Source: the config classes of
transformers 5.23."""

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


_OF_OTHER_FAMILIES = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "use_qk_norm",
    "no_rope_layers",
    "attention_chunk_size",
)
"""Keys that change what Gemma, Granite, Cohere or Llama 4 compute."""

_MIXTURES = ("mixtral", "qwen3_moe")

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_WORDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of rotary settings that are not parameters of a scaling."""


def model_folder(
    model: Model,
    *,
    needs_weights: bool = True,
    commit: str | None = None,
    say: Say = lambda _: None,
) -> Path | None:
    """Folder of the model's own files on this machine, or None for a preset.

    Args:
        needs_weights: Whether weights that the recipe loads are fetched too, and must be there.
            Without them the cache of this machine is enough, as model.dir may be elsewhere.
        commit: Of the hub, where a run has found one before; it is taken again.
        say: Told before a long fetch.

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
            is_file = "is a file" if folder.is_file() else "does not exist"
            raise RequestError(
                f"model.path={model.path} {is_file}. Give a Hugging Face folder that holds "
                "config.json, or name a hub repository with model.hub."
            )
    elif model.hub is not None:
        wanted = Wanted(
            kind="model.hub",
            name=model.hub,
            revision=commit or model.revision,
            level="weights" if loads else "config",
        )
        store = None if model.dir is None or not needs_weights else Path(model.dir).expanduser()
        folder = fetch(wanted, store, say=say)
    else:
        return None
    if loads:
        _require_weights(folder, model)
    return folder


def has_tokenizer(folder: Path | None) -> bool:
    """Whether the model brings a tokenizer that can be opened."""
    return folder is not None and (folder / "tokenizer.json").is_file()


def shape_if_known(model: Model, folder: Path | None, vocab_size: int) -> ModelShape | None:
    """As ``read_shape``; None for a module of the user's own, which nobody knows before it runs."""
    return None if model.module is not None else read_shape(model, folder, vocab_size)


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
    shape = _known_shape(_read_config(path), str(path), model)
    if stated is not None:
        _refuse_difference(model, stated, shape, path)
    return shape


def stated_shape(model: Model, vocab_size: int) -> ModelShape | None:
    """What the recipe itself says of the model's shape; None: its folder alone can say.

    Raises:
        RequestError: model.config cannot be read, or says something that is not built.
    """
    if model.preset is not None:
        shape = PRESETS[model.preset].shape
        if shape.vocab_size:
            return shape
        mask_rows = 0 if shape.is_causal else 1  # the tokenizer that we train has no mask token
        return replace(shape, vocab_size=vocab_size + mask_rows)
    if model.config is not None:
        return _known_shape(config_content(model.config), "model.config", model)
    return None


def config_content(config: str | dict[str, Any]) -> dict[str, Any]:
    """What model.config says: the file's content, or the content that was sent with the recipe.

    Raises:
        RequestError: The file cannot be read.
    """
    return config if isinstance(config, dict) else _read_config(Path(config).expanduser())


def _known_shape(config: dict[str, Any], source: str, model: Model) -> ModelShape:
    model_type = config.get("model_type")
    if model_type not in _CONFIG_DEFAULTS:
        raise RequestError(
            f"{source}: model_type={model_type!r} is not built yet. Blocks are known for "
            f"{', '.join(_CONFIG_DEFAULTS)} so far; use a model of one of these types."
        )
    return shape_of_config(
        config,
        source,
        is_random=model.weights == "random",
        says_dropout=model.dropout != "auto",
    )


_BY_THE_FOLDER = ("hidden_dropout", "head_dim", "moe_intermediate_size")
"""Of a shape: what is no size, or stands in another word (``head_width``, ``expert_width``)."""


def _refuse_difference(model: Model, stated: ModelShape, found: ModelShape, path: Path) -> None:
    """Raise if the folder holds another model than the one that was planned."""
    is_open = model.preset is not None and not PRESETS[model.preset].shape.vocab_size
    skipped = (*_BY_THE_FOLDER, *(("vocab_size",) if is_open else ()))
    compared = {
        **{name: value for name, value in stated.to_dict().items() if name not in skipped},
        "head_width": stated.head_width,
        "expert_width": stated.expert_width,
    }
    wrong = [
        f"{name}={show(getattr(found, name))}, not {show(value)}"
        for name, value in compared.items()
        if getattr(found, name) != value
    ]
    if wrong:
        said = "model.config" if model.preset is None else f"model.preset={model.preset}"
        raise RequestError(
            f"{path} is not what {said} says of the model: {'; '.join(wrong)}. Memory, speed and "
            "price were planned for another model. Give the preset or config.json of this one, or "
            "leave it out."
        )


def config_notes(model: Model, folder: Path | None) -> list[str]:
    """What a folder's config.json asks for that is done in another way, for the user to know.

    transformers weighs one balance loss over the visits of all blocks together
    (``load_balancing_loss_func`` of 5.23), ours one for each block and sample: the same number
    would be another weight, and which one depends on the model.
    """
    if folder is None or "router_aux_loss" in model.model_fields_set:
        return []
    config = _read_config(folder / "config.json")
    theirs = config.get("router_aux_loss_coef")
    if theirs is None or config.get("model_type") not in _MIXTURES:
        return []
    return [
        f"{folder / 'config.json'} has router_aux_loss_coef={show(theirs)}, which weighs another "
        "loss (of all blocks together) than is added here (for each block and sample), so it is "
        "not taken. "
        f"model.router_aux_loss={model.router_aux_loss} is; give it in the recipe to choose."
    ]


def table_rows(model: Model, shape: ModelShape | None) -> int | None:
    """Rows of the model's table of tokens; None: as many as its tokenizer wants."""
    if shape is None:
        return None
    is_preset = model.preset is not None and model.path is None and model.hub is None
    is_open = is_preset and not PRESETS[str(model.preset)].shape.vocab_size
    return None if is_open else shape.vocab_size


def shape_of_config(
    config: dict[str, Any], source: str, *, is_random: bool, says_dropout: bool = False
) -> ModelShape:
    """Sizes from the content of a config.json of a known type.

    Args:
        source: What messages call it.
        is_random: Whether weights will be drawn, and not loaded.
        says_dropout: Whether model.dropout was given, in place of what the config drops.

    Raises:
        RequestError: It says something that is not built.
    """
    model_type = config["model_type"]
    config = {**_CONFIG_DEFAULTS[model_type], **config}
    if model_type in ("qwen3", "qwen3_moe") and not config.get("use_sliding_window"):
        config["sliding_window"] = None  # they name one and a switch
    unknown = _not_representable(config, is_random=is_random)
    if not says_dropout:
        unknown += _other_dropout(config)
    if unknown:
        lines = "\n".join(f"  {line}" for line in unknown)
        raise RequestError(
            f"{source} describes a model that cannot be trained faithfully here:\n{lines}\n"
            "Use another model, or change config.json if you know that it means the same."
        )
    return _shape(config, source)


def _shape(config: dict[str, Any], source: str) -> ModelShape:
    missing = [key for key in _SIZES if not _is_size(config.get(key))]
    if config["sliding_window"] is not None and not _is_size(config["sliding_window"]):
        missing.append("sliding_window")
    if missing:
        raise RequestError(
            f"{source} gives no whole number for {', '.join(missing)}. Without it the model cannot "
            "be built. Fetch or save config.json again."
        )
    sizes = {key: config[key] for key in _SIZES}
    is_bert = config["model_type"] == "bert"
    return ModelShape(
        model_type=config["model_type"],
        **sizes,
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["layer_norm_eps" if is_bert else "rms_norm_eps"],
        rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(_rope(config)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        head_dim=config.get("head_dim"),
        hidden_dropout=float(config["hidden_dropout_prob"]) if is_bert else 0.0,
        sliding_window=config["sliding_window"],
        **_experts(config, source),
    )


def _experts(config: dict[str, Any], source: str) -> dict[str, int]:
    """Sizes of a mixture of experts; none for a dense model."""
    if config["model_type"] not in _MIXTURES:
        return {}
    experts = config.get("num_local_experts") or config.get("num_experts")
    visits, width = config["num_experts_per_tok"], config.get("moe_intermediate_size")
    if not (_is_size(experts) and _is_size(visits) and experts >= visits):
        raise RequestError(
            f"{source}: num_experts={experts!r} and num_experts_per_tok={visits!r} are no numbers "
            "of experts and of those that a token visits. Fetch or save config.json again."
        )
    sizes = {"num_experts": experts, "num_experts_per_tok": visits}
    return sizes if width is None else {**sizes, "moe_intermediate_size": width}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 writes them, from its form or the older one."""
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {**older, **(config.get("rope_parameters") or {})}


def _rope_type(rope: dict[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    rope_type = _rope_type(rope)
    if rope_type == "default":
        return None
    others = {key: value for key, value in rope.items() if key not in _ROPE_WORDS}
    return {"rope_type": rope_type, **others}


def _not_representable(config: dict[str, Any], *, is_random: bool) -> list[str]:
    """What ``ModelShape`` has no word for, each with its reason."""
    rope = _rope(config)
    rope_type = _rope_type(rope)
    rotated = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1))
    whole = {"full_attention"}  # and within its window, one that slides
    if config["sliding_window"] is not None:
        whole.add("sliding_attention")
    others = sorted(set(config.get("layer_types") or ()) - whole)
    foreign = [f"{key}={config[key]}" for key in _OF_OTHER_FAMILIES if config.get(key)]
    is_bert = config["model_type"] == "bert"
    act = "gelu" if is_bert else "silu"
    std = config.get("initializer_range", 0.02)
    reasons = {
        f"rope_type={rope_type!r}: only {', '.join(_ROPE_TYPES)} are built; the others change with "
        "the length of the sample": rope_type not in _ROPE_TYPES,
        f"partial_rotary_factor={rotated}: rotary positions on a part of a head are not built "
        "yet": rotated != 1,
        f"layer_types={others}: blocks whose attention sees a part of the sample are not built": (
            bool(others)
        ),
        f"{', '.join(foreign)}: {config['model_type']} has no such thing here, nor in "
        "transformers, where such a config would be read without a word": bool(foreign),
        f"hidden_act={config.get('hidden_act')!r}: only {act} is built": (
            config.get("hidden_act", act) != act
        ),
        f"type_vocab_size={config.get('type_vocab_size')}: only 2 kinds of tokens are built": (
            is_bert and config["type_vocab_size"] != 2
        ),
        f"position_embedding_type={config.get('position_embedding_type')!r}: only absolute ones "
        "are built": config.get("position_embedding_type", "absolute") != "absolute",
        "is_decoder=true: a BERT that sees earlier tokens alone is not built": (
            bool(config.get("is_decoder"))
        ),
        "add_cross_attention=true: blocks that attend to another model's output are not built": (
            bool(config.get("add_cross_attention"))
        ),
        "tie_word_embeddings=false: BERT's head is its table of tokens here": (
            is_bert and not config["tie_word_embeddings"]
        ),
        "mlp_bias=true: an MLP with biases is not built": bool(config.get("mlp_bias")),
        f"attention_bias=true: {config['model_type']} has no such biases": (
            config["model_type"] in ("mistral", "mixtral") and bool(config.get("attention_bias"))
        ),
        "norm_topk_prob=false: the weights of the visited experts are made to add up to 1 here": (
            config.get("norm_topk_prob") is False
        ),
        f"router_jitter_noise={config.get('router_jitter_noise')}: not built, as it would depend "
        "on the layout; set it to 0": bool(config.get("router_jitter_noise")),
        f"mlp_only_layers={config.get('mlp_only_layers')}: blocks without experts among others "
        "are not built": bool(config.get("mlp_only_layers")),
        f"decoder_sparse_step={config.get('decoder_sparse_step')}: only 1 is built, experts in "
        "every block": config.get("decoder_sparse_step", 1) != 1,
        "quantization_config: its weights are quantised; training needs the full ones": (
            bool(config.get("quantization_config"))
        ),
        f"initializer_range={std}: random weights are drawn with 0.02": is_random and std != 0.02,
    }
    return [reason for reason, applies in reasons.items() if applies]


def _other_dropout(config: dict[str, Any]) -> list[str]:
    """Dropout that model.dropout does not stand for."""
    keys = ("attention_dropout", "attention_probs_dropout_prob")
    return [
        f"{key}={config[key]}: dropout of attention weights is not built, as it would depend on "
        "the layout. Set it to 0, or say with model.dropout what is dropped instead: 0 for "
        "nothing, or a share of what embedding, attention and MLP return"
        for key in keys
        if config.get(key)
    ]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RequestError(
            f"{path} does not exist. A Hugging Face folder has one; give the folder that "
            "save_pretrained wrote, or a snapshot of the hub."
        ) from error
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON ({error}). Fetch or save it again.") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path} holds no JSON object. Fetch or save it again.")
    return config


def _require_weights(folder: Path, model: Model) -> None:
    names = ("model.safetensors", "model.safetensors.index.json")
    if any((folder / name).is_file() for name in names):
        return
    setting = f"model.path={model.path}" if model.path else f"model.hub={model.hub}"
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    why = f"only {pickles[0]}, and opening a pickle runs code" if pickles else f"no {names[0]}"
    raise RequestError(
        f"{setting} has no weights to load: {why}. Save it once with transformers' "
        "save_pretrained, or start from random weights with model.weights=random."
    )
