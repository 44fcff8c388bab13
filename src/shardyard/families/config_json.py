"""config.json of any family: read into a shape, rejected if it needs unbuilt parts, written.

Options that ``ModelShape`` cannot express are rejected with the reason: a model is trained as
it is, or not at all. A family's special cases are in its ``ConfigJson``.
"""

from collections.abc import Mapping
from typing import Any

from shardyard.errors import RequestError
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import ConfigJson, Family
from shardyard.families.registry import FAMILIES, family_of, is_family
from shardyard.families.shape import ModelShape

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of transformers' classes for causal language models."""

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

SLIDING, FULL = "sliding_attention", "full_attention"
"""Words of ``layer_types``."""

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_WORDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys of rotary settings that are not parameters of a scaling."""


# --- in -------------------------------------------------------------------------------------------


def shape_of_config(
    config: Mapping[str, Any], source: str, *, is_random: bool, overrides_dropout: bool = False
) -> ModelShape:
    """Sizes from the content of a config.json.

    Args:
        source: What messages call it.
        is_random: Whether weights will be drawn, and not loaded.
        overrides_dropout: Whether model.dropout was given, in place of what the config drops.

    Raises:
        RequestError: It is of no family, or says something that is not built.
    """
    model_type = config.get("model_type")
    if not is_family(model_type):
        raise RequestError(
            f"{source}: model_type={model_type!r} is not built yet. Blocks are known for "
            f"{', '.join(FAMILIES)} so far; use a model of one of these types."
        )
    family = family_of(str(model_type))
    form = family.config_json
    config = {**form.defaults, **form.read(config)}
    if form.window_switch is not None and not config.get(form.window_switch):
        config["sliding_window"] = None  # it names one and a switch
    unknown = _not_representable(config, family, is_random=is_random)
    if not overrides_dropout:
        unknown += _other_dropout(config, form)
    if unknown:
        lines = "\n".join(f"  {line}" for line in unknown)
        raise RequestError(
            f"{source} describes a model that cannot be trained faithfully here:\n{lines}\n"
            "Use another model, or change config.json if you know that it means the same."
        )
    return _shape(config, family, source)


def _shape(config: Mapping[str, Any], family: Family, source: str) -> ModelShape:
    missing = [key for key in _SIZES if not _is_size(config.get(key))]
    window = config["sliding_window"]
    if window is not None and not _is_size(window):
        missing.append("sliding_window")
    if missing:
        raise RequestError(
            f"{source} gives no whole number for {', '.join(missing)}. Without it the model cannot "
            "be built. Fetch or save config.json again."
        )
    form = family.config_json
    sizes = {key: config[key] for key in _SIZES}
    types = [] if window is None else _layer_types(config, form)
    return ModelShape(
        model_type=family.model_type,
        **sizes,
        num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config[form.norm_eps],
        rope_theta=float(_rope(config).get("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(_rope(config)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        head_dim=config.get("head_dim"),
        partial_rotary_factor=_rotary_share(config),
        hidden_act=None if _activation(config, form) == form.activation else config["hidden_act"],
        **{key: config[key] for key in form.own},
        use_parallel_residual=bool(config.get("use_parallel_residual", False)),
        hidden_dropout=0.0 if form.dropout is None else float(config[form.dropout]),
        sliding_window=window if SLIDING in types else None,
        layer_types=tuple(types) if len(set(types)) > 1 else None,
        judges_pairs=False,  # what is learnt decides on it
        **({} if family.sparse is None else _experts(config, source)),
    )


def _layer_types(config: Mapping[str, Any], form: ConfigJson) -> list[str]:
    """Return for each block whether it has the window of the config."""
    if form.layer_types is None:
        return [SLIDING] * int(config["num_hidden_layers"])
    return list(config.get("layer_types") or form.layer_types(config))


def windows_from_block(config: Mapping[str, Any]) -> list[str]:
    """Return the layer types of families whose later blocks have the window."""
    first = config.get("max_window_layers", 28)
    return [SLIDING if layer >= first else FULL for layer in range(config["num_hidden_layers"])]


def _experts(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Sizes of a mixture of experts."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    visits, width = config["num_experts_per_tok"], config.get("moe_intermediate_size")
    if not (_is_size(experts) and _is_size(visits) and experts >= visits):
        raise RequestError(
            f"{source}: num_experts={experts!r} and num_experts_per_tok={visits!r} are not numbers "
            "of experts, and of experts per token. Fetch or save config.json again."
        )
    sizes = {"num_experts": experts, "num_experts_per_tok": visits}
    return sizes if width is None else {**sizes, "moe_intermediate_size": width}


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 writes them, from its form or the older one."""
    older = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    return {**older, **(config.get("rope_parameters") or {})}


def _rotary_share(config: Mapping[str, Any]) -> float:
    return float(
        _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    )


def _activation(config: Mapping[str, Any], form: ConfigJson) -> str:
    return str(config.get("hidden_act") or form.activation)


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    rope_type = _rope_type(rope)
    if rope_type == "default":
        return None
    others = {key: value for key, value in rope.items() if key not in _ROPE_WORDS}
    return {"rope_type": rope_type, **others}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# --- refused --------------------------------------------------------------------------------------


