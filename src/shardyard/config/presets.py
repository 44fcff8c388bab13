"""Shapes of the named models, each with its source.

Read by both halves: the planner needs the arithmetic, the training half builds the model from it.
"""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of one transformer; the field names are those of Hugging Face configs."""

    model_type: str
    """llama, mistral, mixtral, qwen3, qwen3_moe, gpt2 (GPT, BLOOM, MPT, ...), bert."""
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
    rope_scaling: dict[str, Any] | None = None
    """Scaled rotary positions (Llama 3.1 and later): ``rope_parameters`` without ``rope_theta``."""
    sliding_window: int | None = None
    """Tokens back that a token sees. Here it sees the whole sample, so none may be longer."""
    num_experts: int = 0
    """Experts of each block's MLP; 0: one dense MLP."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int | None = None
    """Width of one expert; None: intermediate_size."""
    shared_expert_intermediate_size: int = 0
    """Width of the expert that every token visits; 0: there is none."""
    hidden_dropout: float = 0.0
    """Share of hidden states that its own config.json drops; model.dropout says what is done."""

    @property
    def head_width(self) -> int:
        """Elements of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two (SwiGLU)."""
        return self.model_type not in ("gpt2", "bert")

    @property
    def is_causal(self) -> bool:
        """Whether tokens attend to earlier ones alone."""
        return self.model_type != "bert"

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        if not self.num_experts:
            return 0
        return (3 if self.is_gated else 2) * self.hidden_size * self.expert_width

    @property
    def block_parameters(self) -> int:
        """Parameters of one transformer block, norms and biases included."""
        return self.shared_block_parameters + self.num_experts * self.expert_parameters

    @property
    def shared_block_parameters(self) -> int:
        """Parameters of one block without its experts: what every token visits."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads = self.num_attention_heads * self.head_width
        kv_heads = self.num_key_value_heads * self.head_width
        attention = 2 * hidden * heads + 2 * hidden * kv_heads
        if self.attention_bias or not self.is_gated:
            attention += heads + 2 * kv_heads + hidden
        if self.model_type in ("qwen3", "qwen3_moe"):
            attention += 2 * self.head_width  # norms of queries and keys, head by head
        if not self.is_gated:  # GPT and BERT: biases everywhere, norms with bias
            return attention + 2 * hidden * inner + inner + hidden + 4 * hidden
        if self.num_experts:
            router = hidden * self.num_experts
            return (
                attention + router + 3 * hidden * self.shared_expert_intermediate_size + 2 * hidden
            )
        return attention + 3 * hidden * inner + 2 * hidden

    @property
    def embedding_parameters(self) -> int:
        """The table of tokens, and of positions and token types where they are learned."""
        learned = self.max_position_embeddings if self.model_type in ("gpt2", "bert") else 0
        types = 2 if self.model_type == "bert" else 0
        return (self.vocab_size + learned + types) * self.hidden_size

    @property
    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        head = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        last_norm = self.hidden_size * (1 if self.is_gated else 2)
        blocks = self.num_hidden_layers * self.block_parameters
        return self.embedding_parameters + blocks + last_norm + head

    @property
    def matmul_parameters(self) -> int:
        """Parameters in a matrix product of every token: no table, and only the visited experts."""
        idle = (self.num_experts - self.num_experts_per_tok) * self.expert_parameters
        visited = self.shared_block_parameters + self.num_experts * self.expert_parameters - idle
        blocks = self.num_hidden_layers * (visited - 2 * self.hidden_size)
        return blocks + self.vocab_size * self.hidden_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named shape and where it comes from. ``vocab_size`` 0 means: that of the tokenizer."""

    shape: ModelShape
    source: str


def _llama(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    context: int,
    *,
    theta: float = 10000.0,
    tied: bool = False,
    positions_stretched: float = 0,
) -> ModelShape:
    """A Llama; ``positions_stretched``: the factor of its scaled rotary positions (3.1 and 3.2)."""
    scaling = {"factor": positions_stretched, **_LLAMA31_ROPE} if positions_stretched else None
    return ModelShape(
        model_type="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=context, rope_theta=theta, tie_word_embeddings=tied,
        rope_scaling=scaling,
    )  # fmt: skip


def _bert(hidden: int, layers: int, heads: int, *, vocab: int = 30522) -> ModelShape:
    """BERT, as a rule with its uncased English vocabulary; the head is the table of tokens."""
    return ModelShape(
        model_type="bert", vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=512, tie_word_embeddings=True, rms_norm_eps=1e-12,
    )  # fmt: skip


_LLAMA31_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA2 = "Touvron et al. 2023, arXiv:2307.09288, table 1; config.json of meta-llama/Llama-2-{}-hf"
_LLAMA3 = "Grattafiori et al. 2024, arXiv:2407.21783, table 3; config.json of meta-llama/{}"
_CARD = "config.json of {}; its sizes also in benchmarks/groundtruth/model_architectures.csv"

