"""A checkpoint of the library goes on in any other layout as if nothing had happened."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardyard
from shardyard.checkpoint.save import Saver
from shardyard.config.schema.recipe import Optim
from shardyard.errors import CheckpointError, NotFiniteError, RequestError, ShardyardError
from shardyard.train.optim import ShardOptimizer
from tests.distributed.ranks import run_on_ranks
from tests.library.runs import SEQ_LEN, build, take_steps
from tests.library.test_custom_module import PLAN, loss_sum, samples
from tests.library.test_custom_module import build as build_own

pytestmark = pytest.mark.heavy

Numbers = list[tuple[float, float]]


def _set_up(degrees: dict[str, Any], *, lr: float = 1e-3) -> tuple[Any, Any, Any]:
    mesh = shardyard.build_mesh(**degrees)
    model = shardyard.parallelize(build("llama-tiny"), mesh, seq_len=SEQ_LEN)
    # SGD with momentum has state, and no division by it that would make noise of rounding
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return mesh, model, optimizer


def _begin(folder: Path, degrees: dict[str, Any]) -> Numbers:
    """Two steps, a save, two more."""
    mesh, model, optimizer = _set_up(degrees)
    assert shardyard.load_checkpoint(folder, model, optimizer) is None
    take_steps(model, mesh, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.05  # as a schedule would
    shardyard.save_checkpoint(folder, model, optimizer, step=2, values={"mine": [1, 2]})
    return take_steps(model, mesh, optimizer, range(2, 4))


def _go_on(folder: Path, layouts: list[dict[str, Any]]) -> list[Numbers]:
    found = []
    for degrees in layouts:
        mesh, model, optimizer = _set_up(degrees, lr=1.0)
        loaded = shardyard.load_checkpoint(folder, model, optimizer)
        assert loaded == shardyard.Loaded(step=2, values={"mine": [1, 2]})
        assert optimizer.param_groups[0]["lr"] == 0.05
        found.append(take_steps(model, mesh, optimizer, range(2, 4)))
    return found


@pytest.mark.parametrize(
    ("begun", "gone_on"),
    [
        ((2, {"dp_shard": 2}), {1: [{}], 2: [{"tp": 2}, {"pp": 2}]}),
        pytest.param(
            (2, {"pp": 2}),
            {1: [{}], 2: [{"dp_replicate": 2, "dp_shard": 1}]},
            marks=pytest.mark.system,
        ),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(
    tmp_path: Path, begun: tuple[int, dict[str, Any]], gone_on: dict[int, list[dict[str, Any]]]
) -> None:
    expected = run_on_ranks(_begin, begun[0], tmp_path, begun[1])[0]
    for processes, layouts in gone_on.items():
        for found in run_on_ranks(_go_on, processes, tmp_path, layouts)[0]:
            for pair, wanted in zip(found, expected, strict=True):
                assert pair == pytest.approx(wanted, rel=1e-5), layouts


def _own(folder: Path, degrees: dict[str, Any], *, loads: bool) -> tuple[float, float]:
    """AdamW before and after a load, on a module of one's own."""
    mesh = shardyard.build_mesh(**degrees)
    model = shardyard.parallelize(build_own(), mesh, blocks="layers", plan=PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if loads:
        loaded = shardyard.load_checkpoint(str(folder), model, optimizer)
        assert loaded is not None and loaded.step == 1
        counts = {float(state["step"]) for state in optimizer.state.values()}
        assert counts == {1.0}
    else:
        _own_step(model, optimizer)
        shardyard.save_checkpoint(str(folder), model, optimizer, step=1)
    return _own_step(model, optimizer), _own_step(model, optimizer)


def _own_step(model: Any, optimizer: Any) -> float:
    loss = shardyard.accumulate(model, samples(0).chunk(2), loss_sum)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _own_again(folder: Path, degrees: dict[str, Any]) -> tuple[float, float]:
    return _own(folder, degrees, loads=True)


def _own_begin(folder: Path, degrees: dict[str, Any]) -> tuple[float, float]:
    return _own(folder, degrees, loads=False)


def test_adamw_of_a_planned_module_goes_on_in_one_process(tmp_path: Path) -> None:
    expected = run_on_ranks(_own_begin, 2, tmp_path, {"tp": 2})[0]
    found = run_on_ranks(_own_again, 1, tmp_path, {})[0]
    assert found == pytest.approx(expected, rel=1e-5)


def _damage_and_load(folder: Path) -> list[str]:
    """What was said and loaded when the newest checkpoint had been damaged, and of misuse."""
    _, model, optimizer = _set_up({})
    said = []

    def refused(call: Any) -> None:
        with pytest.raises(ShardyardError) as refusal:
            call()
        said.append(f"{type(refusal.value).__name__}: {refusal.value}")

    refused(lambda: shardyard.save_checkpoint(folder, model, step=1, values={"x": object()}))
    for step in (1, 2):
        shardyard.save_checkpoint(folder, model, optimizer, step=step)
    path = next((folder / "step-00000002").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.warns(UserWarning, match=r"step-00000002 is damaged.*An older one is loaded"):
        loaded = shardyard.load_checkpoint(folder, model, optimizer)
    assert loaded == shardyard.Loaded(step=1, values={})

    two = [{"params": list(model.parameters())[:1]}, {"params": list(model.parameters())[1:]}]
    grouped = torch.optim.SGD(two, lr=0.1)
    refused(lambda: shardyard.load_checkpoint(folder, model, grouped))
    early = build("llama-tiny")
    stale = torch.optim.SGD(early.parameters(), lr=0.1, momentum=0.9)
    early(
        **{key: torch.zeros(1, 4, dtype=torch.int64) for key in ("input_ids", "labels")}
    ).loss.backward()
    stale.step()
    refused(lambda: shardyard.save_checkpoint(folder, model, stale, step=3))
    odd = torch.optim.SGD(model.parameters(), lr=0.1)
    odd.state[next(model.parameters())] = {"memory": [1.0]}
    refused(lambda: shardyard.save_checkpoint(folder, model, odd, step=3))
    other = shardyard.parallelize(build("qwen3-moe-tiny"), shardyard.build_mesh())
    refused(lambda: shardyard.load_checkpoint(folder, other))
    return said


def test_damage_and_misuse_are_told(tmp_path: Path) -> None:
    json_text, groups, stale, odd, other = run_on_ranks(_damage_and_load, 1, tmp_path)[0]
    assert "cannot be written as JSON" in json_text and "Give numbers" in json_text
    assert groups.startswith(CheckpointError.__name__) and "has 2. Their learning rates" in groups
    assert stale.startswith(RequestError.__name__) and "Make the optimizer after" in stale
    assert "SGD keeps 'memory' as a list" in odd and "save without the optimizer" in odd
    assert "of another model" in other


def _read_a_runs(folder: Path) -> dict[str, Any]:
    _, model, _ = _set_up({})
    of_run = ShardOptimizer(model, Optim(lr=1e-3, weight_decay=0.1)).tensors()
    of_run["optim.exp_avg.model.norm.weight"].fill_(0.25)
    saver = Saver(folder, group=dist.new_group(backend="gloo"), rank=0, world_size=1, keep_last=1)
    saver.save(7, of_run, {"progress": {"step": 7}})
    saver.wait()
    saver.close()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    loaded = shardyard.load_checkpoint(folder, model, optimizer)
    assert loaded is not None and loaded.step == 7
    state = optimizer.state[dict(model.named_parameters())["model.norm.weight"]]
    assert float(state["step"]) == 0.0 and optimizer.param_groups[0]["lr"] == 0.5
    assert (state["exp_avg"] == 0.25).all()
    return loaded.values


def test_the_checkpoint_of_a_run_is_read_too(tmp_path: Path) -> None:
    assert run_on_ranks(_read_a_runs, 1, tmp_path)[0] == {"progress": {"step": 7}}


class Normalised(torch.nn.Module):
    """A module with parameters, statistics, a count, a mask, and a table that it makes itself."""

    mask: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3)])
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((3,), -torch.inf))
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.layers[0](x))
        return y


