"""The tensors of a folder compared with those of the model that its config.json describes.

In both directions: what the model lacks would be random, and what the files hold beyond the model
would be dropped, and another model trained. transformers warns of either; here both are errors,
except for the surplus of the tables below, each with its reason.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardyard.config.weight_files import format_names
from shardyard.families.family import Family
from shardyard.families.file_tensors import (
    file_tensors,
    head_of,
    name_now,
    parameter_shapes,
    stored_names,
    table_of,
    whole_shape,
)
from shardyard.families.shape import ModelShape
from shardyard.io.digests import StoredTensor, equal_content

_IGNORED: Mapping[str, str] = {
    r".*rotary_emb\.inv_freq": "they are the angles of positions, which are computed",
    r"(.*\.)?position_ids": "they count positions, which is done anyway",
}
"""Pattern of names that any family's files may have beyond the model -> why they are not needed.

Source: ``_adjust_missing_and_unexpected_keys`` of transformers 5.23, which ignores them too.
"""

_CLEAN = (
    "If you do not need them, drop them with transformers: AutoModelForCausalLM.from_pretrained("
    "FOLDER).save_pretrained(NEW)"
)

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"lora_|\.base_layer\.|modules_to_save",
        "They are of an adapter. Merge it first (peft: merge_and_unload(), save_pretrained())",
    ),
    (
        r"qweight|qzeros|g_idx|(weight_|input_|kv_|k_|v_)?scale(_inv|s)?$|absmax|quant_|SCB|"
        r"zero_point|bnb",
        "Its weights are quantised. Use the full-precision model that it was made from",
    ),
    (
        r"(self_attn|attention|attn)\..*(q|k|v|qkv|o|out|dense)(_proj)?\.bias$",
        "If its attention has biases, set attention_bias: true in config.json; else check "
        "model_type (qwen2 has them in queries, keys and values)",
    ),
    (
        r"mlp\..*\.bias$",
        "An MLP with biases is not supported in a model of this type. Check model_type in "
        "config.json",
    ),
    (
        r"\.(q|k|query|key)_(norm|layernorm)\.",
        "Norms of queries and keys are of another type of model. Check model_type in config.json "
        "(qwen3 has them)",
    ),
    (r"(^|\.)(v_head|value_head|score|classifier|reward_head|qa_outputs)\b", _CLEAN),
)
"""Pattern of the first surplus name -> what to do."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Result of comparing a folder with a model."""

    shape: ModelShape
    """The model's, with a head of its own where the files hold one."""
    errors: tuple[str, ...] = ()
    """Sentences on what the model lacks, and what would be dropped."""
    notes: tuple[str, ...] = ()
    """Sentences on what is left out for a reason, and where the files override config.json."""


def match_weights(folder: Path, stored: Mapping[str, StoredTensor], shape: ModelShape) -> Match:
    """Compare names, shapes and dtypes in both directions, and decide whether the head is tied.

    Args:
        folder: For messages.
        stored: What ``read_weight_files`` found there.
        shape: As config.json says.
    """
    shape, notes = _with_untied_head(folder, stored, shape)
    family = shape.family
    wanted = {
        name: whole_shape(pieces)
        for name, pieces in file_tensors(parameter_shapes(shape), family).items()
    }
    found = stored_names(stored, wanted, family)
    other_labels = _heads_of_other_labels(wanted, found, stored, family)
    found = {name: theirs for name, theirs in found.items() if name not in other_labels}
    problems = [
        *_missing(folder, wanted, found, family),
        *_shape_mismatches(folder, wanted, found, stored),
        *_second_names(folder, stored, found, shape),
    ]
    surplus, ignored = _surplus(stored.keys() - other_labels.values(), wanted, found, family)
    if surplus:
        problems.append(_surplus_error(folder, surplus, shape))
    notes += [
        f"{folder} holds tensors that are not used ({format_names(names)}): {why}."
        for why, names in ignored.items()
    ]
    if other_labels:
        notes.append(
            f"{folder} has a head over other labels ({format_names(list(other_labels))}), which is "
            f"not used: one over {shape.num_labels} labels begins at random."
        )
    return Match(shape=shape, errors=tuple(problems), notes=tuple(notes))


def _with_untied_head(
    folder: Path, stored: Mapping[str, StoredTensor], shape: ModelShape
) -> tuple[ModelShape, list[str]]:
    """Untie the head where the files hold another matrix than the table, as transformers does."""
    family = shape.family
    if not shape.tie_word_embeddings or family.is_always_tied:
        return shape, []
    untied = replace(shape, tie_word_embeddings=False)
    both = (head_of(family), table_of(family))
    found = stored_names(stored, both, family)
    if len(found) < len(both) or equal_content(*(stored[found[name]] for name in both)):
        return shape, []
    return untied, [
        f"{folder} has a head of its own ({found[both[0]]}) that differs from its table of tokens, "
        "and tie_word_embeddings=true in config.json. The head of the file is used, as in "
        "transformers; set tie_word_embeddings: false in config.json to say so."
    ]