def _not_representable(config: Mapping[str, Any], family: Family, *, is_random: bool) -> list[str]:
    """List the options that ``ModelShape`` cannot express, each with its reason."""
    rope, form = _rope(config), family.config_json
    rope_type, act = _rope_type(rope), _activation(config, form)
    rotated = _rotary_share(config)
    acts = (form.activation, *form.other_activations)
    others = [key for key in _OF_OTHER_FAMILIES if key not in form.own]
    foreign = [f"{key}={config[key]}" for key in others if config.get(key)]
    std, built_std = config.get("initializer_range", family.initial_std), family.initial_std
    reasons = {
        f"rope_type={rope_type!r}: only {', '.join(_ROPE_TYPES)} are built; the others change with "
        "the length of the sample": rope_type not in _ROPE_TYPES,
        f"partial_rotary_factor={rotated}: rotary positions on a part of a head are not built "
        f"in {family.model_type}": rotated != 1 and not form.partial_rotary,
        **_other_layer_types(config, form),
        f"{', '.join(foreign)}: {family.model_type} has no such thing here, nor in "
        "transformers, where such a config would be read without a word": bool(foreign),
        f"hidden_act={act!r}: only {', '.join(acts)} is built": act not in acts,
        "add_cross_attention=true: blocks that attend to another model's output are not built": (
            bool(config.get("add_cross_attention"))
        ),
        "mlp_bias=true: an MLP with biases is not built": bool(config.get("mlp_bias")),
        **form.refused(config),
        "quantization_config: its weights are quantised; training needs the full ones": (
            bool(config.get("quantization_config"))
        ),
        f"initializer_range={std}: random weights are drawn with {built_std}": (
            is_random and std != built_std
        ),
    }
    return [reason for reason, applies in reasons.items() if applies]


def _other_layer_types(config: Mapping[str, Any], form: ConfigJson) -> dict[str, bool]:
    """Blocks that see what no block of the family does here."""
    types, layers = list(config.get("layer_types") or ()), config.get("num_hidden_layers")
    has_window = config["sliding_window"] is not None
    usual = {SLIDING} if has_window else {FULL}
    if has_window and form.layer_types is not None:
        usual = {SLIDING, FULL}
    others = sorted(set(types) - usual)
    return {
        f"layer_types={others}: with sliding_window={config['sliding_window']} no such blocks are "
        f"built, only {' and '.join(sorted(usual))}": bool(others),
        f"layer_types has {len(types)} blocks, num_hidden_layers={layers}": (
            bool(types) and len(types) != layers
        ),
    }


def without_attention_bias(config: Mapping[str, Any], model_type: str) -> dict[str, bool]:
    """Return the reason against attention_bias, and whether it applies.

    It is for a family whose projections have no biases, or always the same ones.
    """
    reason = f"attention_bias=true: {model_type} has no such biases"
    return {reason: bool(config.get("attention_bias"))}


def without_mixture_options(config: Mapping[str, Any]) -> dict[str, bool]:
    """Return reasons against options of experts, and whether each applies.

    They are for a family with experts, of which ``models/moe.py`` has only one form.
    """
    noise, layers = config.get("router_jitter_noise"), config.get("mlp_only_layers")
    step = config.get("decoder_sparse_step", 1)
    return {
        "norm_topk_prob=false: the weights of the visited experts are made to add up to 1 here": (
            config.get("norm_topk_prob") is False
        ),
        f"router_jitter_noise={noise}: not built, as it would depend on the layout; set it to 0": (
            bool(noise)
        ),
        f"mlp_only_layers={layers}: blocks without experts among others are not built": (
            bool(layers)
        ),
        f"decoder_sparse_step={step}: only 1 is built, experts in every block": step != 1,
    }


def _other_dropout(config: Mapping[str, Any], form: ConfigJson) -> list[str]:
    """List dropout options that model.dropout does not cover."""
    keys = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop")
    found = [
        f"{key}={config[key]}: dropout of attention weights is not built, as it would depend on "
        "the layout. Set it to 0, or say with model.dropout what is dropped instead: 0 for no "
        "dropout, or a share of what embedding, attention and MLP return"
        for key in keys
        if config.get(key)
    ]
    first = config.get("embd_pdrop")
    if first is not None and form.dropout is not None and first != config[form.dropout]:
        found.append(
            f"embd_pdrop={first} but {form.dropout}={config[form.dropout]}: Shardyard drops one "
            "share everywhere. Say with model.dropout which"
        )
    return found


# --- out ------------------------------------------------------------------------------------------


_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Would be kept as settings of a model that knows no such thing."""

_OF_DECODERS = (
    *_SIZES, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "rope_scaling", "tie_word_embeddings", "attention_bias", "head_dim", *_OF_EXPERTS,
)  # fmt: skip


def decoder_fields(shape: ModelDimensions) -> dict[str, Any]:
    """Return the fields of most decoders' config class in transformers; a family adds others."""
    names = _OF_DECODERS if shape.num_experts else _OF_DECODERS[: -len(_OF_EXPERTS)]
    content = shape.to_dict()
    fields = {name: content[name] for name in names}
    scaling = fields.pop("rope_scaling") or {"rope_type": "default"}
    return {**fields, "rope_parameters": {**scaling, "rope_theta": fields.pop("rope_theta")}}


def windows_by_number(shape: ModelDimensions) -> dict[str, Any]:
    """Return the window's fields of a family whose blocks may differ in their windows."""
    window, layers = shape.sliding_window, shape.num_hidden_layers
    usual = FULL if window is None else SLIDING
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": list(shape.layer_types or [usual] * layers),
    }
