"""FLOP per token of a decoder-only transformer, forward and backward, in both conventions.

Two conventions are in use, 4 to 13 % apart for the same model, so every figure names its own:

- ``full`` counts attention over all pairs of tokens: 6N + 12 L d s (PaLM, Chowdhery et al. 2022,
  arXiv:2204.02311, appendix B; torchtitan and llm-foundry print this one);
- ``causal`` counts only the pairs that a causal mask leaves, half of them: 6N + 6 L d s
  (Megatron-Bridge's tables).

N = parameters that multiply every token (not the input embedding, which is a look-up), L = blocks,
d = heads x head width, s = tokens of a sample. Recomputed FLOP never count: these are model FLOP.

A third of each is the forward pass; of the backward pass of a product half is the gradient of its
input, half that of its matrix. What is frozen has no gradient of the matrix, and what lies beneath
the lowest parameter that is trained has no backward pass. Adapters have all three of theirs. The
head of a masked language model multiplies hidden tokens alone.
"""

from shardyard.config.masking import MASKED_SHARE
from shardyard.families.shape import ModelShape
from shardyard.planner.trainable_parameters import Trained


def flops_per_token(
    shape: ModelShape, seq_len: int, trained: Trained | None = None
) -> dict[str, float]:
    """FLOP per token by convention.

    Args:
        trained: What is, where some of the model is frozen.

    Attention is counted over the whole sample even where documents are kept apart: an upper bound
    there, and the number that other tools print.
    """
    layers = shape.num_hidden_layers
    inside = shape.matmul_parameters - shape.table_parameters
    head = shape.table_parameters * (1.0 if shape.is_causal else MASKED_SHARE)
    matmul = 6.0 * (inside + head)
    pairs = float(layers * shape.queries_width * seq_len)
    if trained is not None:
        block = inside / layers
        matmul = 2.0 * (inside + head)
        matmul += 2.0 * (block * (layers - trained.lowest) + head * trained.passes_head)
        matmul += 2.0 * (block * sum(trained.products) + head * trained.head_is_trained)
        matmul += 6.0 * trained.added
        pairs *= (1 + 2 * (layers - trained.lowest) / layers) / 3
    return {"full": matmul + 12 * pairs, "causal": matmul + 6 * pairs}
