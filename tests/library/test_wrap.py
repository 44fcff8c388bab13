"""What wrap() takes and refuses, and its exact means beside one process with the whole batch."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardyard
from shardyard.config.schema.recipe import Parallel, Recipe
from shardyard.errors import RequestError
from tests.distributed.ranks import run_on_ranks
from tests.library import runs


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def _stepped() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _module()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_parameter_of_something_else_is_refused() -> None:
    model = _module()
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(RequestError, match=r"shape \(3,\) that is not one of the Sequential's"):
        shardyard.wrap(model, optimizer)


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = _module()
    with pytest.raises(RequestError, match="on the meta device"):
        shardyard.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_exact_means_without_an_optimizer_are_refused() -> None:
    with pytest.raises(RequestError, match=r"starts again after each step of the optimizer"):
        shardyard.wrap(_module(), gradients="exact")  # type: ignore[call-overload]


def test_what_is_no_optimizer_is_refused() -> None:
    model = _module()
    schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 10)
    with pytest.raises(RequestError, match=r"StepLR is not a torch.optim.Optimizer"):
        shardyard.wrap(model, [schedule])  # type: ignore[type-var]


@pytest.mark.parametrize("axis", ["tp", "cp", "ep", "pp"])
def test_an_axis_that_splits_a_module_of_ones_own_is_refused(
    axis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDYARD_PARALLEL", f"dp_shard=2,{axis}=2")
    model = _module()
    with pytest.raises(
        RequestError, match=r"known families by tp, cp, ep and pp .* is not one of them"
    ):
        shardyard.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_axes_of_a_recipe_are_read() -> None:
    recipe = Recipe(parallel=Parallel(tp=2))
    model = _module()
    with pytest.raises(RequestError, match=r"known families by tp, cp, ep and pp"):
        shardyard.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), recipe=recipe)


@pytest.mark.parametrize("given", ["ranks=2", "dp_shard", "dp_shard=two"])
def test_a_word_that_is_no_degree_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_PARALLEL", given)
    model = _module()
    with pytest.raises(RequestError, match=r"is not a degree of an axis.*dp_shard=8,zero=2"):
        shardyard.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_no_checkpoints_at_all_are_refused(tmp_path: Path) -> None:
    model, optimizer = _stepped()
    with pytest.raises(RequestError, match=r"steps\(every=0\): give 1 or more"):
        next(shardyard.steps(3, tmp_path, model, optimizer, every=0))


def _labelled(step: int) -> dict[str, torch.Tensor]:
    """Samples with unequally many labels."""
    batch = runs.samples(step)
    for row in range(runs.SAMPLES):
        batch["labels"][row, 3 + row :] = -100
    return batch


def _frozen(tied: bool) -> Any:
    model = runs.build("llama-tiny", tied=tied)
    model.model.layers[0].requires_grad_(False)
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    norms = [param for name, param in named.items() if "norm" in name]
    rest = [
        param for name, param in named.items() if "norm" not in name and "layers.1.mlp" not in name
    ]
    groups: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.1}, {"params": norms}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)  # one MLP is in no group


def _whole(*, tied: bool) -> list[tuple[float, float]]:
    """One process, torch alone: the sum of all labels' losses divided by their number."""
    model = _frozen(tied)
    optimizer = _optimizer(model)
    found = []
    for step in range(3):
        loss = model(**_labelled(step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    return found


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _as_written(tied: bool, folder: str, layout: str) -> Any:
    os.environ["SHARDYARD_PARALLEL"] = layout
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = _frozen(tied)
    optimizer = _optimizer(model)
    model, optimizer = shardyard.wrap(model, optimizer, gradients="exact")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    found = []
    for step in shardyard.steps(3, folder, model, optimizer, scheduler, every=2):
        batch = _labelled(step)
        mine = {key: value[rank::ranks].chunk(2) for key, value in batch.items()}
        for micro in range(2):
            loss = model(**{key: value[micro] for key, value in mine.items()}).loss / 2
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with torch.no_grad():  # an evaluation between, of the same samples
            model.eval()
            whole = float(model(**batch).loss)
            model.train()
        assert set(model.parameters()) >= {p for g in optimizer.param_groups for p in g["params"]}
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        assert isinstance(norm, DTensor) is (layout != "")
        found.append((whole, float(_full(norm))))
    with pytest.raises(RequestError, match="split twice"):
        shardyard.wrap(model, optimizer)
    with pytest.raises(RequestError, match=r"has been through wrap.*the script calls it"):
        shardyard.accumulate(model, [batch])
    model(input_ids=batch["input_ids"]).logits.sum().backward()
    with pytest.raises(RequestError, match="is not the model's own"):
        optimizer.step()
    again = _frozen(tied)
    again, optimizer = shardyard.wrap(again, _optimizer(again))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    assert list(shardyard.steps(3, folder, again, optimizer, scheduler, every=2)) == []
    with pytest.raises(RequestError, match=r"state of 1 objects.*was given 0"):
        list(shardyard.steps(3, folder, again, optimizer, every=2))
    for name, param in again.state_dict().items():
        assert torch.equal(_full(param), _full(model.state_dict()[name])), name
    own = nn.Linear(4, 4)
    torch.nn.init.ones_(own.weight)
    torch.nn.init.ones_(own.bias)
    with pytest.raises(RequestError, match="what a Linear predicts is not known"):
        shardyard.wrap(own, torch.optim.SGD(own.parameters(), lr=0.1), gradients="exact")
    return found


@pytest.mark.heavy
@pytest.mark.parametrize(("tied", "layout"), [(False, ""), (True, "zero=3")])
def test_exact_means_are_those_of_one_process(tied: bool, layout: str, tmp_path: Path) -> None:
    found = run_on_ranks(_as_written, 2, tied, str(tmp_path), layout, timeout_s=90)
    expected = _whole(tied=tied)
    for of_rank in found:
        for ours, theirs in zip(of_rank, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=2e-6)


def _threads_after_each(layout: str) -> list[int]:
    os.environ["SHARDYARD_PARALLEL"] = layout
    found = []
    for _ in range(3):
        model = shardyard.wrap(_module())
        model(torch.ones(1, 4)).sum().backward()
        del model
        gc.collect()
        found.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return found


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["dp_replicate=2,dp_shard=1", "zero=3"])
def test_one_model_after_another_leaves_no_threads_of_process_groups(layout: str) -> None:
    for first, *later in run_on_ranks(_threads_after_each, 2, layout):
        assert later == [first, first]
