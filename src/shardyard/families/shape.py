"""Sizes of one model, and what its family's table makes of them: counts of parameters, products."""

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardyard.errors import RequestError
from shardyard.families.registry import family_of

if TYPE_CHECKING:
    from shardyard.families.family import Family, Product


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one transformer; the field names are those of Hugging Face configs."""

    model_type: str
    """Row of ``families/registry.py``; gpt2 also covers BLOOM, MPT and others like it."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    """Added to the variance by norms, also by those of BERT, which subtract the mean."""
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    head_dim: int | None = None
    partial_rotary_factor: float = 1.0
    """Share of each head that is turned by its position."""
    hidden_act: str | None = None
    """Activation of the MLP, where it is not its family's usual one."""
    attn_logit_softcapping: float | None = None
    """Limit c of attention scores: c x tanh(score / c); None: no limit."""
    final_logit_softcapping: float | None = None
    """The same of the logits."""
    query_pre_attn_scalar: float | None = None
    """Scores are divided by its root; None: by that of the width of a head."""
    use_parallel_residual: bool = False
    """Attention and MLP of a block both read its input, and their sum is added."""
    rope_scaling: dict[str, Any] | None = None
    """Scaled rotary positions (Llama 3.1 and later): ``rope_parameters`` without ``rope_theta``."""
    sliding_window: int | None = None
    """A token sees itself and those before it, so many in all; None: the whole sample."""
    layer_types: tuple[str, ...] | None = None
    """Type of each block: whether it has that window; None: all have it."""
    num_experts: int = 0
    """Experts of each block's MLP; 0: one dense MLP."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    """Width of one expert; None: intermediate_size."""
    shared_expert_intermediate_size: int = 0
    """Width of the expert that every token visits; 0: there is none."""
    judges_pairs: bool = False
    """Whether it has the head, too, that says if one text follows another."""
    hidden_dropout: float = 0.0
    """Share of hidden states that its own config.json drops; model.dropout says what is done."""

    def __post_init__(self) -> None:
        if self.layer_types is not None:  # a list, as JSON has it
            object.__setattr__(self, "layer_types", tuple(self.layer_types))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        types = self.layer_types
        return {**asdict(self), "layer_types": None if types is None else list(types)}

    @cached_property
    def family(self) -> "Family":
        """Return the family of this model type.

        Raises:
            RequestError: There is no such kind, or only one of it and these sizes has experts.
        """
        family = family_of(self.model_type)
        if (self.num_experts > 0) != family.has_experts:
            has = "has" if family.has_experts else "has no"
            raise RequestError(
                f"num_experts={self.num_experts} with model_type={self.model_type!r}, which {has} "
                "experts: its parameters would be counted as those of another model. Name the "
                "type that these sizes are of."
            )
        return family

    @cached_property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two (SwiGLU)."""
        return self.family.is_gated

    @cached_property
    def is_causal(self) -> bool:
        """Return whether tokens attend only to earlier ones."""
        return self.family.is_causal

    def has_window_below(self, tokens: int) -> bool:
        """Whether any block has a window shorter than samples of that length."""
        return self.sliding_window is not None and self.sliding_window < tokens

    # --- widths -----------------------------------------------------------------------------------

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotated_width(self) -> int:
        """Elements of a head that are turned by position."""
        has_angles = self.family.rotary is not None
        return int(self.head_width * self.partial_rotary_factor) if has_angles else 0

    @property
    def queries_width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_attention_heads * self.head_width

    @property
    def keys_width(self) -> int:
        """Elements of all its keys, or values."""
        return self.num_key_value_heads * self.head_width

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    # --- counts, from the family's table ----------------------------------------------------------

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        if not self.num_experts:
            return 0
        return sum(row.elements(self) for row in self.family.block if row.per_expert)

    @cached_property
    def shared_block_parameters(self) -> int:
        """Parameters of one block without its experts: what every token visits."""
        return sum(row.elements(self) for row in self.family.block if not row.per_expert)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one transformer block, norms and biases included."""
        return self.shared_block_parameters + self.num_experts * self.expert_parameters

    @cached_property
    def unsplit_block_parameters(self) -> int:
        """Parameters of a block that every rank of tp holds: norms, routers, biases of sums."""
        return sum(row.unsplit_elements(self) for row in self.family.block)

    @cached_property
    def embedding_parameters(self) -> int:
        """All that comes before the first block: the table of tokens, and what is added to it."""
        return sum(row.elements(self) for row in self.family.before)

    @cached_property
    def small_parameters(self) -> tuple[int, int]:
        """Return the parameters on every rank of tp before the first block, and after the last."""
        family = self.family
        before = sum(row.unsplit_elements(self) for row in family.before)
        return before, sum(row.unsplit_elements(self) for row in family.after)

    @property
    def table_parameters(self) -> int:
        """Parameters of the table of tokens, or of the head."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        head = 0 if self.tie_word_embeddings else self.family.head.elements(self)
        blocks = self.num_hidden_layers * self.block_parameters
        others = sum(row.elements(self) for row in self.family.after if row is not self.family.head)
        return self.embedding_parameters + blocks + others + head

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters in a matrix product of every token: no table, and only the visited experts.

        Of a block all but the scales of the stream's norms; biases and norms of heads are so few
        that other tools, whose FLOP these are held against, count them too.
        """
        visited = self.shared_block_parameters + self.num_experts_per_tok * self.expert_parameters
        blocks = self.num_hidden_layers * (visited - self.family.stream_norms * self.hidden_size)
        return blocks + self.table_parameters

    @cached_property
    def products(self) -> "tuple[Product, ...]":
        """Matrix products of a block, in their order; those of one input are one product."""
        return self.family.products(self)
