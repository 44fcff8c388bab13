"""Layer tables against published counts and real modules; steps against hand arithmetic."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardyard.errors import RequestError
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import Cluster
from shardyard.hardware.links import Link
from shardyard.planner.vision import VisionEstimate, VisionWorkload, estimate_vision
from shardyard.planner.vision_layers import VISION_MODELS, vision_model

# Parameters and multiply-adds (G) as torchvision's weights state them ("num_params", "_ops";
# github.com/pytorch/vision, torchvision/models/resnet.py and efficientnet.py). It crops B2 to 288.
PUBLISHED = [
    ("resnet18", 224, 11_689_512, 1.814),
    ("resnet34", 224, 21_797_672, 3.664),
    ("resnet50", 224, 25_557_032, 4.089),
    ("resnet101", 224, 44_549_160, 7.801),
    ("resnet152", 224, 60_192_808, 11.514),
    ("efficientnet-b0", 224, 5_288_548, 0.386),
    ("efficientnet-b1", 240, 7_794_184, 0.687),
    ("efficientnet-b2", 288, 9_109_994, 1.088),
    ("efficientnet-b3", 300, 12_233_232, 1.827),
    ("efficientnet-b4", 380, 19_341_616, 4.394),
    ("efficientnet-b5", 456, 30_389_784, 10.266),
    ("efficientnet-b6", 528, 43_040_704, 19.068),
    ("efficientnet-b7", 600, 66_347_960, 37.746),
]

NVLINK = Link(name="NVLink", bytes_per_s=300e9, latency_s=8e-6, source="test")
EFA = Link(name="4 x EFA", bytes_per_s=6.25e9, latency_s=20e-6, source="test")
DEVICE = Accelerator(
    name="Testing 1",
    memory_bytes=40 * 2**30,
    peak_tflops={"fp32": 20, "fp16": 300},
    achievable={"fp32": 0.8, "fp16": 0.8},
    bandwidth_bytes_per_s=1.5e12,
    processors=100,
)


def cluster(*, nodes: int = 1, devices: int = 8, between: Link = EFA) -> Cluster:
    return Cluster(
        name="test",
        accelerator=DEVICE,
        devices_per_node=devices,
        nodes=nodes,
        inside=NVLINK,
        between=between,
        host_memory_bytes=None,
        local_disk_bytes=None,
        usd_per_node_hour=None,
        price_source="",
    )


def resnet50(where: Cluster, **changes: Any) -> VisionEstimate:
    given: dict[str, Any] = {"model": "resnet50", "device_batch": 256, **changes}
    return estimate_vision(VisionWorkload(**given), where)


def seconds(estimate: VisionEstimate) -> dict[str, float]:
    assert all(term.reason for term in estimate.time)
    return {term.name: term.seconds for term in estimate.time}


def nbytes(estimate: VisionEstimate) -> dict[str, int]:
    assert all(term.reason for term in estimate.memory)
    return {term.name: term.bytes for term in estimate.memory}


@pytest.mark.parametrize(("name", "pixels", "parameters", "giga_macs"), PUBLISHED)
def test_a_table_has_the_published_size_and_work(
    name: str, pixels: int, parameters: int, giga_macs: float
) -> None:
    model = vision_model(name, resolution=pixels)
    assert model.parameters == parameters
    assert model.macs / 1e9 == pytest.approx(giga_macs, abs=0.0006)


def test_a_network_has_its_papers_resolution_unless_another_is_given() -> None:
    # Tan & Le 2019, arXiv:1905.11946, table 2: B0 0.39 G, B7 37 G multiply-adds
    assert vision_model("efficientnet-b7").resolution == 600
    assert vision_model("efficientnet-b7").macs / 1e9 == pytest.approx(37, rel=0.03)
    assert vision_model("efficientnet-b0").macs / 1e9 == pytest.approx(0.39, rel=0.02)
    assert vision_model("resnet50", resolution=448).macs > 3.9 * vision_model("resnet50").macs


def test_an_unknown_network_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"'resnet5' is no vision model .* Did you mean resnet5"):
        vision_model("resnet5")
    with pytest.raises(RequestError, match=r"'vgg' is no vision model .* There are resnet18, "):
        vision_model("vgg")


def real_module(name: str) -> torch.nn.Module:
    """transformers' own network: another code than the one under test."""
    from transformers import (
        EfficientNetConfig,
        EfficientNetForImageClassification,
        ResNetConfig,
        ResNetForImageClassification,
    )

    module: torch.nn.Module
    if name == "resnet50":
        module = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    else:
        config = EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=1000
        )
        module = EfficientNetForImageClassification(config)
    return module


