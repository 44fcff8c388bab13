"""What the planner says of published training on images: rates, whole runs, and what decodes.

One number is fitted to each device: how much longer a step takes than predicted, the geometric mean
over the rows in which nothing but the device can be the limit. All other rows are then predicted,
and those that images decoded too slowly are called so.

- NVIDIA's rates of ResNet-50 on A100 and V100, of one device and of eight;
- FFCV's twelve runs: ResNet-50 on 8 x A100, ResNet-18 on one, from start to end, in minutes;
- Composer's baseline: 90 epochs of ResNet-50 on 8 x A100.

    python -m benchmarks.planner_images

Two rows of NVIDIA's are used to know how fast a process decodes, those of EfficientNet-B0, and
predicted are those of ResNet-50 (``planner/images/step.py``).
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, fsum, log
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.record import write_result
from shardyard.config.layout import Layout
from shardyard.families.images.operators import Operator
from shardyard.families.images.registry import IMAGE_PRESETS, operators_of
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.catalogue import accelerator_by_name
from shardyard.hardware.cluster import ClusterHardware, default_cluster
from shardyard.planner.images.step import DECODED_PER_WORKER_S, ImageStep
from shardyard.planner.images.time import ImageEstimate, estimate_images, forward_s
from shardyard.planner.workload import Formats, Techniques

BAR = 0.10
"""An image rate, or the time of a run, may be off by this much."""

TRAIN, HELD_OUT = 1_281_167, 50_000
"""Images of ImageNet's two splits."""

TF32_TFLOPS = 156
"""NVIDIA A100 datasheet; the share of it that products reach is taken from bf16. Convolutions of
fp32 tensors run in TF32 there unless it is switched off
(PyTorch: torch.backends.cudnn.allow_tf32)."""

NVIDIA = (
    "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets: resnet50v1.5/README.md "
    "@291f0d02 and efficientnet/README.md @0107cf27 (container 21.03); batch and workers: "
    "configs.yml @097c7ff9"
)
FFCV = (
    "libffcv/ffcv-imagenet: README.md @038bc26e (minutes), rn50_configs and rn18_configs @5bab20e6 "
    "(batch, resolutions), train_imagenet.py @606c5841 (blurred strides, evaluation)"
)
COMPOSER = "mosaicml/composer README.md @02c872e4: 3 h 33 min of ResNet-50 on 8 x A100 before it"

Format = Literal["fp32", "tf32", "fp16"]


class Rate(NamedTuple):
    """Images a second that were measured in a steady state."""

    model: str
    accelerator: str
    devices: int
    number_format: Format
    batch: int
    """Of a device."""
    workers: int
    """Processes that decode, of each device."""
    images_per_s: float
    fits: bool
    """Whether the device's one number is taken from it."""


NVIDIA_RATES = (
    Rate("resnet50", "A100 80GB", 1, "fp16", 256, 16, 2470, fits=True),
    Rate("resnet50", "A100 80GB", 8, "fp16", 256, 16, 16621, fits=False),
    Rate("resnet50", "A100 80GB", 1, "tf32", 256, 16, 938, fits=True),
    Rate("resnet50", "A100 80GB", 8, "tf32", 256, 16, 7248, fits=False),
    Rate("resnet50", "V100 16GB", 1, "fp16", 256, 8, 1200, fits=True),
    Rate("resnet50", "V100 16GB", 8, "fp16", 256, 8, 8322, fits=False),
    Rate("resnet50", "V100 16GB", 1, "fp32", 112, 8, 367, fits=True),
    Rate("resnet50", "V100 16GB", 8, "fp32", 112, 8, 2855, fits=False),
    Rate("efficientnet-b0", "V100 16GB", 1, "fp16", 128, 8, 1301, fits=False),
    Rate("efficientnet-b0", "V100 16GB", 1, "fp32", 64, 8, 655, fits=False),
    Rate("efficientnet-b4", "A100 80GB", 1, "fp16", 128, 16, 331, fits=False),
    Rate("efficientnet-b4", "A100 80GB", 8, "fp16", 128, 16, 2570, fits=False),
    Rate("efficientnet-b4", "V100 16GB", 1, "fp16", 32, 8, 204, fits=False),
    Rate("efficientnet-b4", "V100 16GB", 1, "fp32", 16, 8, 83, fits=False),
)
"""The batch of EfficientNets is not printed beside them: ours."""


class Run(NamedTuple):
    """A whole training by FFCV: 160 pixels, then 192 from between two epochs on."""

    model: str
    devices: int
    batch: int
    """Of a device."""
    epochs: int
    ramp: tuple[int, int]
    """Last epoch of the small resolution, first of the large one."""
    evaluates_each_epoch: bool
    minutes: float


