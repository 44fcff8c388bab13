"""What a network for images drops: by sample, whatever passes through beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardyard.families.images.registry import KINDS
from shardyard.models.batch_norm import batch_norms_in
from shardyard.models.images import (
    add_image_dropout,
    blocks_of_network,
    build_network,
    fill_network,
    load_network,
    set_batch_norm_momentum,
)
from shardyard.models.random import SampleKeys
from tests.distributed.image_runs import TINY


def _dropping(kind: str, **drops: float) -> tuple[nn.Module, SampleKeys]:
    network = KINDS[kind].of_config({"model_type": kind, **TINY[kind]}, "tiny").with_classes(4)
    model, keys = build_network(network), SampleKeys()
    fill_network(model, network, seed=0)
    add_image_dropout(
        model, network, seed=1, keys=keys, **{"dropout": 0.0, "drop_path": 0.0, **drops}
    )
    return model, keys


def _logits(model: nn.Module, keys: SampleKeys, samples: list[int], pixels: Tensor) -> Tensor:
    keys.samples_B = torch.tensor(samples)
    model.train()
    for norm in batch_norms_in(model).values():
        norm.eval()  # of the micro-batch, so that other samples in it change nothing
    found: Tensor = model(pixel_values=pixels).logits.detach()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drops", [{"dropout": 0.5}, {"drop_path": 0.9}])
def test_each_sample_drops_by_its_position_alone(kind: str, drops: dict[str, float]) -> None:
    model, keys = _dropping(kind, **drops)
    pixels = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    together = _logits(model, keys, [5, 6, 7], pixels)
    torch.rand(9)  # nothing is drawn from torch's generator
    torch.testing.assert_close(_logits(model, keys, [5, 6, 7], pixels), together, rtol=0, atol=0)
    apart = [_logits(model, keys, [5 + n], pixels[n : n + 1]) for n in range(3)]
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-5, atol=1e-6)
    drawn = [_logits(model, keys, [100 + 3 * n, 101, 102], pixels)[0] for n in range(16)]
    assert len({tuple(each.tolist()) for each in drawn}) > 1
    model.eval()
    keys.samples_B = None
    plain, _ = _dropping(kind)
    expected = plain.eval()(pixel_values=pixels).logits
    torch.testing.assert_close(model(pixel_values=pixels).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_is_lost_by_whole_samples_more_often_the_deeper_it_is(kind: str) -> None:
    model, keys = _dropping(kind, drop_path=0.8)
    network = KINDS[kind].of_config({"model_type": kind, **TINY[kind]}, "tiny")
    blocks = list(blocks_of_network(model, network).values())
    seen: dict[int, Tensor] = {}
    branch = KINDS[kind].branches[-1]

    def note(number: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            seen[number] = (output[0] if isinstance(output, tuple) else output).detach().clone()

        return hook

    for number, block in enumerate(blocks):
        block.get_submodule(branch).register_forward_hook(note(number))
    pixels = torch.rand(1, 3, 16, 16).expand(400, 3, 16, 16)
    _logits(model, keys, list(range(400)), pixels)
    assert seen
    for number, output in seen.items():
        is_lost = (output.flatten(1) == 0).all(dim=1)
        expected = 0.8 * number / len(blocks)
        assert float(is_lost.double().mean()) == pytest.approx(expected, abs=0.08), number


def test_the_running_statistics_of_efficientnet_move_by_what_the_paper_says() -> None:
    network = KINDS["efficientnet"].presets["efficientnet-b0"]
    assert network.batch_norm_momentum == 0.01  # TensorFlow's 0.99
    with torch.device("meta"):
        model = build_network(network)
    momenta = {norm.momentum for norm in batch_norms_in(model).values()}
    assert momenta == {0.99, 0.1}  # what transformers gives to torch
    set_batch_norm_momentum(model, 0.01)
    assert {norm.momentum for norm in batch_norms_in(model).values()} == {0.01}


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_folders_head_go_where_its_classes_are(kind: str, tmp_path: Path) -> None:
    """Against the logits of transformers, its outputs in the other order."""
    network = KINDS[kind].of_config({"model_type": kind, **TINY[kind]}, "tiny").with_classes(3)
    theirs = build_network(network).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for param in theirs.parameters():
            param.add_(0.1 * torch.randn_like(param))
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    logits = theirs(pixel_values=pixels).logits
    ours = build_network(network).eval()
    load_network(ours, network, tmp_path, seed=0, rows=(2, 0, 1))
    torch.testing.assert_close(ours(pixel_values=pixels).logits, logits[:, [2, 0, 1]])
    load_network(ours, network, tmp_path, seed=0, rows=None)
    assert not torch.allclose(ours(pixel_values=pixels).logits, logits[:, [2, 0, 1]])
