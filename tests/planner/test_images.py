"""Steps on images: against hand arithmetic, and against what autograd keeps of real networks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardyard.config.layout import Layout
from shardyard.config.resolve import resolve
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.schema.recipe import Recipe
from shardyard.control.plan import Prediction, predict
from shardyard.errors import RecipeError, RequestError
from shardyard.families.images.efficientnet import efficientnet_operators
from shardyard.families.images.operators import Operator
from shardyard.families.images.registry import IMAGE_PRESETS, operators_of
from shardyard.hardware.accelerator import Accelerator
from shardyard.hardware.cluster import ClusterHardware
from shardyard.hardware.links import Link
from shardyard.hardware.machine import Machine
from shardyard.observe.metrics import read_flop_budget
from shardyard.planner.dispatch import estimate_of, host_shortage_of, snapshot_bytes_of
from shardyard.planner.format import headline
from shardyard.planner.images.memory import image_memory, image_savings
from shardyard.planner.images.step import DECODED_PER_WORKER_S, ImageStep, decoding_of
from shardyard.planner.images.time import ImageEstimate, estimate_images
from shardyard.planner.layouts import search
from shardyard.planner.phases import plan
from shardyard.planner.plan import Plan
from shardyard.planner.workload import Formats, Techniques
from shardyard.report.plan.bars import MEMORY_COLOURS

R50 = 25_557_032
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


def cluster(*, nodes: int = 1, devices: int = 8, between: Link = EFA) -> ClusterHardware:
    return ClusterHardware(
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


def vit() -> tuple[Operator, ...]:
    return operators_of(IMAGE_PRESETS["vit-b16"])


def step(
    *,
    replicate: int = 1,
    shard: int = 1,
    zero: int = 1,
    compute: str = "fp16",
    micro_batch: int = 256,
    passes: int = 1,
    size: int = 224,
    **changes: Any,
) -> ImageStep:
    """ResNet-50 with momentum; one micro-batch a rank and step."""
    ranks = replicate * shard
    nbytes = 4 if compute == "fp32" else 2
    made = ImageStep(
        operators=operators_of(replace(IMAGE_PRESETS["resnet50"], size=size)),
        size=size,
        layout=Layout(
            dp_replicate=replicate, dp_shard=shard, cp=1, tp=1, pp=1, ep=1, zero=zero
        ),
        micro_batch=micro_batch,
        global_batch=micro_batch * ranks * passes,
        formats=Formats(
            compute=compute,  # type: ignore[arg-type]
            weight_bytes=4, gradient_bytes=4, optimizer_bytes=4, reduce_bytes=4,
            compute_bytes=nbytes, update_bytes=32,
        ),
        techniques=Techniques(kernels="eager"),
    )  # fmt: skip
    return replace(made, **changes)


def timed(work: ImageStep, where: ClusterHardware | None = None) -> ImageEstimate:
    return estimate_images(work, where or cluster(devices=work.layout.world_size))


# --- memory -------------------------------------------------------------------------------------


def test_states_are_split_by_the_zero_level() -> None:
    whole, split = image_memory(step()), image_memory(step(shard=4, zero=3))
    assert whole.term("parameters") == whole.term("optimizer") == 4 * R50
    assert split.term("parameters") == split.term("optimizer") == R50
    assert whole.term("gathered parameters") == 2 * R50  # copies in fp16, for the whole step
    assert split.term("gathered parameters") < 2 * R50
    assert image_memory(step(compute="fp32")).term("gathered parameters") == 0
    # 53 batch norms with 26,560 features; mean and variance of each
    assert whole.term("running statistics") == 4 * 2 * 26_560


def test_the_host_holds_the_states_that_the_device_is_spared() -> None:
    """8 ranks of a node with fp32 states; a snapshot holds them wherever they are."""
    moved = step(replicate=8, techniques=Techniques(kernels="eager", offload="optimizer"))
    node_bytes = 8 * 4 * R50  # ranks x bytes of a parameter's state x parameters: 779.9 MiB
    assert image_memory(moved).term("optimizer") == 0
    assert host_shortage_of(moved, replace(cluster(), host_memory_bytes=node_bytes)) is None
    small = replace(cluster(), host_memory_bytes=node_bytes - 1)
    short = host_shortage_of(moved, small)
    assert short is not None and short.verdict == "does not fit"
    assert short.reason.startswith("memory.offload=optimizer needs 779.9 MiB of host memory a node")
    assert estimate_of(moved, small, None).fit == short
    assert host_shortage_of(step(replicate=8), small) is None
    split = replace(moved, layout=step(shard=8).layout)
    one_rank = replace(cluster(), host_memory_bytes=4 * R50)
    assert host_shortage_of(split, one_rank) is None
    # weights, momentum, and fp32 means and variances of 26,560 features
    copied = replace(moved, techniques=replace(moved.techniques, snapshots=3))
    assert snapshot_bytes_of(copied) == 3 * 4 * (2 * R50 + 2 * 26_560)


def test_the_peak_is_where_all_is_kept_and_gradients_begin() -> None:
    found = image_memory(step())
    assert found.peak_phase == "in the backward pass of stage4.block3"
    assert found.allocated_bytes == sum(term.bytes for term in found.terms)
    assert found.allocated_bytes < found.reserved_bytes < found.device_bytes


def test_a_batch_that_is_too_large_does_not_fit() -> None:
    assert timed(step()).fit.verdict == "fits"
    assert timed(step(micro_batch=2048)).fit.verdict == "does not fit"


def test_recompute_needs_less_and_takes_longer() -> None:
    kept, again = timed(step()), timed(step(recompute="full"))
    assert again.memory.allocated_bytes < 0.7 * kept.memory.allocated_bytes
    assert again.parts.recompute_s > 0.2 * kept.step_s
    assert again.step_s == pytest.approx(kept.step_s + again.parts.recompute_s)


def test_what_would_save_memory_never_changes_what_is_learnt() -> None:
    assert [saving.setting for saving in image_savings(step(shard=8))] == ["memory.recompute=full"]
    without_norms = image_savings(step(operators=vit(), micro_batch=64))
    assert "optim.micro_batch=32" in [saving.setting for saving in without_norms]


def real_module(name: str) -> torch.nn.Module:
    """transformers' own network: another code than the one under test."""
    import transformers

    module: torch.nn.Module
    if name == "resnet50":
        module = transformers.ResNetForImageClassification(
            transformers.ResNetConfig(num_labels=1000)
        )
    elif name == "vit":
        module = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000))
    else:
        config = transformers.EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, num_labels=1000
        )
        module = transformers.EfficientNetForImageClassification(config)
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
@pytest.mark.parametrize(("name", "size"), [("resnet50", 96), ("efficientnet", 96), ("vit", 224)])
def test_activations_are_what_autograd_keeps_of_a_real_network(name: str, size: int) -> None:
    module, batch = real_module(name), 2
    if name == "efficientnet":
        given = {**module.config.to_dict(), "num_channels": 3}  # type: ignore[operator, union-attr]
        operators = efficientnet_operators(given, size=size, num_classes=1000)
    else:
        operators = vit() if name == "vit" else step(size=size).operators
    work = step(operators=operators, size=size, compute="fp32", micro_batch=batch)
    kept = sum(4 * row.saved_elements + 8 * row.saved_indices for row in work.operators)
    predicted = batch * (kept + 4 * 3 * size**2)
    assert sum(p.numel() for p in module.parameters()) == work.parameters
    # transformers pads before strided depthwise filters, in a copy of its own
    measured = kept_bytes(module, torch.randn(batch, 3, size, size))
    assert predicted == pytest.approx(measured, rel=0.04)
    # the most is kept when the backward pass begins, and that is what the plan's term counts there
    assert image_memory(work).term("activations") <= predicted


