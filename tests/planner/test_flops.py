"""FLOP per token against numbers that others print."""

import pytest

from shardyard.planner.kernels import flops_per_token
from tests.planner.recipes import shape_of


@pytest.mark.parametrize(
    ("seq_len", "full_gflop", "causal_gflop"),
    [
        # Llama 3.1 8B: 7.505 B matmul parameters, 32 blocks, width 4,096. At 8,192 tokens,
        # Megatron-LM's examples/llama prints 800 TFLOP/s at 13,812 tokens/s (57.9 G, full), and
        # Megatron-Bridge's archive 744 TFLOP/s at 14,451 tokens/s (51.5 G, causal).
        (2048, 48.2, 46.6),
        (4096, 51.5, 48.2),
        (8192, 57.9, 51.5),
    ],
)
def test_llama_3_8b_costs_what_others_print(
    seq_len: int, full_gflop: float, causal_gflop: float
) -> None:
    flops = flops_per_token(shape_of("llama3-8b"), seq_len)
    assert flops["full"] / 1e9 == pytest.approx(full_gflop, abs=0.1)
    assert flops["causal"] / 1e9 == pytest.approx(causal_gflop, abs=0.1)
    assert set(flops) == {"full", "causal"}


def test_the_two_vendor_rows_are_reproduced() -> None:
    flops = flops_per_token(shape_of("llama3-8b"), 8192)
    assert flops["full"] * 13812 / 1e12 == pytest.approx(800, rel=0.002)
    assert flops["causal"] * 14451 / 1e12 == pytest.approx(744, rel=0.002)


def test_the_input_embedding_is_a_look_up_and_costs_nothing() -> None:
    shape = shape_of("llama2-7b")
    # 6,738,415,616 parameters, less the table 32,000 x 4,096 and 65 norms of 4,096
    matmul = 6_738_415_616 - 32_000 * 4_096 - 65 * 4_096
    assert flops_per_token(shape, 0)["full"] == 6.0 * matmul


def test_a_masked_language_model_multiplies_hidden_tokens_alone_by_its_vocabulary() -> None:
    bert = shape_of("bert-large")
    table = bert.vocab_size * bert.hidden_size
    blocks = bert.matmul_parameters - table
    # Devlin et al. 2019, section 3.1: 15 % of the tokens
    assert flops_per_token(bert, 0)["full"] == pytest.approx(6.0 * (blocks + 0.15 * table))
