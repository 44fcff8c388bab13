"""FLOP per token of a decoder-only transformer, forward and backward, in both conventions.

Two conventions are in use, 4 to 13 % apart for the same model, so every figure names its own:

- ``full`` counts attention over all pairs of tokens: 6N + 12 L d s (PaLM, Chowdhery et al. 2022,
  arXiv:2204.02311, appendix B; torchtitan and llm-foundry print this one);
- ``causal`` counts only the pairs that a causal mask leaves, half of them: 6N + 6 L d s
  (Megatron-Bridge's tables).

N = parameters that multiply every token (not the input embedding, which is a look-up), L = blocks,
d = heads x head width, s = tokens of a sample. Recomputed FLOP never count: these are model FLOP.
"""

from shardyard.families.shape import ModelShape


def flops_per_token(shape: ModelShape, seq_len: int) -> dict[str, float]:
    """FLOP per token by convention.

    Attention is counted over the whole sample even where documents are kept apart: an upper bound
    there, and the number that other tools print.
    """
    matmul = 6.0 * shape.matmul_parameters
    pairs = float(shape.num_hidden_layers * shape.queries_width * seq_len)
    return {"full": matmul + 12 * pairs, "causal": matmul + 6 * pairs}