# --- time ---------------------------------------------------------------------------------------


def test_no_operator_is_faster_than_its_arithmetic_or_its_traffic() -> None:
    # forward and backward are three products; 0.8 of 300 TFLOP/s is the best that was measured
    found = timed(step())
    assert found.parts.matmul_s > 256 * 3 * 2 * 4.0e9 / (0.8 * 300e12)
    # norms move 3 + 5 tensors of 11.1 M elements (all outputs of convolutions), 2 bytes each
    assert found.parts.elementwise_s > 256 * 8 * 2 * 11.1e6 / 1.5e12
    assert found.samples_per_s == pytest.approx(256 / found.step_s)
    assert sum(term.seconds for term in found.terms) == pytest.approx(found.step_s)


def test_a_small_batch_is_paced_by_the_host() -> None:
    small, large = timed(step(micro_batch=1)), timed(step())
    assert small.parts.launch_s > 0.5 * small.step_s
    assert large.parts.launch_s == 0


def test_gradients_hide_behind_the_backward_pass_where_the_network_is_fast() -> None:
    slow = replace(EFA, bytes_per_s=0.1e9)
    alone = timed(step(micro_batch=64))
    work = step(replicate=16, micro_batch=64)
    fast = timed(work, cluster(nodes=2))
    slowed = timed(work, cluster(nodes=2, between=slow))
    assert alone.parts.data_s == 0
    assert fast.parts.data_s < 0.1 * fast.step_s
    # ring over 16: 2 x 15/16 x 102 MB at 0.9 x 8 x 0.1 GB/s are 0.27 s; backward hides 0.02 s
    assert 0.2 < slowed.parts.data_s < 0.35


