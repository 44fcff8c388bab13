"""Weights in host memory are FSDP's own offload, pinned where there is a device."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from shardyard.config.schema.recipe import Recipe
from shardyard.parallel import apply, fsdp


class _Mesh:
    """One device of a kind."""

    def __init__(self, device: str) -> None:
        self.layout = SimpleNamespace(zero=3)
        self._device = device

    def sharding(self) -> Any:
        return SimpleNamespace(device_type=self._device, size=lambda: 1)


@pytest.mark.parametrize(
    ("device", "on_host", "expected"),
    [
        ("cuda", True, CPUOffloadPolicy(pin_memory=True)),
        ("cpu", True, CPUOffloadPolicy(pin_memory=False)),
        ("cuda", False, None),
    ],
)
def test_every_group_is_offloaded_or_none(
    device: str, on_host: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        fsdp, "fully_shard", lambda *_args, **options: given.append(options.get("offload_policy"))
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = fsdp.Groups(blocks=[model[0]], last=[model[1]], output_dtype=None)
    mesh: Any = _Mesh(device)
    fsdp.shard_groups(
        model, mesh, groups, precision=MixedPrecisionPolicy(), prefetch=1, on_host=on_host
    )
    assert given == [expected] * 3


@pytest.mark.parametrize("offload", ["none", "optimizer", "params"])
def test_a_recipe_that_offloads_params_asks_for_it(
    offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(apply, "shard_groups", lambda *_args, on_host, **_: given.append(on_host))
    recipe = Recipe.model_validate(
        {"memory": {"offload": offload}, "precision": {"compute": "fp32", "output": "fp32"}}
    )
    mesh: Any = SimpleNamespace(layout=SimpleNamespace(tp=1, dp_replicate=1, world_size=2))
    apply.parallelize_custom(nn.Linear(2, 2), mesh, recipe=recipe, blocks={}, words={})
    assert given == [offload == "params"]
