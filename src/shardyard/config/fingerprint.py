"""Settings that a resume may change, and the fingerprint of all others.

The list names what may change. A setting missing from it is fixed, so that a new one cannot
change what a run learns by having been forgotten.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

SECTIONS_THAT_MAY_CHANGE = (
    "parallel",
    "precision",
    "memory",
    "checkpoint",
    "elastic",
    "cluster",
    "launch",
    "observe",
    "secrets",
)
"""Sections about how and where a run runs.

Layouts and memory give the same sums; docs/numerics.md says what formats change.
"""

SETTINGS_THAT_MAY_CHANGE = (
    # name, place and length
    "run.name",
    "run.id",
    "run.dir",
    "run.tags",
    "run.origins",
    "run.steps",
    "run.tokens",
    "run.samples",
    "run.epochs",
    "run.target",
    "run.patience",
    # each phase's own settings are held, as those of a run without phases
    "phases",
    # says what the shape is, which is held
    "model.config",
    # the same model: model.commit stands for the revision; compiled; from another folder;
    # gathered in other groups; attending by another kernel
    "model.attention",
    "model.revision",
    "model.dir",
    "model.compile",
    "model.blocks",
    # when it is judged, and what it writes
    "task.metrics",
    "task.lower_is_better",
    "task.eval_every_steps",
    "task.eval_every_epochs",
    "task.prompt",
    "task.prompts",
    "task.generate_tokens",
    "task.generate_every",
    "task.temperature",
    "task.top_k",
    # what the fingerprint of the prepared data stands for
    "data.source",
    "data.module",
    "data.module_settings",
    "data.eval_source",
    "data.eval_sets",
    "data.eval_tasks",
    "data.mixture",
    "data.format",
    "data.text_key",
    "data.keys",
    "data.chat_template",
    "data.loss_on",
    "data.loss_share",
    "data.max_rejected",
    "data.min_true_pairs",
    "data.tokenizer",
    "data.add_tokens",
    "data.add_special_tokens",
    "data.tokenizer_kind",
    "data.vocab_size",
    "data.eval_fraction",
    # how it is read
    "data.dir",
    "data.workers",
    "data.module_workers",
    "data.prefetch_steps",
    "data.images.pack",
    "data.images.check",
    "data.images.broken",
    "data.images.image_key",
    "data.images.label_key",
    "data.images.threads",
    "data.images.cache_mib",
    # how the samples of a step are taken (held of a model with batch normalisation, which only
    # the processes that build it know), and when to give up
    "optim.micro_batch",
    "optim.max_skipped_steps",
    # for the plan; a checkpoint holds what the optimizer has
    "optim.module_states",
)

MAY_CHANGE_FROM_AN_EARLIER_STEP = ("optim.lr", "optim.grad_clip")
"""Settings that ``resume --step`` may change too: remedies against a loss spike."""

SHAPE, DATA, COMMIT, BASE = "model.shape", "data", "model.commit", "model.base"
"""Names of what is held next to settings.

They are the model's sizes, the fingerprint of the prepared data, and the commit of a model of
the hub. The last is the digest of the weights under adapters.
"""

DECAY = "optim.decay"
"""Held of SGD with momentum and decay: once the decay was coupled, a part of the momentum."""

CODE = "code."
"""Prefix of the digests of the user's own code, by the settings that name it."""

_ONLY_A_DEFAULT = ("hidden_dropout",)
"""Fields of a shape that are a default of an auto setting; the setting is held instead."""

_OF_FORMAT_1 = (
    "run.seed", "model.preset", "model.path", "model.hub", "model.weights", "model.dropout",
    "data.seq_len", "data.attend_across_documents", "optim.name", "optim.lr", "optim.betas",
    "optim.eps", "optim.weight_decay", "optim.momentum", "optim.grad_clip", "optim.schedule",
    "optim.warmup_steps", "optim.decay_steps", "optim.min_lr_ratio", "optim.global_batch",
    SHAPE, DATA,
)  # fmt: skip
_SHAPE_OF_FORMAT_1 = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "tie_word_embeddings", "attention_bias", "head_dim", "rope_scaling",
    "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
"""Fields whose digest checkpoints of format 1 hold. Never changes."""


@dataclass(frozen=True)
class Comparison:
    """Two fingerprints side by side."""

    changed: tuple[str, ...]
    """Differences, in words."""
    not_compared: tuple[str, ...]
    """Names that only one of them has: it was written before the setting was there, or after."""


def may_change(setting: str) -> bool:
    """Whether a resume may give a setting, by its dotted name, another value."""
    section = setting.partition(".")[0]
    return section in SECTIONS_THAT_MAY_CHANGE or setting in SETTINGS_THAT_MAY_CHANGE


def fingerprint_of(
    settings: Mapping[str, Any],
    *,
    shape: Mapping[str, Any],
    data: str,
    commit: str | None = None,
    base: str | None = None,
    pinned: Collection[str] = (),
    code: Mapping[str, str] = {},
) -> dict[str, Any]:
    """Return what all attempts of a run must share: dotted name -> value.

    Args:
        pinned: Settings that may change for other models, but not for this one.
        code: Digest of the source of the user's own code, by the setting that names it.
    """
    kept = {
        name: value for name, value in settings.items() if name in pinned or not may_change(name)
    }
    if kept["optim.momentum"] and kept["optim.weight_decay"]:
        kept[DECAY] = "decoupled"
    sizes = {name: value for name, value in shape.items() if name not in _ONLY_A_DEFAULT}
    found = {COMMIT: commit, BASE: base}
    found = {name: value for name, value in found.items() if value is not None}
    sources = {f"{CODE}{setting}": digest for setting, digest in code.items()}
    return {**kept, **found, **sources, SHAPE: sizes, DATA: data}


def compare(saved: Mapping[str, Any] | str, now: Mapping[str, Any]) -> Comparison:
    """Compare what a checkpoint holds with what a run asks for now.

    Args:
        saved: A fingerprint; or the digest of one, which is all that format 1 has.
    """
    if isinstance(saved, str):
        return _compare_digest(saved, now)
    old, new = _with_flattened_sizes(saved), _with_flattened_sizes(now)
    old.setdefault("model.frozen", [])  # written before any could be
    if DECAY in new:  # written before there was another
        old.setdefault(DECAY, "coupled")
    return Comparison(
        tuple(
            f"{name}: {old[name]!r} -> {new[name]!r}"
            for name in new
            if name in old and old[name] != new[name]
        ),
        tuple(sorted(old.keys() ^ new.keys())),
    )


def digest(content: Any) -> str:
    """First 16 hex digits of the SHA-256 of canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compare_digest(saved: str, now: Mapping[str, Any]) -> Comparison:
    known = {name: now.get(name) for name in _OF_FORMAT_1}
    known[SHAPE] = {name: now[SHAPE].get(name) for name in _SHAPE_OF_FORMAT_1}
    changed = []
    if digest(known) != saved:
        changed.append(f"at least one of {', '.join(_OF_FORMAT_1)}")
    if DECAY in now:
        changed.append(f"{DECAY}: 'coupled' -> {now[DECAY]!r}")
    return Comparison(tuple(changed), tuple(sorted(now.keys() - {*_OF_FORMAT_1, DECAY})))


def _with_flattened_sizes(content: Mapping[str, Any]) -> dict[str, Any]:
    """Each size of the model by a name of its own, so that a new one is no change of all."""
    sizes = {f"{SHAPE}.{name}": value for name, value in content.get(SHAPE, {}).items()}
    return {**{name: value for name, value in content.items() if name != SHAPE}, **sizes}