def _heads_of_other_labels(
    expected: Mapping[str, tuple[int, ...]],
    matched: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    family: Family,
) -> dict[str, str]:
    """Return the tensors of a head over labels that has another number of them, by our names."""
    if family.labelled is None:
        return {}
    head = {
        name: each for name, each in matched.items() if name.startswith(f"{family.head.module}.")
    }
    differs = any(stored[theirs].shape != expected[name] for name, theirs in head.items())
    return head if differs else {}


def _missing(
    folder: Path, expected: Mapping[str, object], matched: Mapping[str, str], family: Family
) -> list[str]:
    lacking = sorted(
        name
        for name in expected.keys() - matched.keys()
        if not name.startswith(family.drawn_modules)  # begins at random, with a note
    )
    if not lacking:
        return []
    if lacking == [head_of(family)]:
        hint = (
            f"If the head is the table of tokens ({table_of(family)}), set tie_word_embeddings: "
            "true in config.json; else fetch the file that has it."
        )
    else:
        hint = (
            "They would be random. Check config.json (num_hidden_layers, model_type), or fetch or "
            "save the folder again."
        )
    return [
        f"{folder} lacks {len(lacking):,} of the {len(expected):,} tensors that config.json asks "
        f"for: {format_names(lacking)}. {hint}"
    ]


def _shape_mismatches(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    matched: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
) -> list[str]:
    problems = []
    shapes = [
        f"{theirs} has {list(stored[theirs].shape)}, not {list(expected[name])}"
        for name, theirs in sorted(matched.items())
        if stored[theirs].shape != expected[name]
    ]
    if shapes:
        problems.append(
            f"{folder} has {len(shapes):,} tensors of another shape than config.json says: "
            f"{format_names(shapes)}. Check the sizes in config.json, or fetch the folder again."
        )
    dtypes = [
        f"{theirs} ({stored[theirs].dtype})"
        for theirs in sorted(matched.values())
        if not stored[theirs].is_floating
    ]
    if dtypes:
        problems.append(
            f"{folder} has {len(dtypes):,} weights that are not floating-point numbers: "
            f"{format_names(dtypes)}. They are quantised. Use the full-precision model that it was "
            "made from."
        )
    return problems


def _second_names(
    folder: Path,
    stored: Mapping[str, StoredTensor],
    matched: Mapping[str, str],
    shape: ModelShape,
) -> list[str]:
    """Second names of one parameter whose content differs, where the model has no place for two."""
    family = shape.family
    pairs = dict(family.tied_names)
    if shape.tie_word_embeddings:
        pairs[head_of(family)] = table_of(family)
    names = stored_names(stored, pairs, family)
    return [
        f"{folder}: {names[target]} differs from {matched[source]}, and in a {shape.model_type} "
        "they are one. Fetch or save the folder again."
        for target, source in pairs.items()
        if target in names
        and source in matched
        and names[target] != matched[source]
        and not equal_content(stored[names[target]], stored[matched[source]])
    ]


def _surplus(
    stored: Collection[str],
    expected: Mapping[str, object],
    matched: Mapping[str, str],
    family: Family,
) -> tuple[list[str], dict[str, list[str]]]:
    """Names that the model has no place for, and those among them that it needs none for."""
    used = set(matched.values())
    second = {head_of(family) if name is None else name for name in (*family.tied_names, None)}
    surplus: list[str] = []
    ignored: dict[str, list[str]] = {}
    for name in sorted({*stored} - used):
        now = name_now(name, {*expected, *second}, family)
        if now in second and now not in expected:
            continue  # compared with its pair
        reasons = {**_IGNORED, **family.ignored_names}.items()
        why = next((why for pattern, why in reasons if re.fullmatch(pattern, now)), None)
        if why is None:
            surplus.append(name)
        else:
            ignored.setdefault(why, []).append(name)
    return surplus, ignored


def _surplus_error(folder: Path, surplus: Sequence[str], shape: ModelShape) -> str:
    tensors = f"{len(surplus):,} tensor{'s' * (len(surplus) > 1)}"
    return (
        f"{folder} has {tensors} that config.json has no place for: {format_names(list(surplus))}. "
        f"{_remedy(surplus, shape)}."
    )


def _remedy(surplus: Sequence[str], shape: ModelShape) -> str:
    """The likeliest reason, and what to do."""
    family = shape.family
    top = family.blocks.partition(".")[2] or family.blocks
    blocks = {int(n) for name in surplus for n in re.findall(rf"\b{re.escape(top)}\.(\d+)\.", name)}
    if blocks and min(blocks) >= shape.num_hidden_layers:
        return (
            f"config.json says num_hidden_layers={shape.num_hidden_layers}, and the files have "
            f"{max(blocks) + 1} blocks. Set num_hidden_layers: {max(blocks) + 1}"
        )
    experts = {int(n) for name in surplus for n in re.findall(r"\bexperts\.(\d+)\.", name)}
    if experts and shape.num_experts and min(experts) >= shape.num_experts:
        return (
            f"config.json says {shape.num_experts} experts, and the files have {max(experts) + 1}. "
            "Correct their number (num_local_experts or num_experts)"
        )
    return remedy_of(surplus)


def remedy_of(surplus: Sequence[str]) -> str:
    """What to do about tensors without a place, by their names."""
    for pattern, remedy in _HINTS:
        if any(re.search(pattern, name) for name in surplus):
            return remedy
    return f"Check model_type and sizes in config.json. {_CLEAN}"
