"""Where the parts of each model family are, by ``model_type`` of its Hugging Face config."""

from dataclasses import dataclass, replace

from torch import nn

from shardyard.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SparseNames:
    """What a mixture of experts is called: here in a block, and in Hugging Face's files."""

    block: str
    """The module of a block that has a router and experts."""
    file_block: str
    file_router: str
    """Its router's matrix, from ``file_block``."""
    file_matrices: dict[str, str]
    """Our parameter of all experts -> the matrix of expert ``{}``, from ``file_block``."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of a family's modules, from the top of its causal language model."""

    blocks: str
    """The list of transformer blocks."""
    embedding: str
    """The table of tokens."""
    norm: str
    """What comes between the last block and the head."""
    head: str
    end: str | None = None
    """A module that holds norm and head, and parameters of its own."""
    rotary: str | None = None
    """What turns positions into the angles that every block uses."""
    positions: str | None = None
    """A table of learned positions, added to the embedding of a token."""
    token_types: str | None = None
    """A table whose first row is added to the embedding of every token."""
    embedding_norm: str | None = None
    """The norm before the first block."""
    is_causal: bool = True
    """Tokens attend to earlier ones alone."""
    dropped: tuple[str, ...]
    """Modules of a block whose output passes through dropout."""
    gathered: tuple[str, ...]
    """Modules of a block that need all tokens of a sample at their input."""
    colwise: tuple[str, ...]
    """Matrices of a block whose outputs (heads, inner width) tensor parallelism splits."""
    rowwise: tuple[str, ...]
    """Matrices of a block whose inputs it splits; their outputs are sums over ranks."""
    sparse: SparseNames | None = None
    """None: a block has one MLP, and no experts."""


_LLAMA = Family(
    blocks="model.layers",
    embedding="model.embed_tokens",
    norm="model.norm",
    head="lm_head",
    rotary="model.rotary_emb",
    dropped=("self_attn", "mlp"),
    gathered=("self_attn", "mlp"),
    colwise=(
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    ),
    rowwise=("self_attn.o_proj", "mlp.down_proj"),
)

_BERT = Family(
    blocks="bert.encoder.layer",
    embedding="bert.embeddings.word_embeddings",
    positions="bert.embeddings.position_embeddings",
    token_types="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    norm="cls.predictions.transform",
    head="cls.predictions.decoder",
    end="cls",
    is_causal=False,
    dropped=("attention.output.dense", "output.dense"),
    gathered=("attention.self", "intermediate"),
    colwise=(
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "intermediate.dense",
    ),
    rowwise=("attention.output.dense", "output.dense"),
)

# parallel/expert.py splits the experts, and gathers tokens before them
_SPARSE = replace(
    _LLAMA, gathered=("self_attn",), colwise=_LLAMA.colwise[:3], rowwise=_LLAMA.rowwise[:1]
)

_MIXTRAL = SparseNames(
    block="mlp",
    file_block="block_sparse_moe",
    file_router="gate.weight",
    file_matrices={
        "gate": "experts.{}.w1.weight",
        "up": "experts.{}.w3.weight",
        "down": "experts.{}.w2.weight",
    },
)
_QWEN3_MOE = SparseNames(
    block="mlp",
    file_block="mlp",
    file_router="gate.weight",
    file_matrices={name: f"experts.{{}}.{name}_proj.weight" for name in ("gate", "up", "down")},
)

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": replace(_SPARSE, sparse=_MIXTRAL),
    "qwen3_moe": replace(_SPARSE, sparse=_QWEN3_MOE),
    "bert": _BERT,
}


def family_of(model_type: str) -> Family:
    """The family of a model type.

    Raises:
        RequestError: The model type is not supported.
    """
    if model_type not in FAMILIES:
        raise RequestError(
            f"model type {model_type!r} is not supported: where its blocks are is not known. "
            f"Supported: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]


def blocks_of(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """The transformer blocks by full name, in order."""
    blocks = model.get_submodule(family.blocks)
    return {f"{family.blocks}.{name}": block for name, block in blocks.named_children()}


def part_of(model: nn.Module, name: str | None) -> nn.Module | None:
    """A module by its full name; None where a family or a pipeline stage does not have it."""
    part: nn.Module | None = None if name is None else model
    for child in (name or "").split("."):
        part = None if part is None else getattr(part, child)
    return part


def is_tied(model: nn.Module, family: Family) -> bool:
    """Whether the head of a model or stage multiplies by its table of tokens."""
    embedding, head = part_of(model, family.embedding), part_of(model, family.head)
    return embedding is not None and head is not None and embedding.weight is head.weight


def dropout_places(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Modules whose output passes through dropout, by full name."""
    first = family.embedding_norm or family.embedding
    embedded = part_of(model, first)
    places = {} if embedded is None else {first: embedded}
    for block_name, block in blocks_of(model, family).items():
        for name in family.dropped:
            places[f"{block_name}.{name}"] = block.get_submodule(name)
    return places