FFCV_RUNS = tuple(
    Run("resnet50", 8, 512, epochs, ramp, evaluates_each_epoch=True, minutes=minutes)
    for epochs, ramp, minutes in (
        (16, (11, 13), 14.9), (24, (17, 20), 21.7), (32, (23, 27), 28.7), (40, (29, 34), 35.6),
        (56, (41, 48), 49.4), (88, (65, 76), 77.2),
    )
) + tuple(
    Run("resnet18", 1, 1024, epochs, ramp, evaluates_each_epoch=False, minutes=minutes)
    for epochs, ramp, minutes in (
        (16, (11, 13), 35.0), (24, (17, 20), 51.6), (32, (23, 27), 68.9), (40, (29, 34), 85.5),
        (56, (41, 48), 119.4), (88, (65, 76), 187.3),
    )
)  # fmt: skip
FFCV_DEVICE = "A100 40GB"
"""Of a p4d.24xlarge."""
SMALL, LARGE, EVALUATED = 160, 192, 256
"""Pixels on a side in training, and in evaluation, which looks at each image and its mirror."""

COMPOSER_MINUTES, COMPOSER_EPOCHS, COMPOSER_WORKERS = 213.0, 90, 64
"""Eight decoding processes for each device (examples/imagenet/train_resnet_imagenet1k.py)."""


# --- prediction ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of a framework that copies everything to every device (DistributedDataParallel)."""

    model: str
    devices: int
    batch: int
    number_format: Format
    size: int | None = None
    """Pixels on a side; None: as it was published with."""
    blurs: bool = False

    def step(self) -> ImageStep:
        """In the planner's words."""
        network = IMAGE_PRESETS[self.model]
        size = self.size or network.size
        operators = operators_of(replace(network, size=size))
        count = sum(row.parameters for row in operators)
        return ImageStep(
            operators=_blurred(operators) if self.blurs else operators,
            size=size,
            layout=Layout(
                dp_replicate=self.devices, dp_shard=1, cp=1, tp=1, pp=1, ep=1, zero=1
            ),
            micro_batch=self.batch,
            global_batch=self.batch * self.devices,
            formats=Formats(
                compute="fp16" if self.number_format == "fp16" else "fp32",
                weight_bytes=4, gradient_bytes=4, optimizer_bytes=4, reduce_bytes=4,
                # momentum and weight decay, a kernel each; buckets are filled and emptied
                compute_bytes=2 if self.number_format == "fp16" else 4,
                update_bytes=44 + 16 * (self.devices > 1),
            ),
            techniques=Techniques(
                kernels="eager", bucket_bytes=4.0 * count if self.devices > 1 else 0.0
            ),
            products="tf32" if self.number_format == "tf32" else "",
            channels_last=self.number_format == "fp16",  # as the examples do
        )  # fmt: skip

    def on(self, cluster: ClusterHardware, *, decoded_per_s: float | None = None) -> ImageEstimate:
        """Predicted on all devices of a cluster."""
        return estimate_images(replace(self.step(), decoded_per_s=decoded_per_s), cluster)

    def images_per_s(self, accelerator: str) -> float:
        """Of all devices, without what decodes and without the device's number."""
        device = with_tf32(accelerator_by_name(accelerator))
        cluster = default_cluster(device, devices_per_node=self.devices, nodes=1)
        return self.on(cluster).samples_per_s

    def evaluated_per_s(self, accelerator: str) -> float:
        """Forward passes alone."""
        device = with_tf32(accelerator_by_name(accelerator))
        return self.devices * self.batch / forward_s(self.step(), device)


