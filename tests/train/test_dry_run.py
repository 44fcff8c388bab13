"""The dry run against a step on real tensors, and against arithmetic."""

import dataclasses
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Recipe
from shardyard.data.loader import MicroBatch
from shardyard.errors import RequestError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.models.build import build_on_meta
from shardyard.parallel.mesh import build_mesh
from shardyard.planner.dry_run import dry_run as ask_in_a_process
from shardyard.planner.memory import memory
from shardyard.planner.state_memory import checkpoint_bytes
from shardyard.planner.workload import workload_of
from shardyard.train.build import build_optimizer, build_sharded
from shardyard.train.dry_run import dry_run
from shardyard.train.optim import ShardOptimizer
from shardyard.train.step import Stepper
from tests.planner.recipes import resolved_recipe

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:TF32 acceleration"),  # of setting oneDNN's flags at all
]

SHAPE = dataclasses.replace(
    PRESETS["llama-tiny"].shape, vocab_size=2000, hidden_size=128, intermediate_size=344
)
SEQ_LEN = 256
ONE_RANK = Layout(dp_replicate=1, dp_shard=1, zero=3)
FOUR_RANKS = Layout(dp_replicate=1, dp_shard=4, zero=3)


def tiny(*, passes: int = 2, layout: Layout = ONE_RANK, **sections: dict[str, Any]) -> Recipe:
    samples = 2 * passes * layout.data_ranks
    given: dict[str, dict[str, Any]] = {
        "model": {"preset": "llama-tiny"},
        "data": {"seq_len": SEQ_LEN},
        "optim": {"lr": 1e-3, "weight_decay": 0.1, "global_batch": samples, "micro_batch": 2},
        **sections,
    }
    return resolved_recipe(**given)


def peak_bytes(answer: dict[str, Any]) -> int:
    highest: int = max(moment["bytes"] for moment in answer["moments"])
    return highest


def terms_of(answer: dict[str, Any], phase: str) -> dict[str, int]:
    terms: dict[str, int] = next(
        moment["terms"] for moment in answer["moments"] if moment["phase"] == phase
    )
    return terms


