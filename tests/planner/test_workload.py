"""A recipe as a workload: every setting that time and memory depend on arrives."""

from typing import Any

import pytest

from shardyard.planner.memory import memory as memory_of
from shardyard.planner.workload import ShardingPolicy, Workload, optimizer_bytes, workload_of
from tests.planner.recipes import resolved_recipe, shape_of
from tests.planner.workloads import layout, workload


def of(**sections: dict[str, Any]) -> Workload:
    recipe = resolved_recipe(**sections)
    return workload_of(recipe, shape_of("llama2-7b"), layout(dp_shard=8))


def test_the_step_of_a_recipe_is_that_of_fully_shard() -> None:
    found = of()
    assert (found.seq_len, found.micro_batch, found.global_batch) == (4096, 1, 1024)
    assert (found.micro_batches, found.tokens) == (128, 4096)
    formats = found.formats
    assert (formats.compute, formats.compute_bytes) == ("bf16", 2)
    # master weights, gradients and two moments in fp32, each split at every zero level
    states = (formats.weight_bytes, formats.gradient_bytes, formats.optimizer_bytes)
    assert (*states, formats.keeping) == (4, 4, 8, ShardingPolicy())
    assert found.techniques.kernels == "eager"
    assert not found.techniques.mask and not found.techniques.uses_varlen


@pytest.mark.parametrize(
    ("whole", "data_ranks", "micro_batch", "passes"),
    [(16, 4, 2, 2), (10, 3, 2, 2), (10, 3, 4, 1), (3, 4, 1, 1)],
)
def test_the_micro_batches_of_a_rank_are_rounded_up(
    whole: int, data_ranks: int, micro_batch: int, passes: int
) -> None:
    w = workload(global_batch=whole, dp_shard=data_ranks, micro_batch=micro_batch)
    assert w.micro_batches == passes


def test_copies_read_different_samples_and_model_ranks_the_same() -> None:
    assert workload(global_batch=64, dp_shard=4, dp_replicate=4).micro_batches == 4
    assert workload(global_batch=64, dp_shard=4, tp=4).micro_batches == 16


@pytest.mark.parametrize(
    ("optim", "nbytes"),
    [
        ({"name": "adamw"}, 8),
        ({"name": "sgd", "momentum": 0.9}, 4),
        ({"name": "sgd", "momentum": 0.0}, 0),
        ({"name": "sgd", "momentum": 0.9, "nesterov": True}, 4),
        ({"name": "lamb"}, 8),
        ({"name": "lars", "momentum": 0.9}, 4),
        ({"name": "lion"}, 4),
        ({"name": "muon"}, 4),
        ({"name": "schedule_free_adamw"}, 8),
        ({"name": "lamb", "ema_decay": 0.999}, 8 + 4),
        ({"module": "own:Lion", "module_states": ["exp_avg"]}, 4),
        ({"module": "own:Lion"}, 8),
    ],
)
def test_the_optimizer_decides_its_bytes_a_parameter(optim: dict[str, Any], nbytes: int) -> None:
    optim = {"lr": 0.1, **optim}
    assert optimizer_bytes(resolved_recipe(optim=optim), "block matrix") == nbytes
    assert of(optim=optim).formats.optimizer_bytes == nbytes
    outside = 8 if optim.get("name") == "muon" else nbytes
    assert of(optim=optim).formats.outside_optimizer_bytes == outside


def test_adafactor_has_a_number_for_each_row_and_each_column() -> None:
    planned = of(optim={"name": "adafactor", "lr": 0.1, "ema_decay": 0.999})
    shape, formats = planned.shape, planned.formats
    width, inner, vocabulary = shape.hidden_size, shape.intermediate_size, shape.vocab_size
    keys = shape.num_key_value_heads * width // shape.num_attention_heads
    rows = 2 * width + 2 * keys + 2 * inner + width
    columns = 4 * width + 2 * width + inner
    norms = 2 * width
    elements = shape.block_parameters
    assert formats.optimizer_bytes == pytest.approx(4 * (rows + norms) / elements + 4)
    tables = 1 if shape.tie_word_embeddings else 2
    outside = tables * vocabulary * width + width
    assert formats.column_bytes == pytest.approx(
        (4 * columns / elements, 4 * tables * width / outside)
    )
    assert formats.outside_optimizer_bytes == pytest.approx(
        4 * (tables * vocabulary + width) / outside + 4
    )