def _blurred(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """FFCV's networks: a fixed 3x3 filter of each channel before every strided convolution."""
    found: list[Operator] = []
    for row in operators:
        if row.kind == "conv" and not row.is_first and row.matrix is not None:
            channels, wide = row.matrix[2], row.input_elements // row.matrix[2]
            if wide > row.matrix[0]:
                elements = channels * wide
                found.append(
                    Operator(
                        name=f"{row.name}.blur", kind="depthwise", block=row.block,
                        flops=2 * 9 * elements, input_elements=elements, output_elements=elements,
                        saved_elements=elements,
                    )
                )  # fmt: skip
        found.append(row)
    return tuple(found)


def with_tf32(accelerator: Accelerator) -> Accelerator:
    """An A100 as it computes products of fp32 tensors."""
    if not accelerator.name.startswith("A100"):
        return accelerator
    peaks = {**accelerator.peak_tflops, "tf32": TF32_TFLOPS}
    reached = {**accelerator.achievable, "tf32": accelerator.achievable["bf16"]}
    return replace(accelerator, peak_tflops=peaks, achievable=reached)


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(fsum(log(value) for value in values) / len(values))


# --- tables -------------------------------------------------------------------------------------


def rates() -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The number of each device, and NVIDIA's rows."""
    raw = {
        row: Case(
            model=row.model, devices=row.devices, batch=row.batch,
            number_format=row.number_format,
        ).images_per_s(row.accelerator)
        for row in NVIDIA_RATES
    }  # fmt: skip
    slower = {
        name: _geometric_mean(
            [raw[row] / row.images_per_s for row in raw if row.fits and row.accelerator == name]
        )
        for name in dict.fromkeys(row.accelerator for row in NVIDIA_RATES)
    }
    table = []
    for row, rate in raw.items():
        on_device = rate / slower[row.accelerator]
        decoded = row.devices * row.workers * DECODED_PER_WORKER_S
        # alone on its machine a process decodes faster than where all of them work
        is_bound = row.devices > 1 and decoded < on_device
        predicted = decoded if is_bound else on_device
        table.append(
            {
                **row._asdict(),
                "untouched_images_per_s": round(rate),
                "device_images_per_s": round(on_device),
                "decoded_images_per_s": round(decoded),
                "bound_by": "decoding" if is_bound else "device",
                "predicted_images_per_s": round(predicted),
                "error_without_decoding": round(on_device / row.images_per_s - 1, 3),
                "error": round(predicted / row.images_per_s - 1, 3),
            }
        )
    return slower, table


def runs() -> tuple[float, list[dict[str, Any]]]:
    """The number of FFCV's device, and its rows."""
    raw = {row: _run_minutes(row) for row in FFCV_RUNS}
    slower = _geometric_mean([row.minutes / raw[row] for row in raw])
    table = []
    for row, minutes in raw.items():
        predicted = slower * minutes
        table.append(
            {
                **row._asdict(),
                "untouched_minutes": round(minutes, 1),
                "predicted_minutes": round(predicted, 1),
                "error": round(predicted / row.minutes - 1, 3),
            }
        )
    return slower, table


def _run_minutes(row: Run) -> float:
    case = Case(
        model=row.model, devices=row.devices, batch=row.batch,
        number_format="fp16", size=SMALL, blurs=True,
    )  # fmt: skip
    epoch_s = {
        size: TRAIN / replace(case, size=size).images_per_s(FFCV_DEVICE)
        for size in (SMALL, (SMALL + LARGE) // 2, LARGE)
    }
    seconds = fsum(epoch_s[resolution(epoch, row.ramp)] for epoch in range(row.epochs))
    evaluation = replace(case, size=EVALUATED, batch=512)
    times = row.epochs + 1 if row.evaluates_each_epoch else 1
    seconds += times * 2 * HELD_OUT / evaluation.evaluated_per_s(FFCV_DEVICE)
    return seconds / 60


def resolution(epoch: int, ramp: tuple[int, int]) -> int:
    """Pixels on a side in an epoch: between the two of the ramp to the nearest multiple of 32."""
    start, end = ramp
    if epoch <= start:
        return SMALL
    if epoch >= end:
        return LARGE
    between = SMALL + (LARGE - SMALL) * (epoch - start) / (end - start)
    return 32 * round(between / 32)  # a half goes to the even one, as in NumPy


def composer(slower: float) -> dict[str, Any]:
    """Its baseline: what decodes is the limit by far."""
    case = Case(model="resnet50", devices=8, batch=256, number_format="fp16")
    on_device = case.images_per_s(FFCV_DEVICE) / slower
    decoded = COMPOSER_WORKERS * DECODED_PER_WORKER_S
    images = COMPOSER_EPOCHS * (TRAIN + HELD_OUT)
    predicted = images / min(on_device, decoded) / 60
    return {
        "minutes": COMPOSER_MINUTES,
        "device_minutes": round(images / on_device / 60, 1),
        "bound_by": "decoding" if decoded < on_device else "device",
        "predicted_minutes": round(predicted, 1),
        "error": round(predicted / COMPOSER_MINUTES - 1, 3),
        "assumed": "batch 256 a device, 8 workers each, an evaluation after each epoch: its README "
        "names none of them",
    }


def main(argv: list[str]) -> int:
    """Predict all rows, print them, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="the result file")
    arguments = parser.parse_args(argv)
    by_device, nvidia = rates()
    ffcv_slower, ffcv = runs()
    content = {
        "bar": BAR,
        "sources": {"nvidia": NVIDIA, "ffcv": FFCV, "composer": COMPOSER},
        "slower_than_predicted": {
            **{f"{name} (NVIDIA)": round(value, 3) for name, value in by_device.items()},
            "A100 40GB (FFCV)": round(ffcv_slower, 3),
        },
        "nvidia": nvidia,
        "ffcv": ffcv,
        "composer": composer(ffcv_slower),
    }
    for line in render(content):
        print(line)
    write_result("planner-images", content, arguments.out)
    return 0


def render(content: dict[str, Any]) -> list[str]:
    """The rows as lines: what was measured, what is predicted, how far it is off."""
    lines = [
        f"{name}: a step takes {value} x as long as predicted"
        for name, value in content["slower_than_predicted"].items()
    ]
    for row in content["nvidia"]:
        lines.append(
            f"{row['model']}, {row['devices']} x {row['accelerator']} {row['number_format']}: "
            f"{row['images_per_s']:,} images/s, predicted {row['predicted_images_per_s']:,} "
            f"({row['error']:+.1%}; {row['bound_by']})"
        )
    for row in content["ffcv"]:
        lines.append(
            f"{row['model']} {row['epochs']} epochs on {row['devices']}: {row['minutes']} min, "
            f"predicted {row['predicted_minutes']} ({row['error']:+.1%})"
        )
    last = content["composer"]
    lines.append(
        f"composer's baseline: {last['minutes']} min, predicted {last['predicted_minutes']} "
        f"({last['error']:+.1%}; {last['bound_by']})"
    )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