def test_buckets_of_other_frameworks_are_sent_as_they_fill() -> None:
    ours = step(replicate=8, micro_batch=64)
    buckets = replace(ours, techniques=replace(ours.techniques, bucket_bytes=4.0 * R50))
    assert image_memory(buckets).term("unreduced gradients") > 4 * R50
    assert timed(buckets).parts.data_s > 0


def test_zero_3_gathers_in_every_pass() -> None:
    slow = replace(EFA, bytes_per_s=0.5e9)
    once = timed(step(shard=16, zero=1, micro_batch=16, passes=4), cluster(nodes=2, between=slow))
    each = timed(step(shard=16, zero=3, micro_batch=16, passes=4), cluster(nodes=2, between=slow))
    assert each.parts.data_s > 2 * once.parts.data_s


def test_a_device_without_rates_is_refused() -> None:
    bare = replace(cluster(), accelerator=replace(DEVICE, achievable={}))
    with pytest.raises(
        RequestError, match=r"the speed of a fp16 product on Testing 1 is not measured"
    ):
        timed(step(replicate=8), bare)
    with pytest.raises(RequestError, match=r"the layout has 16 ranks, but test x 1 has 8 devices"):
        timed(step(replicate=16), cluster())


# --- decoding -----------------------------------------------------------------------------------


def test_cores_that_are_too_slow_are_waited_for() -> None:
    free = timed(step(replicate=8))
    bound = timed(step(replicate=8, decoded_per_s=4000))
    assert bound.samples_per_s == pytest.approx(4000)
    assert bound.trained_per_s == pytest.approx(free.samples_per_s)
    assert next(t.name for t in bound.terms if t.seconds == bound.parts.input_s) == "data"
    assert timed(step(replicate=8, decoded_per_s=1e6)).parts.input_s == 0


def test_the_plan_says_how_many_cores_would_be_enough() -> None:
    where = replace(cluster(nodes=2), threads=96)
    found = decoding_of(20_000, where, None)
    assert found is not None and found.workers == 76  # the other fifth trains
    assert found.decoded_per_s == 2 * 76 * DECODED_PER_WORKER_S
    assert found.needed == 77 and found.is_bound
    larger = decoding_of(20_000, replace(where, nodes=4), None)
    assert larger is not None and not larger.is_bound
    asked = decoding_of(20_000, where, 4)
    assert asked is not None and asked.workers == 8 * 4  # data.images.threads is of a device
    assert decoding_of(20_000, cluster(), None) is None