@pytest.mark.parametrize(
    ("optim", "nbytes"),
    [
        # weight, gradient and copy; each average is read and written in fp32
        ({"name": "sgd"}, 24),
        ({"name": "sgd", "momentum": 0.9}, 24 + 8),
        ({"name": "adamw"}, 24 + 2 * 8),
        # and LAMB writes its direction and reads it twice, and the weight twice more
        ({"name": "lamb"}, 24 + 2 * 8 + 5 * 4),
        # averaging reads and writes the average, and reads the weight
        ({"name": "sgd", "ema_decay": 0.999}, 24 + 3 * 4),
    ],
)
def test_the_optimizer_decides_what_an_update_moves(optim: dict[str, Any], nbytes: int) -> None:
    for states in ("fp32", "bf16"):  # made fp32 for the update
        found = of(optim={"lr": 0.1, **optim}, precision={"optimizer_states": states})
        assert found.formats.update_bytes == nbytes


@pytest.mark.parametrize(
    ("optim", "nbytes"),
    [
        ({"name": "adamw"}, 4),
        ({"name": "sgd", "momentum": 0.9}, 2),
        # one of its states is other weights
        ({"name": "schedule_free_adamw", "betas": [0.9, 0.99], "lr": 0.1}, 4 + 2),
    ],
)
def test_averages_held_in_bf16_are_counted_as_such(optim: dict[str, Any], nbytes: int) -> None:
    precision = {"optimizer_states": "bf16"}
    assert of(optim=optim, precision=precision).formats.optimizer_bytes == nbytes


def test_fp32_computes_and_gathers_in_four_bytes() -> None:
    found = of(precision={"compute": "fp32", "output": "fp32"})
    assert (found.formats.compute, found.formats.compute_bytes) == ("fp32", 4)


@pytest.mark.parametrize(
    ("sections", "field", "value"),
    [
        ({"model": {"compile": True}}, "kernels", "compiled"),
        ({"model": {"dropout": 0.1}}, "dropout", True),
        ({"parallel": {"prefetch": 2}}, "prefetch", 2),
        ({"memory": {"offload": "optimizer"}}, "offload", "optimizer"),
        ({"precision": {"compute": "fp8", "fp8_scaling": "rowwise"}}, "fp8_rows", True),
        ({"memory": {"offload": "activations", "offload_depth": 3}}, "offload_depth", 3),
    ],
)
def test_settings_become_techniques(sections: dict[str, Any], field: str, value: object) -> None:
    assert getattr(of(**sections).techniques, field) == value


def test_gradients_are_summed_in_the_format_that_the_recipe_names() -> None:
    assert of(precision={"reduce": "fp32"}).formats.reduce_bytes == 4
    assert of(precision={"reduce": "bf16"}).formats.reduce_bytes == 2


@pytest.mark.parametrize(
    ("given", "planned"),
    [("full", "full"), ("selective", "selective"), (2, 2), (["mlp"], "none")],
)
def test_recompute_arrives_and_named_modules_count_as_kept(given: Any, planned: object) -> None:
    assert of(memory={"recompute": given}).recompute == planned


def test_a_plan_says_whether_the_states_of_the_users_own_optimizer_are_known() -> None:
    unknown = of(optim={"module": "own:Lion", "lr": 0.1})
    known = of(optim={"module": "own:Lion", "lr": 0.1, "module_states": ["exp_avg"]})
    reasons = [
        next(term.reason for term in memory_of(each).terms if term.name == "optimizer")
        for each in (unknown, known)
    ]
    assert reasons[0].startswith("8 bytes each: 2 states assumed, as optim.module declares none: ")
    assert reasons[1].startswith("4 bytes each: states of optim.module (exp_avg)")