def allocated_peak(recipe: Recipe, layout: Layout, shape: ModelShape = SHAPE) -> int:
    """The highest sum of what torch's allocator gave to a step on real tensors.

    Collectives do nothing here either: gloo would free its own copies in threads that the profiler
    does not see.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    with (
        # oneDNN copies what is in bf16 to fp32 on processors without instructions for it
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen,
    ):
        _step_on_real_tensors(recipe, layout, shape)
    gc.collect()
    dist.destroy_process_group()
    held = highest = 0
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def _step_on_real_tensors(recipe: Recipe, layout: Layout, shape: ModelShape) -> None:
    device = torch.device("cpu")
    mesh = build_mesh(layout, "cpu")
    task = build_sharded(recipe, shape, mesh, device=device)
    optimizer = build_optimizer(recipe, task, mesh, device=device)
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
    fields = {"tokens": ids, "targets": ids, "positions": ids}
    rows = torch.zeros(2, dtype=torch.int64)
    batch = MicroBatch(fields=fields, samples_B=rows, work=ids.numel())
    stepper = Stepper(task, optimizer, mesh, device=device, grad_clip=1.0)
    stepper.run([batch, batch], lr=1e-3, drain=False)


CHUNK = {"loss in chunks": 100}
"""Tokens; of the others all."""
CASES = {
    "loss in chunks": (Layout(dp_replicate=1, dp_shard=8, zero=3), "fp32", "full"),
    "one rank": (Layout(dp_replicate=1, dp_shard=1, zero=1), "bf16", "none"),
    "zero 1": (Layout(dp_replicate=1, dp_shard=2, zero=1), "fp32", "selective"),
    "zero 2": (Layout(dp_replicate=1, dp_shard=8, zero=2), "bf16", "full"),
    "zero 3": (Layout(dp_replicate=1, dp_shard=8, zero=3), "bf16", "none"),
    "named modules": (Layout(dp_replicate=1, dp_shard=64, zero=3), "bf16", ("mlp",)),
    "replicated": (Layout(dp_replicate=2, dp_shard=1, zero=1), "bf16", "none"),
    "hybrid": (Layout(dp_replicate=4, dp_shard=2, zero=3), "bf16", "full"),
}


QUICK = ("one rank", "zero 3", "loss in chunks")


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.system) for n in CASES if n not in QUICK)]
)
def test_the_peak_is_what_torchs_allocator_gives_to_a_real_step(name: str) -> None:
    layout, compute, recompute = CASES[name]
    recipe = tiny(
        layout=layout,
        precision={"compute": compute, "output": compute},
        memory={"recompute": recompute, "loss_chunk": CHUNK.get(name, "none")},
    )
    real = allocated_peak(recipe, layout)
    # blocks of 512 bytes on a GPU, of 64 on a CPU; kernels' own scratch is seen here alone
    assert peak_bytes(dry_run(recipe, SHAPE, layout)) == pytest.approx(real, rel=0.005)


def test_a_peak_inside_a_blocks_backward_is_found_too() -> None:
    shape = dataclasses.replace(SHAPE, vocab_size=80)
    recipe = tiny(layout=FOUR_RANKS, memory={"recompute": "full"})
    answer = dry_run(recipe, shape, FOUR_RANKS)
    highest = max(answer["moments"], key=lambda moment: int(moment["bytes"]))
    assert highest["terms"]["logits and loss"] == 0
    assert highest["bytes"] == pytest.approx(allocated_peak(recipe, FOUR_RANKS, shape), rel=0.01)


def test_states_are_twelve_bytes_a_parameter_and_four_more_with_gradients() -> None:
    answer = dry_run(tiny(layout=FOUR_RANKS), SHAPE, FOUR_RANKS)
    quarter = SHAPE.parameters / 4
    terms = terms_of(answer, "optimizer step")
    # small parameters are rounded up: 20 of them, with two moments and a step count each
    assert terms["parameters"] == pytest.approx(4 * quarter, rel=0.03)
    assert terms["gradients"] == pytest.approx(4 * quarter, rel=0.03)
    assert terms["optimizer"] == pytest.approx(8 * quarter, rel=0.05)
    assert sum(terms.values()) == pytest.approx(16 * quarter, rel=0.05)


def test_muon_holds_four_bytes_a_parameter_of_blocks_and_eight_of_the_rest() -> None:
    optim = {
        "name": "muon", "lr": 1e-3, "weight_decay": 0.1, "global_batch": 16, "micro_batch": 2,
    }  # fmt: skip
    recipe = tiny(layout=FOUR_RANKS, optim=optim)
    found = terms_of(dry_run(recipe, SHAPE, FOUR_RANKS), "optimizer step")["optimizer"]
    workload = workload_of(recipe, SHAPE, FOUR_RANKS)
    predicted = memory(workload).term("optimizer")
    assert found == pytest.approx(predicted, rel=0.05)
    assert predicted < 0.8 * 8 * SHAPE.parameters / 4
    checkpoint = checkpoint_bytes(recipe, SHAPE)
    assert checkpoint == pytest.approx(4 * SHAPE.parameters + 4 * predicted, rel=1e-3)


@pytest.mark.parametrize("layout", [ONE_RANK, FOUR_RANKS], ids=["one rank", "zero 3 over four"])
def test_adafactor_holds_numbers_of_rows_and_columns(layout: Layout) -> None:
    shape = dataclasses.replace(
        SHAPE, hidden_size=2048, intermediate_size=5632, num_attention_heads=16,
        num_key_value_heads=16, head_dim=128,
    )  # fmt: skip
    optim = {
        "name": "adafactor", "lr": 1e-3, "weight_decay": 0.1, "global_batch": 16, "micro_batch": 2,
    }  # fmt: skip
    recipe = tiny(layout=layout, optim=optim)
    found = terms_of(dry_run(recipe, shape, layout), "optimizer step")["optimizer"]
    predicted = memory(workload_of(recipe, shape, layout)).term("optimizer")
    assert found == pytest.approx(predicted, rel=0.05)
    states = ShardOptimizer(build_on_meta(shape), recipe.optim).tensors()
    held = sum(each.nbytes for name, each in states.items() if name.startswith("optim.exp_avg"))
    assert checkpoint_bytes(recipe, shape) - 4 * shape.parameters == held


def test_the_loss_holds_one_fp32_number_a_logit_beside_the_logits() -> None:
    # of several ranks: one makes both factors of the head's gradient fp32, on a CPU
    answer = dry_run(tiny(passes=1, layout=FOUR_RANKS), SHAPE, FOUR_RANKS)
    # probabilities, which become their gradient; and that in the format of the logits
    assert terms_of(answer, "backward")["logits and loss"] == (4 + 2) * 2 * SEQ_LEN * 2000


@pytest.mark.parametrize("zero", [*(pytest.param(n, marks=pytest.mark.system) for n in (1, 2)), 3])
def test_a_third_micro_batch_allocates_no_more_than_the_second(zero: int) -> None:
    layout = dataclasses.replace(FOUR_RANKS, zero=zero)
    recipe = tiny(passes=3, layout=layout)
    two, three = (dry_run(recipe, SHAPE, layout, most_passes=most) for most in (2, 3))
    assert (two["micro_batches"], three["micro_batches"]) == (2, 3)
    assert peak_bytes(two) == peak_bytes(three)


@pytest.mark.parametrize("across", [True, False])
def test_attention_is_the_flash_kernel_with_grouped_heads_and_with_a_mask(across: bool) -> None:
    recipe = tiny(data={"seq_len": SEQ_LEN, "attend_across_documents": across})
    assert dry_run(recipe, SHAPE, ONE_RANK)["attention"] == "flash"


def test_any_world_size_is_run_in_one_process() -> None:
    layout = Layout(dp_replicate=4, dp_shard=256, zero=3)
    answer = dry_run(tiny(layout=layout), SHAPE, layout)
    assert terms_of(answer, "optimizer step")["parameters"] < 4 * SHAPE.parameters / 20


PHASES = (
    "building the model for 4 ranks",
    "forward, micro-batch 1 of 2", "loss, micro-batch 1 of 2", "backward, micro-batch 1 of 2",
    "forward, micro-batch 2 of 2", "loss, micro-batch 2 of 2", "backward, micro-batch 2 of 2",
    "optimizer step", "finding the peaks",
)  # fmt: skip


def test_the_command_line_gets_the_same_answer_from_a_process() -> None:
    recipe = tiny(layout=FOUR_RANKS)
    here = dry_run(recipe, SHAPE, FOUR_RANKS)
    told: list[tuple[str, int, int]] = []
    answer = ask_in_a_process(recipe, SHAPE, FOUR_RANKS, on_phase=lambda *phase: told.append(phase))
    assert told == [("starting torch", 0, 0), *((name, n, 9) for n, name in enumerate(PHASES))]
    assert answer.peak.bytes == peak_bytes(here)
    assert [moment.phase for moment in answer.moments] == [
        "forward", "loss", "backward", "forward", "loss", "backward", "optimizer step",
    ]  # fmt: skip


def test_a_module_that_no_block_has_is_refused_from_within_the_process() -> None:
    recipe = tiny(memory={"recompute": ("mlq",)})
    with pytest.raises(Exception, match=r"memory\.recompute names the module 'mlq'"):
        ask_in_a_process(recipe, SHAPE, ONE_RANK)


def test_activations_that_ranks_split_are_no_gradients() -> None:
    layout = dataclasses.replace(ONE_RANK, tp=2)
    found = dry_run(tiny(parallel={"tp": 2}), SHAPE, layout)
    assert terms_of(found, "loss")["gradients"] == 0  # the first pass has made none


def test_what_a_rank_keeps_falls_with_cp() -> None:
    shape = dataclasses.replace(SHAPE, num_hidden_layers=4, num_key_value_heads=4)
    long = {"seq_len": 2048}
    whole = dry_run(tiny(data=long), shape, ONE_RANK)
    context = dataclasses.replace(ONE_RANK, cp=4)
    part = dry_run(tiny(data=long, parallel={"cp": 4}), shape, context)
    kept, kept_of_part = (terms_of(found, "loss")["activations"] for found in (whole, part))
    # 0.37 if blocks kept the keys and values of all tokens
    assert kept_of_part < 0.27 * kept


def test_sums_as_integers_are_refused_as_they_look_at_numbers() -> None:
    recipe = tiny(precision={"reduce": "exact"})
    with pytest.raises(RequestError, match=r"reduce=exact: a dry run .* Use precision.reduce=fp32"):
        dry_run(recipe, SHAPE, ONE_RANK)


def test_an_optimizer_of_the_users_own_is_refused_as_it_takes_steps_with_numbers() -> None:
    recipe = tiny(optim={"module": "own:Lion", "lr": 0.1})
    with pytest.raises(RequestError, match=r"module=own:Lion: a dry run .* Use optim.name=adamw"):
        dry_run(recipe, SHAPE, ONE_RANK)