# --- search and plan ----------------------------------------------------------------------------


def test_the_search_keeps_a_micro_batch_that_norms_see() -> None:
    found = search(step(replicate=8), cluster())
    assert {best.micro_batch for best in found.best} == {256}
    open_size = search(step(replicate=8, operators=vit(), micro_batch=1, passes=64), cluster())
    assert open_size.best[0].micro_batch > 1
    with pytest.raises(RequestError, match="every data-parallel rank needs a micro-batch, which"):
        search(step(replicate=8), cluster(nodes=2))


def recipe(**sections: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "task": {"name": "image_classification"},
        "model": {"preset": "resnet50"},
        "data": {"source": "images"},
        "run": {"steps": 1000},
        "optim": {
            "name": "sgd", "lr": 0.8, "momentum": 0.9, "global_batch": 2048, "micro_batch": 256,
        },
        "precision": {"compute": "bf16"},
        "cluster": {"instance": "p4d.24xlarge"},
    }  # fmt: skip
    for name, settings in sections.items():
        given[name] = {**given.get(name, {}), **settings}
    return given


@pytest.fixture(scope="module")
def planned() -> Prediction:
    return predict(recipe(), layouts=2)


def test_a_recipe_for_images_is_planned_by_the_usual_verb(planned: Prediction) -> None:
    plan = planned.plan
    assert (plan.unit, plan.parameters, plan.seq_len) == ("image", R50, 1)
    # 4.089 G multiply-adds (torchvision), two FLOP each, forward and twice that backward
    assert plan.flops_per_token["full"] == pytest.approx(3 * 2 * 4.089e9, rel=1e-3)
    assert plan.mfu is not None and plan.step_s is not None and plan.usd is not None
    assert plan.speed.tokens_per_s == pytest.approx(2048 / plan.step_s)
    assert planned.search is not None and len(planned.search.best) == 2
    assert plan.decoding is not None and plan.decoding.is_bound
    assert plan.line().startswith("plan: resnet50 25.6 M parameters, FULL_SHARD over 8 x A100")
    assert "2,048 images a step, 1,000 steps, 2.05 M images" in plan.line()


def test_its_words_are_of_images(planned: Prediction) -> None:
    rows = {row[0]: " ".join(row[1:]) for row in headline(planned.plan)}
    assert "images/s" in rows["speed"]
    assert "24.5 GFLOP an image" in rows["MFU"]
    assert "per million images" in rows["price"]
    assert "cores a node would keep the devices busy" in rows["decoding"]
    assert "tokens" not in " ".join(rows.values())


def test_its_json_and_its_page_hold_it_all(planned: Prediction) -> None:
    content = json.loads(json.dumps(planned.to_json()))
    assert Plan.from_json(content) == planned.plan
    page = planned.page()
    assert "images per second" in page and "million images" in page and "decoding" in page
    assert {term.name for term in planned.plan.memory} <= set(MEMORY_COLOURS)


def test_an_epoch_has_its_time_once_the_data_is_known(planned: Prediction) -> None:
    plan = replace(planned.plan, epoch_samples=1_281_167)
    assert plan.speed.tokens_per_s is not None
    assert plan.epoch_s == pytest.approx(1_281_167 / plan.speed.tokens_per_s)
    assert ("epoch", "1,281,167 images") in [(row[0], row[2]) for row in headline(plan)]
    assert planned.plan.epoch_s is None
    unknown = {row[0]: row for row in headline(planned.plan)}["epoch"]
    assert unknown[2].startswith("for each million images; how many there are is known once the")


