"""mixup and cutmix: held to pixels mixed one by one, and to what their papers say of weights."""

import pytest
import torch

from shardyard.data.images.mixup import Mixing, apply_mixing
from shardyard.data.loader import MicroBatch

MIXUP = Mixing(seed=0, size=12, mixup=0.4, cutmix=0.0)
CUTMIX = Mixing(seed=0, size=12, mixup=0.0, cutmix=1.0)
BOTH = Mixing(seed=0, size=12, mixup=0.4, cutmix=1.0)


def _batch(mixing: Mixing, positions: list[int]) -> MicroBatch:
    batch = MicroBatch(
        fields={"label": torch.arange(len(positions))},
        samples_B=torch.tensor(positions),
        work=len(positions),
    )
    return mixing(batch, torch.ones(len(positions)))


def _images(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(number, 3, 12, 12, generator=generator)


@pytest.mark.parametrize("mixing", [MIXUP, CUTMIX, BOTH])
def test_images_are_mixed_as_pixel_by_pixel(mixing: Mixing) -> None:
    batch, images = _batch(mixing, list(range(10, 18))), _images(8)
    pixels = images.numpy()
    expected = pixels.copy()
    shares = batch["pixel_share"].tolist()
    for image in range(8):
        left, top, right, bottom = batch["box"][image].tolist()
        for row in range(12):
            for column in range(12):
                inside = left <= column < right and top <= row < bottom
                own = 0.0 if inside else shares[image]
                others = pixels[(image + 1) % 8, :, row, column]
                expected[image, :, row, column] *= own
                expected[image, :, row, column] += (1.0 - own) * others
    torch.testing.assert_close(apply_mixing(images, batch), torch.from_numpy(expected))


def test_mixup_weighs_labels_like_pixels_and_cutmix_by_area() -> None:
    mixup, cutmix = (_batch(mixing, list(range(400))) for mixing in (MIXUP, CUTMIX))
    assert torch.equal(mixup["pixel_share"], mixup["label_share"]) and not mixup["box"].any()
    assert mixup["label_share"].var() == pytest.approx(1 / (4 * 1.8), rel=0.15)
    left, top, right, bottom = cutmix["box"].double().unbind(1)
    area = (right - left) * (bottom - top) / 144
    torch.testing.assert_close(cutmix["label_share"].double(), 1 - area, atol=1e-6, rtol=0)
    assert (cutmix["pixel_share"] == 1).all() and (area > 0).double().mean() > 0.9


def test_with_both_each_has_half() -> None:
    batch = _batch(BOTH, list(range(1000)))
    is_mixup = batch["pixel_share"] < 1
    assert 440 < is_mixup.sum() < 560
    assert batch["box"][is_mixup].sum() == 0


def test_what_is_drawn_belongs_to_the_position_whatever_stands_beside_it() -> None:
    whole, part = _batch(BOTH, [4, 5, 6, 7]), _batch(BOTH, [6, 7])
    for name in ("pixel_share", "box", "label_share"):
        assert torch.equal(whole[name][2:], part[name])
    assert torch.equal(part["other"], torch.tensor([1, 0]))


def test_a_ragged_micro_batch_mixes_its_images_and_no_padding() -> None:
    batch = _batch(BOTH, [8, 9, 10, -1, -1])
    assert batch["other"].tolist() == [1, 2, 0, 3, 4]
    assert batch["label_share"][3:].tolist() == [1.0, 1.0]
    cut = batch.cut()
    images = _images(5)
    torch.testing.assert_close(apply_mixing(images[:3], cut), apply_mixing(images, batch)[:3])
    torch.testing.assert_close(apply_mixing(images, batch)[3:], images[3:])


def test_an_image_alone_and_padding_alone_stay_what_they_are() -> None:
    image = _images(1)
    torch.testing.assert_close(apply_mixing(image, _batch(BOTH, [3])), image)
    assert torch.equal(apply_mixing(image, _batch(BOTH, [-1])), image)


def test_a_box_can_cover_half_an_image_and_cross_its_border() -> None:
    boxes = _batch(CUTMIX, list(range(300)))["box"]
    assert boxes.min() == 0 and boxes.max() == 12
