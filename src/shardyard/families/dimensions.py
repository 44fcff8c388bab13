"""Dimensions of one transformer, as its config.json has them, and widths made of them."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

_IF_SET = (
    "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim", "label_head", "num_labels",
    "label_names", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "logits_scaling", "rope_local_base_freq",
)  # fmt: skip
"""Sizes of latent attention and of heads over labels, and multipliers, and other angles in
blocks with a window: other models are written without them."""

Labelled = Literal["samples", "tokens"]
"""Unit that has a label: each sample, or each token."""


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """Sizes of one transformer; the field names are those of Hugging Face configs.

    ``families/shape.py`` adds what depends on the family.
    """

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
    embedding_multiplier: float | None = None
    """Multiplies the embedding of each token; None: 1."""
    attention_multiplier: float | None = None
    """Multiplies scores; None: one by the root of the width of a head."""
    residual_multiplier: float | None = None
    """Multiplies what attention and MLP add to the residual stream; None: 1."""
    logits_scaling: float | None = None
    """Divides the logits; None: 1."""
    use_parallel_residual: bool = False
    """Attention and MLP of a block both read its input, and their sum is added."""
    rope_scaling: dict[str, Any] | None = None
    """Scaled rotary positions (Llama 3.1 and later): ``rope_parameters`` without ``rope_theta``."""
    rope_local_base_freq: float | None = None
    """``rope_theta`` of blocks with a window; None: that of all blocks."""
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
    q_lora_rank: int | None = None
    """Latent attention: elements to which a token's queries are compressed; None: they are not."""
    kv_lora_rank: int | None = None
    """The same of its keys and values; None: attention is not latent."""
    qk_rope_head_dim: int | None = None
    """Elements of ``head_dim`` that are turned by position, of a key that all heads share."""
    v_head_dim: int | None = None
    """Elements of a head's value; None: as many as of its key."""
    judges_pairs: bool = False
    """Whether it has the head, too, that says if one text follows another."""
    label_head: Labelled | None = None
    """Unit that the head gives a label to; None: it predicts tokens."""
    num_labels: int = 0
    """Outputs of the head over labels; 1: a number. 0: the head predicts tokens."""
    label_names: tuple[str, ...] = ()
    """Names of the labels, by number; none: not known yet, or a number is predicted."""
    hidden_dropout: float = 0.0
    """Share of hidden states that its own config.json drops; model.dropout says what is done."""

    def __post_init__(self) -> None:
        if self.layer_types is not None:  # a list, as JSON has it
            object.__setattr__(self, "layer_types", tuple(self.layer_types))
        object.__setattr__(self, "label_names", tuple(self.label_names))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        types = self.layer_types
        lists = {
            "layer_types": None if types is None else list(types),
            "label_names": list(self.label_names),
        }
        found = {**asdict(self), **lists}
        return {key: value for key, value in found.items() if key not in _IF_SET or value}

    @property
    def block_types(self) -> tuple[str, ...]:
        """Type of each block, also where all are alike."""
        usual = "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types or (usual,) * self.num_hidden_layers

    def has_window_below(self, tokens: int) -> bool:
        """Whether any block has a window shorter than samples of that length."""
        return self.sliding_window is not None and self.sliding_window < tokens

    @property
    def logits_width(self) -> int:
        """Outputs of the head for each token that it reads."""
        return self.vocab_size if self.label_head is None else self.num_labels

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_width(self) -> int:
        """Elements of a head's value."""
        return self.v_head_dim or self.head_width

    @property
    def queries_width(self) -> int:
        """Elements of all queries of a token."""
        return self.num_attention_heads * self.head_width

    @property
    def keys_width(self) -> int:
        """Elements of all its keys, or values; where they differ, half of both."""
        return self.num_key_value_heads * (self.head_width + self.value_width) // 2

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size