def _normalised(*, seed: int) -> Any:
    torch.manual_seed(0)
    model = shardyard.parallelize(Normalised(), shardyard.build_mesh(), blocks="layers")
    with torch.no_grad():
        model(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed)))
    return model


def _buffers_around_a_save(folder: Path) -> None:
    model = _normalised(seed=7)
    shardyard.save_checkpoint(folder, model, step=1)
    later = _normalised(seed=8)
    later.mask.zero_()
    later.table.zero_()
    assert not torch.equal(later.norm.running_mean, model.norm.running_mean)
    shardyard.load_checkpoint(folder, later)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(later.norm, name), getattr(model.norm, name)), name
    assert later.mask.tolist() == [-torch.inf] * 3
    assert later.table.tolist() == [0, 0, 0]  # it is not persistent: the module's own affair


def _buffers_of_format_1(folder: Path) -> None:
    model = _normalised(seed=7)
    _buffers_around_a_save(folder)
    before = model.norm.running_mean.clone()
    manifest = folder / "step-00000001" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    saver = Saver(folder, group=dist.new_group(backend="gloo"), rank=0, world_size=1, keep_last=1)
    params = {f"model.{name}": param.detach() for name, param in model.named_parameters()}
    saver.save(2, params, {"step": 2, "values": {}, "groups": []})
    saver.wait()
    saver.close()
    manifest = folder / "step-00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    with pytest.warns(UserWarning, match=r"before buffers were saved.*norm\.running_mean"):
        shardyard.load_checkpoint(folder, model)
    assert torch.equal(model.norm.running_mean, before)