def resolved_on_cpu(**sections: Any) -> tuple[Resolved, Machine]:
    """ResNet-18 on 1,437 images of ten classes."""
    machine = Machine(device="cpu", name="CPU", count=1, memory_bytes=2**33, cores=4, hostname="a")
    data = DatasetMetadata(
        dir="data", fingerprint="x", vocab_size=0, train_tokens=0, eval_tokens=0,
        train_documents=0, eval_documents=0, unigram_entropy=0.0, num_classes=10,
        train_samples=1437, eval_samples=360,
    )  # fmt: skip
    asked = recipe(
        model={"preset": "resnet18"},
        data={"images": {"size": 32}},
        optim={"global_batch": 64, "micro_batch": 32},
        precision={"compute": "fp32"},
        cluster={"instance": None, "device": "cpu", "devices": 1},
        observe={"peak_tflops": 1.0},
        **sections,
    )
    made = resolve(
        Recipe.model_validate(asked), shape=None, network=IMAGE_PRESETS["resnet18"],
        machine=machine, data=data,
    )  # fmt: skip
    return made, machine


def test_an_attempt_plans_its_classes_and_epochs_and_mfu_is_measured_by_it(tmp_path: Path) -> None:
    resolved, machine = resolved_on_cpu()
    found = plan(resolved, world_size=1, devices_per_node=1, machine=machine)
    assert found.parameters == 11_689_512 - 990 * 513  # the head of ten classes
    assert (found.unit, found.epoch_samples, found.device) == ("image", 1437, "CPU process")
    assert found.memory_term("optimizer") == found.memory_term("parameters")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(found.to_json()))
    budget = read_flop_budget(path)
    assert budget.flops_per_token == found.flops_per_token["full"]
    assert budget.mfu(100.0) == pytest.approx(100 * budget.flops_per_token / 1e12)


def test_a_run_that_no_plan_counts_starts_with_an_upper_bound() -> None:
    kept, machine = resolved_on_cpu()
    every, _ = resolved_on_cpu(memory={"recompute": 2})
    plans = [
        plan(each, world_size=1, devices_per_node=1, machine=machine) for each in (kept, every)
    ]
    assert plans[0].memory_bytes == plans[1].memory_bytes
    reasons = {term.name: term.reason for term in plans[1].memory}
    assert "(memory.recompute=2 is counted as none)" in reasons["activations"]


def test_norms_over_a_step_ask_all_ranks_in_both_directions() -> None:
    alone = timed(step(replicate=8))
    summed = timed(step(replicate=8, sums_norms=True))
    # 53 norms; an all-reduce of so little is its latency, at least 10 us
    assert summed.parts.data_s > alone.parts.data_s + 2 * 53 * 5e-6
    found = search(step(replicate=8, sums_norms=True, micro_batch=64), cluster())
    assert {best.micro_batch for best in found.best} == {64}


@pytest.mark.parametrize("preset", sorted(IMAGE_PRESETS))
def test_every_network_has_its_table(preset: str) -> None:
    operators = operators_of(IMAGE_PRESETS[preset])
    assert timed(step(operators=operators, micro_batch=4)).samples_per_s > 0
    assert len({row.block for row in operators}) > 2  # blocks, and what is in none


def test_offers_compare_machines_for_images_too() -> None:
    found = predict(recipe(optim={"global_batch": 4096}), layouts=0, with_offers=True)
    assert found.offers is not None and found.offers.quotes
    assert {offer.candidate.micro_batch for offer in found.offers.quotes} == {256}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"memory": {"recompute": "selective"}}, r"memory.recompute='selective' of a network for"),
        ({"model": {"compile": True}}, r"model.compile=true: what a compiler makes of convolution"),
    ],
)
def test_what_is_not_counted_is_refused_by_name(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        predict(recipe(**sections), layouts=0)


def test_the_dry_run_of_a_network_for_images_is_refused() -> None:
    with pytest.raises(RequestError, match="--dry-run-model steps a transformer"):
        predict(recipe(), layouts=0, dry_run_model=True)
