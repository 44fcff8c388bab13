"""Sizes that ``auto`` follows, of models whose inside is not known: read from their config.json.

Of a family the shape says them (``families/shape.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

_WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim", "dim")
_DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")

BEHIND_PADDING = ("camembert", "data2vec-text", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")
"""Types whose positions begin behind the id of the padding token: two rows of 514 have no place."""
NO_LIMIT = ("bloom", "falcon", "falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv")
"""Types whose config.json may name no longest sample, since none is built in."""
USUAL_CONTEXT = 2048
"""Tokens of a sample for these: BLOOM (arXiv:2211.05100), Falcon (arXiv:2311.16867) and
Mamba (arXiv:2312.00752) were trained on so many."""


class Sizes(Protocol):
    """Sizes that rules read, of a shape or of ``ModelSizes``."""

    @property
    def parameters(self) -> int:
        """All of them."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest sample in tokens."""

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""

    @property
    def block_parameters(self) -> int:
        """Parameters of one block."""


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes by a config.json of no family: exact enough to choose a rate and a batch by."""

    num_hidden_layers: int
    block_parameters: int
    """12 x width^2 as Kaplan et al. count (arXiv:2001.08361, eq. 2.1), with all experts."""
    parameters: int
    max_position_embeddings: int
    has_limit: bool = True
    """Whether config.json names a longest sample."""


def sizes_of(config: Mapping[str, Any]) -> ModelSizes | None:
    """Sizes that a config.json gives; None: it lacks one of them.

    Args:
        config: Content of a config.json of a language model.
    """
    width, depth = _first(config, _WIDTH), _first(config, _DEPTH)
    context = limit = _first(config, _CONTEXT)
    if context is not None and _begins_behind_padding(config.get("model_type")):
        padding = config.get("pad_token_id")
        context -= 1 + (padding if isinstance(padding, int) else 1)
    if limit is None and _has_no_limit(config.get("model_type")):
        context = USUAL_CONTEXT
    if width is None or depth is None or context is None:
        return None
    experts = _first(config, _EXPERTS) or 0
    expert_width = _first(config, _EXPERT_WIDTH) or 4 * width
    block = 12 * width**2 + experts * 3 * width * expert_width
    rows = _first(config, ("vocab_size",)) or 0
    return ModelSizes(
        num_hidden_layers=depth,
        block_parameters=block,
        parameters=depth * block + rows * width,
        max_position_embeddings=context,
        has_limit=limit is not None,
    )


def _begins_behind_padding(kind: object) -> bool:
    return kind in BEHIND_PADDING


def _has_no_limit(kind: object) -> bool:
    return kind in NO_LIMIT


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    values = (config.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and v > 0), None)