def _buffers_that_differ(folder: Path) -> str:
    model = _normalised(seed=dist.get_rank())
    with pytest.raises(CheckpointError) as refusal:
        shardyard.save_checkpoint(folder, model, step=1)
    assert not (folder / "latest").exists()
    dist.all_reduce(model.norm.running_mean, dist.ReduceOp.SUM)
    dist.all_reduce(model.norm.running_var)
    shardyard.save_checkpoint(folder, model, step=1)
    return str(refusal.value)


def test_buffers_come_back_and_those_that_are_not_persistent_are_left_alone(tmp_path: Path) -> None:
    run_on_ranks(_buffers_around_a_save, 1, tmp_path)


def test_a_checkpoint_of_before_says_which_buffers_it_lacks(tmp_path: Path) -> None:
    run_on_ranks(_buffers_of_format_1, 1, tmp_path)


def test_buffers_that_differ_between_ranks_are_refused_at_the_first_save_by_name(
    tmp_path: Path,
) -> None:
    said = run_on_ranks(_buffers_that_differ, 2, tmp_path)
    assert said[0] == said[1]
    assert "step-00000001 was not saved: buffer norm.running_mean and 1 more of rank 0" in said[0]
    assert "is not that of rank 1" in said[0] and "Make it equal before" in said[0]


def _not_finite(folder: Path) -> str:
    _, model, optimizer = _set_up({"dp_shard": 2})
    shardyard.save_checkpoint(folder, model, optimizer, step=1)
    if dist.get_rank() == 1:
        model.lm_head.weight.detach().to_local()[0, 0] = torch.nan
    with pytest.raises(NotFiniteError) as refusal:
        shardyard.save_checkpoint(folder, model, optimizer, step=2)
    assert (folder / "latest").read_text() == "step-00000001\n"
    return str(refusal.value)


def test_a_model_that_is_not_finite_is_not_saved_and_the_rank_is_named(tmp_path: Path) -> None:
    said = run_on_ranks(_not_finite, 2, tmp_path)
    assert said[0] == said[1]
    assert "step-00000002 was not saved: rank 1: model.lm_head.weight holds NaN." in said[0]
    assert "load the newest one" in said[0]