def kept_bytes(module: torch.nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd saves for backward, each storage once, parameters left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(module)}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(pixel_values=images)
    return sum(saved.values())


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["resnet50", "efficientnet-b0"])
def test_activations_are_what_autograd_keeps_of_a_real_network(name: str) -> None:
    module, batch, pixels = real_module(name), 2, 96
    measured = kept_bytes(module, torch.randn(batch, 3, pixels, pixels))
    workload = VisionWorkload(model=name, device_batch=batch, resolution=pixels, compute="fp32")
    predicted = nbytes(estimate_vision(workload, cluster()))["activations"]
    assert sum(p.numel() for p in module.parameters()) == vision_model(name).parameters
    # transformers pads before strided depthwise filters, in a copy of its own
    assert predicted == pytest.approx(measured, rel=0.04)


def test_states_and_buckets_are_counted_per_parameter() -> None:
    found = nbytes(resnet50(cluster()))
    assert found["parameters"] == found["gradients"] == found["buckets"] == 4 * 25_557_032
    assert found["optimizer"] == 4 * 25_557_032
    assert found["16-bit weights"] == 2 * 25_557_032
    assert nbytes(resnet50(cluster(), optimizer="rmsprop"))["optimizer"] == 8 * 25_557_032
    assert "buckets" not in nbytes(resnet50(cluster(devices=1)))
    assert "16-bit weights" not in nbytes(resnet50(cluster(), compute="fp32"))


def test_a_batch_that_is_too_large_does_not_fit() -> None:
    assert resnet50(cluster()).fits
    assert not resnet50(cluster(), device_batch=2048).fits


def test_no_layer_is_faster_than_its_arithmetic_or_its_traffic() -> None:
    # forward and backward are three products; 0.8 of 300 TFLOP/s is the best that was measured
    found = resnet50(cluster(devices=1))
    assert seconds(found)["convolutions"] > 256 * 3 * 2 * 4.0e9 / (0.8 * 300e12)
    # norms move 3 + 5 tensors of 11.1 M elements (all outputs of convolutions), 2 bytes each
    assert seconds(found)["norms"] > 256 * 8 * 2 * 11.1e6 / 1.5e12
    assert found.samples_per_s == pytest.approx(256 / found.step_s)


def test_a_small_batch_is_paced_by_the_host() -> None:
    small, large = resnet50(cluster(), device_batch=1), resnet50(cluster())
    assert seconds(small)["launches"] > 0.5 * small.step_s
    assert seconds(large)["launches"] == 0


def test_gradients_hide_behind_the_backward_pass_where_the_network_is_fast() -> None:
    slow = replace(EFA, bytes_per_s=0.1e9)
    alone = resnet50(cluster(devices=1), device_batch=64)
    fast = resnet50(cluster(nodes=2), device_batch=64)
    slowed = resnet50(cluster(nodes=2, between=slow), device_batch=64)
    assert seconds(alone)["all-reduce"] == 0
    assert seconds(fast)["all-reduce"] < 0.1 * fast.step_s
    # ring over 16: 2 x 15/16 x 102 MB at 8 x 0.1 GB/s are 0.24 s; backward hides 0.02 s of it
    assert 0.2 < seconds(slowed)["all-reduce"] < 0.35
    assert "4 x EFA" in next(term.reason for term in fast.time if term.name == "all-reduce")


def test_data_workers_that_are_too_slow_are_waited_for() -> None:
    bound = resnet50(cluster(), loader_samples_per_s=500)
    assert bound.step_s == pytest.approx(256 / 500)
    assert bound.epoch_s(1_281_167) == pytest.approx(1_281_167 / (8 * 500), rel=0.01)
    assert seconds(resnet50(cluster(), loader_samples_per_s=1e6))["data"] == 0


def test_a_device_without_rates_is_refused() -> None:
    bare = replace(cluster(), accelerator=replace(DEVICE, achievable={}))
    with pytest.raises(RequestError, match=r"Testing 1 in fp16 cannot be timed: nobody measured"):
        resnet50(bare)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_every_network_can_be_planned(name: str) -> None:
    found = estimate_vision(VisionWorkload(model=name, device_batch=4), cluster(nodes=2))
    assert found.samples_per_s > 0
    assert found.allocated_bytes < found.reserved_bytes