PRESETS: dict[str, Preset] = {
    "llama-tiny": Preset(
        shape=_llama(0, 64, 172, 2, 4, 2, 256),
        source="ours: the smallest shape with grouped KV heads; for tests",
    ),
    "llama-laptop": Preset(
        shape=_llama(0, 192, 512, 4, 6, 2, 512, tied=True),
        source="ours: learns Python text on two CPU cores in about two minutes",
    ),
    "llama-pocket": Preset(
        shape=_llama(0, 128, 384, 4, 4, 2, 512, tied=True),
        source="ours: learns most of Python text that two CPU cores can teach in two minutes",
    ),
    "llama-tiny-deep": Preset(
        shape=_llama(0, 32, 88, 8, 4, 2, 256),
        source="ours: enough blocks for a pipeline of up to eight stages; for tests",
    ),
    "llama-1b": Preset(
        shape=_llama(32000, 2048, 5504, 24, 16, 16, 4096),
        source="ours: the 1.3 B shape of GPT-3 XL (Brown et al. 2020, arXiv:2005.14165, table 2.1) "
        "with a SwiGLU MLP of equal size",
    ),
    "llama2-7b": Preset(
        shape=_llama(32000, 4096, 11008, 32, 32, 32, 4096), source=_LLAMA2.format("7b")
    ),
    "llama2-13b": Preset(
        shape=_llama(32000, 5120, 13824, 40, 40, 40, 4096), source=_LLAMA2.format("13b")
    ),
    "llama2-70b": Preset(
        shape=_llama(32000, 8192, 28672, 80, 64, 8, 4096), source=_LLAMA2.format("70b")
    ),
    "llama3-8b": Preset(
        shape=_llama(128256, 4096, 14336, 32, 32, 8, 8192, theta=500000.0),
        source=_LLAMA3.format("Meta-Llama-3-8B"),
    ),
    "llama3-70b": Preset(
        shape=_llama(128256, 8192, 28672, 80, 64, 8, 8192, theta=500000.0),
        source=_LLAMA3.format("Meta-Llama-3-70B"),
    ),
    "llama3.1-405b": Preset(
        shape=_llama(
            128256, 16384, 53248, 126, 128, 8, 131072, theta=500000.0, positions_stretched=8.0
        ),
        source=_LLAMA3.format("Llama-3.1-405B"),
    ),
    "llama3.2-1b": Preset(
        shape=_llama(
            128256, 2048, 8192, 16, 32, 8, 131072,
            theta=500000.0, tied=True, positions_stretched=32.0,
        ),
        source=_CARD.format("meta-llama/Llama-3.2-1B"),
    ),
    "mixtral-tiny": Preset(
        shape=ModelShape(
            model_type="mixtral", vocab_size=0, hidden_size=64, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=256, num_experts=8, num_experts_per_tok=2,
        ),
        source="ours: llama-tiny with eight experts, of which a token visits two; for tests",
    ),
    "qwen3-moe-tiny": Preset(
        shape=ModelShape(
            model_type="qwen3_moe", vocab_size=0, hidden_size=64, intermediate_size=96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=256, rms_norm_eps=1e-6, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=48,
        ),
        source="ours: the smallest shape of its kind, with heads wider than hidden / heads; for "
        "tests",
    ),
    "mixtral-8x7b": Preset(
        shape=ModelShape(
            model_type="mixtral", vocab_size=32000, hidden_size=4096, intermediate_size=14336,
            num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            max_position_embeddings=32768, rope_theta=1e6, num_experts=8, num_experts_per_tok=2,
        ),
        source="Jiang et al. 2024, arXiv:2401.04088, table 1; config.json of "
        "mistralai/Mixtral-8x7B-v0.1",
    ),
    "mixtral-8x22b": Preset(
        shape=ModelShape(
            model_type="mixtral", vocab_size=32768, hidden_size=6144, intermediate_size=16384,
            num_hidden_layers=56, num_attention_heads=48, num_key_value_heads=8,
            max_position_embeddings=65536, rope_theta=1e6, num_experts=8, num_experts_per_tok=2,
        ),
        source=_CARD.format("mistralai/Mixtral-8x22B-Instruct-v0.1"),
    ),
    "qwen3-8b": Preset(
        shape=ModelShape(
            model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288,
            num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
        ),
        source=_CARD.format("Qwen/Qwen3-8B"),
    ),
    "qwen3-30b-a3b": Preset(
        shape=ModelShape(
            model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144,
            num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
            max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        ),
        source=_CARD.format("Qwen/Qwen3-30B-A3B"),
    ),
    "gpt3-175b": Preset(
        shape=ModelShape(
            model_type="gpt2", vocab_size=50257, hidden_size=12288, intermediate_size=49152,
            num_hidden_layers=96, num_attention_heads=96, num_key_value_heads=96,
            max_position_embeddings=2048, tie_word_embeddings=True,
        ),
        source="Brown et al. 2020, arXiv:2005.14165, table 2.1",
    ),
    "bert-tiny": Preset(
        shape=_bert(64, 2, 4, vocab=0), source="ours: the smallest shape; for tests"
    ),
    "bert-large": Preset(
        shape=_bert(1024, 24, 16),
        source="Devlin et al. 2019, arXiv:1810.04805, section 3; config.json of "
        "google-bert/bert-large-uncased",
    ),
    "bert-1.5b": Preset(
        shape=_bert(1600, 48, 25),
        source="AWS and Habana, BERT 1.5B on DL1: 48 blocks, hidden 1,600, 25 heads (the sizes of "
        "GPT-2 XL), MLP of four times the hidden size",
    ),
}  # fmt: skip
