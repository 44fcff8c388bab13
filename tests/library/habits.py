"""Habits of scripts for DDP, FSDP2, accelerate and DeepSpeed, and what each becomes by ``wrap()``.

`make docs` writes the tables of docs/from-ddp.md from these rows, and test_habits.py holds each to
the test that runs it. ``python -m tests.library.habits`` counts them. Needs no torch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

How = Literal["works equal", "works", "changes", "rejected by name"]
_BY_VALUE = "test_replicated.py::test_a_habit_of_ddp_does_what_it_does_there"
_SHARDED = "test_replicated.py::test_a_habit_stays_where_ranks_share_the_parameters"
_SHARES = "test_fully_sharded.py::test_what_would_use_one_ranks_share_says_what_to_write"
_LATER = "test_fully_sharded.py::test_what_would_train_otherwise_after_wrap_is_rejected"
_PARAMETERS = (
    "test_fully_sharded.py::test_parameters_that_cannot_be_shared_are_named_with_the_way_out"
)
_OPTIMIZERS = "test_fully_sharded.py::test_optimizers_that_would_step_something_else_are_named"
_NUMBERS = "test_fully_sharded.py::test_a_number_of_sharded_gradients_is_the_whole_one_or_an_error"
_ALONE = (
    "test_fully_sharded.py::"
    "test_an_evaluation_on_one_rank_alone_ends_before_the_others_barrier_does"
)
_FOLDER = "test_replicated.py::test_a_folder_of_transformers_holds_the_trained_weights"
_ACCELERATE = (
    "test_from_accelerate.py::test_the_loops_of_transformers_scripts_train_as_by_accelerate"
)
_TWO_LINES = "test_two_lines.py::test_two_lines_train_as_the_plain_script"
_LAYOUTS = "test_wrap_layouts.py::test_losses_and_norms_are_those_of_torchs_own_in_every_layout"
_FOUR_RANKS = "test_torch_cases.py::test_a_model_of_torchs_tests_trains_the_same_on_four_ranks"
_DURABLE = (
    "test_resumable_steps.py::"
    "test_a_script_killed_during_a_write_ends_with_every_bit_of_an_unbroken_one"
)
_RESTARTED = "test_two_lines.py::test_one_more_line_goes_on_after_a_rank_was_killed"
_AXES = "test_model_axes.py::test_a_script_trains_on_every_axis_as_one_process_does"
_OWN = "test_custom_script.py::test_a_model_of_ones_own_trains_as_in_one_process"


@dataclass(frozen=True)
class Outcome:
    """What becomes of a habit in one layout."""

    how: How
    cell: str
    """As the page has it."""
    tests: tuple[str, ...]
    """``file::function`` below tests/library, with ``[case]`` where it is one of several."""
    words: tuple[str, ...] = ()
    """Of the message, where it is rejected."""


@dataclass(frozen=True)
class Habit:
    """One row of the page."""

    script: str
    """What stands in the script."""
    sharded: Outcome
    whole: Outcome | None = None
    """Where each rank holds the whole model; None: as where ranks share the parameters."""


def _equal(*tests: str, cell: str = "stays") -> Outcome:
    """Compared by value with the framework."""
    return Outcome("works equal", cell, tests)


def _works(*tests: str, cell: str = "stays") -> Outcome:
    return Outcome("works", cell, tests)


def _becomes(cell: str, *tests: str) -> Outcome:
    return Outcome("changes", cell, tests)


def _rejected(*words: str, by: tuple[str, ...], cell: str = "rejected, by name") -> Outcome:
    return Outcome("rejected by name", cell, by, words)


DDP = (
    Habit(
        "`if rank == 0: torch.save(model.state_dict(), ...)`",
        _rejected(
            "holds one rank's shard of each parameter",
            by=(_SHARES,),
            cell="an error names `get_model_state_dict` with `full_state_dict=True`, called by all "
            "ranks",
        ),
        _equal(f"{_BY_VALUE}[rank 0 alone]", cell="stays; names have no `module.` in front"),
    ),
    Habit(
        "a dict made by hand of `state_dict()`, of a part or the optimizer; `torch.save(model)`",
        _rejected(
            "holds one rank's shard of it",
            "a file of this _Net would hold one rank's shard",
            by=(_SHARES,),
            cell="an error names the same call",
        ),
        _equal(f"{_BY_VALUE}[rank 0 alone]"),
    ),
    Habit(
        "`load_state_dict()` of whole weights or optimizer state, on all ranks",
        _equal(f"{_SHARDED}[loaded]"),
        _equal(f"{_BY_VALUE}[loaded]"),
    ),
    Habit(
        "`model.apply(init)` after `wrap`, `param.copy_(...)`, `.data`, `vector_to_parameters`",
        _equal(
            f"{_SHARDED}[initialised later]",
            f"{_SHARDED}[written from a vector]",
            cell="stay; ranks write the same numbers",
        ),
        _equal(
            f"{_BY_VALUE}[initialised later]", f"{_BY_VALUE}[written from a vector]", cell="stay"
        ),
    ),
    Habit(
        "squares of parameters, or their distance from others, in the loss",
        _equal(f"{_SHARDED}[decay in the loss]", cell="stay"),
        _equal(f"{_BY_VALUE}[decay in the loss]", cell="stay"),
    ),
    Habit(
        "`model.save_pretrained(folder)` on rank 0",
        _rejected(
            "shardyard.export(model, folder)",
            by=(_SHARES, _FOLDER),
            cell="`shardyard.export(model, folder)` on all ranks",
        ),
        _works(_FOLDER),
    ),
    Habit(
        "evaluation or `generate` only on rank 0",
        _rejected(
            "rank 0 calls the model without gradients, and other ranks do not",
            by=(_ALONE,),
            cell="all ranks call the model; a warning after 10 s, then an error, say so",
        ),
        _equal(f"{_BY_VALUE}[rank 0 alone]", _FOLDER, cell="stays, inside `torch.no_grad()`"),
    ),
    Habit(
        "`with model.no_sync():`, `model.module`",
        _equal(f"{_SHARDED}[no_sync]", cell="stay"),
        _equal(f"{_BY_VALUE}[no_sync]", cell="stay"),
    ),
    Habit(
        "`AveragedModel(model)`, `copy.deepcopy(model)`",
        _rejected(
            "a copy of this _Net would hold one rank's shard",
            "this AveragedModel was made before wrap()",
            by=(_SHARES, _LATER),
            cell="an error names the lines of an average",
        ),
        _equal(f"{_BY_VALUE}[averages of weights]", cell="stay; the copy is a plain module"),
    ),
    Habit(
        "`param.register_hook(...)`",
        _rejected(
            "has a hook, which would never be called",
            "a hook of layers.0.weight would never be called",
            by=(_PARAMETERS, _SHARES),
        ),
        _equal(f"{_BY_VALUE}[hooks of parameters]"),
    ),
    Habit(
        "`param.grad.norm().item()`",
        _rejected(
            "one rank's share.*full_tensor",
            by=(_NUMBERS,),
            cell="an error says to call `full_tensor()` on all ranks first",
        ),
        _equal(f"{_BY_VALUE}[no_sync]"),
    ),
    Habit(
        "`torch.optim.LBFGS`, Muon, Adafactor, Rprop",
        _rejected(
            "LBFGS: keeps parameters in _params",
            "Muon: takes norms and signs of whole matrices",
            "Adafactor: takes norms and signs",
            "Rprop: takes norms and signs",
            by=(_OPTIMIZERS,),
        ),
        _equal(f"{_BY_VALUE}[LBFGS]", f"{_BY_VALUE}[two optimizers]", cell="stay"),
    ),
    Habit(
        "`create_graph=True`, `functional_call` with other tensors",
        _rejected(
            "create_graph=True: a second backward pass",
            "functional_call with another tensor than the parameter weight of layers.0",
            by=(_LATER,),
        ),
        _equal(f"{_BY_VALUE}[gradients of inputs]", f"{_BY_VALUE}[functional_call]", cell="stay"),
    ),
    Habit(
        "`torch.autograd.grad` by parameters; `model.encoder(x)` by itself",
        _rejected(
            "torch.autograd.grad by parameters of a sharded model",
            "encoder is called by itself",
            by=(_LATER,),
        ),
        _equal(f"{_BY_VALUE}[in parts]", cell="stay"),
    ),
    Habit(
        "`model.to(torch.bfloat16)`, new modules after `wrap`",
        _rejected(
            "Call model.to(torch.bfloat16) before wrap()",
            "layers.1 was not in this _Net when it was sharded",
            by=(_LATER,),
        ),
        _equal(f"{_BY_VALUE}[converted later]", f"{_BY_VALUE}[added later]", cell="stay"),
    ),
    Habit(
        "batch normalisation",
        _rejected("is a batch normalisation", by=(_PARAMETERS,), cell="rejected"),
        _equal(
            f"{_BY_VALUE}[buffers]",
            cell="stays: statistics are those of each rank's samples, and rank 0's are kept",
        ),
    ),
    Habit(
        "sparse embeddings; parameters of several formats, empty, single numbers, channels last",
        _rejected(
            "makes sparse gradients",
            "0.weight is torch.float32, 1.weight is torch.float64",
            "weight: is empty, of shape (0, 4)",
            "scale: is a single number",
            "weight: is not contiguous",
            by=(_PARAMETERS,),
        ),
        _equal(f"{_BY_VALUE}[odd parameters]"),
    ),
    Habit(
        "`Join([model])` for unequal numbers of batches",
        _becomes("give ranks equally many", _LAYOUTS),
        _equal(f"{_BY_VALUE}[Join]"),
    ),
    Habit(
        "`torch.autocast`, `torch.amp.GradScaler`",
        _equal(f"{_SHARDED}[autocast]", cell="stay"),
        _equal(f"{_BY_VALUE}[autocast]", cell="stay"),
    ),
    Habit(
        "parameters frozen or freed later",
        _equal(f"{_SHARDED}[frozen later]", f"{_SHARDED}[frozen at first]", cell="stay"),
        _equal(f"{_BY_VALUE}[frozen later]", f"{_BY_VALUE}[frozen at first]", cell="stay"),
    ),
    Habit(
        "ranks that call other modules in a step",
        _equal(
            f"{_SHARDED}[branches]",
            "../parallel/test_uneven_gradients.py::"
            "test_what_ranks_may_not_do_apart_is_named_in_the_first_step",
            cell="stays with `zero=2`; `zero=3` ends with an error that names it",
        ),
        _equal(f"{_BY_VALUE}[branches]"),
    ),
    Habit(
        "ranks that build other weights",
        _equal(f"{_SHARDED}[seeded by rank]", cell="begin with those of rank 0"),
        _equal(f"{_BY_VALUE}[seeded by rank]", cell="begin with those of rank 0"),
    ),
)

FSDP = (
    Habit(
        "`fully_shard(block)` for each block, and for the model",
        _equal(
            f"{_TWO_LINES}[fsdp]",
            cell='leave out; `wrap(model, optimizer, blocks="layers")` names blocks where they '
            "are in no `nn.ModuleList`",
        ),
    ),
    Habit(
        "a device mesh, a hybrid mesh",
        _equal(_FOUR_RANKS, cell="`SHARDYARD_PARALLEL=dp_replicate=2,dp_shard=4`"),
    ),
    Habit("`reshard_after_forward=False`", _equal(f"{_LAYOUTS}[zero=2]", cell="`zero=2`")),
    Habit(
        "`MixedPrecisionPolicy`",
        _becomes(
            "`torch.autocast` in the script; a recipe has `precision.compute`",
            f"{_SHARDED}[autocast]",
        ),
    ),
    Habit(
        "`model.set_requires_gradient_sync(False)`",
        _becomes("`with model.no_sync():`", f"{_SHARDED}[no_sync]"),
    ),
    Habit("`get_model_state_dict(model, options=...)` on all ranks", _equal(_SHARES)),
    Habit(
        "`torch.distributed.checkpoint`, `async_save`",
        _becomes(
            "`for step in shardyard.steps(1000, folder, model, optimizer, every=100):`, which "
            "writes while the next steps run",
            _DURABLE,
        ),
    ),
    Habit(
        "`parallelize_module` with a plan",
        _becomes(
            "`SHARDYARD_PARALLEL=tp=2`, for [known families]"
            "(library.md#tensor-context-expert-and-pipeline-parallelism); for a model of your own "
            '`wrap(..., plan={"layers.*.up": "columns", ...})`',
            _AXES,
            _OWN,
        ),
    ),
    Habit(
        "experts dealt over ranks (`ExpertParallel`)",
        _becomes(
            '`SHARDYARD_PARALLEL=ep=2`, and `wrap(..., experts="layers.*.experts")` for a model of '
            "your own",
            _AXES,
            _OWN,
        ),
    ),
)

ACCELERATE = (
    Habit(
        "`accelerator.prepare(model, optimizer, loader, scheduler)`",
        _equal(
            _ACCELERATE,
            cell="`shardyard.wrap(model, optimizer)`; loader and scheduler stay torch's",
        ),
    ),
    Habit(
        "a loader that `prepare` deals over ranks",
        _equal(
            _ACCELERATE,
            cell="`DistributedSampler(dataset)`, or rows `rank::world_size`. accelerate deals "
            "whole batches in turn, a `DistributedSampler` single samples",
        ),
    ),
    Habit("`accelerator.backward(loss)`", _equal(_ACCELERATE, cell="`loss.backward()`")),
    Habit(
        "`with accelerator.accumulate(model):`",
        _equal(
            _ACCELERATE,
            cell="divide the loss by the number of micro-batches, and step after the last; "
            "`with model.no_sync():` saves sums in between",
        ),
    ),
    Habit(
        "`accelerator.clip_grad_norm_(...)`",
        _equal(_ACCELERATE, cell="`torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)`"),
    ),
    Habit(
        "`scheduler.step()` after each batch",
        _equal(
            _ACCELERATE,
            cell="once a step; accelerate steps the scheduler once for each rank unless "
            "`step_scheduler_with_optimizer=False`",
        ),
    ),
    Habit(
        "`accelerator.unwrap_model(model)`",
        _equal(_ACCELERATE, cell="`model`, which keeps its class and its names"),
    ),
    Habit(
        "`accelerator.gather_for_metrics(x)`",
        _equal(
            _ACCELERATE,
            cell="`torch.distributed.all_gather`; drop the samples that a sampler has repeated",
        ),
    ),
    Habit(
        "`accelerator.save_state(folder)`, `load_state`",
        _becomes(
            "`shardyard.steps(...)`, which resumes by itself; random number generators are saved "
            "too",
            _DURABLE,
        ),
    ),
    Habit(
        "`unwrap_model(model).save_pretrained(...)`",
        _becomes("`shardyard.export(model, folder)` on all ranks", _FOLDER),
    ),
    Habit(
        "`accelerate launch --config_file fsdp.yaml`",
        _becomes("`torchrun`, and `SHARDYARD_PARALLEL`", _RESTARTED),
    ),
)

DEEPSPEED = (
    Habit(
        "`engine, optimizer, _, _ = deepspeed.initialize(...)`",
        _becomes("`model, optimizer = shardyard.wrap(model, optimizer)`", _LAYOUTS),
    ),
    Habit(
        "`engine(batch)`, `engine.backward(loss)`, `engine.step()`",
        _becomes(
            "`model(batch)`, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad()`",
            _LAYOUTS,
        ),
    ),
    Habit(
        "`zero_optimization.stage`",
        _becomes("`SHARDYARD_PARALLEL=zero=1`, `2` or `3`", f"{_LAYOUTS}[zero=1]"),
    ),
    Habit(
        "`gradient_accumulation_steps`",
        _becomes(
            "as in the accelerate table: DeepSpeed divides the loss and counts the steps for you",
            _LAYOUTS,
        ),
    ),
    Habit(
        "`gradient_clipping`",
        _becomes("`torch.nn.utils.clip_grad_norm_` before the step", _LAYOUTS),
    ),
    Habit(
        "`bf16.enabled`",
        _becomes(
            "`torch.autocast`, or a recipe's `precision.compute=bf16`", f"{_SHARDED}[autocast]"
        ),
    ),
    Habit(
        "`engine.save_checkpoint`, `zero_to_fp32.py`",
        _becomes(
            "`shardyard.steps(...)`; `shardyard.export(model, folder)` writes whole weights",
            _DURABLE,
            _FOLDER,
        ),
    ),
    Habit(
        "`offload_optimizer`, `offload_param`",
        _becomes(
            "a recipe's [`memory.offload`](settings.md); a script has none",
            "../distributed/test_offload.py::test_gradients_are_those_without_offload",
        ),
    ),
)

HABITS = {"DDP": DDP, "FSDP2": FSDP, "accelerate": ACCELERATE, "DeepSpeed": DEEPSPEED}
"""DeepSpeed is compared by value with DDP only, at each ZeRO level."""


def outcomes() -> Iterator[tuple[str, str, Habit, Outcome]]:
    """(framework, whole or sharded, row, outcome) of all."""
    for framework, rows in HABITS.items():
        for row in rows:
            if framework in ("DDP", "accelerate", "DeepSpeed"):
                yield framework, "whole", row, row.whole or row.sharded
            yield framework, "sharded", row, row.sharded


def counts() -> dict[tuple[str, str], Counter[How]]:
    """How many rows of a framework come out how, in each layout."""
    found: dict[tuple[str, str], Counter[How]] = {}
    for framework, layout, _, outcome in outcomes():
        found.setdefault((framework, layout), Counter())[outcome.how] += 1
    return found


if __name__ == "__main__":
    for (framework, layout), by_outcome in counts().items():
        words = ", ".join(f"{number} {how}" for how, number in by_outcome.items())
        print(f"{framework}, {layout}: {words}")
