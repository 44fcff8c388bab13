"""The micro-batch of ``auto`` is the largest that the plan says fits, and no larger."""

from dataclasses import replace

import pytest

from shardyard.config.resolve import PartialResolution
from shardyard.config.resolved import DatasetMetadata
from shardyard.control.plan import predict
from shardyard.control.request import Request
from shardyard.hardware.machine import Machine
from shardyard.planner.memory import SAFE_SHARE

SOURCE = {"data": {"source": "corpus"}}
TEXT = (
    "model.preset=llama3-8b", "data.seq_len=4096", "optim.global_batch=1024", "run.steps=10",
    "memory.recompute=full",
)  # fmt: skip
IMAGES = (
    "task.name=image_classification", "model.preset=resnet50", "optim.name=sgd", "optim.lr=0.1",
    "optim.global_batch=32768", "run.steps=10",
)  # fmt: skip
P5, P3 = "cluster.instance=p5.48xlarge", "cluster.instance=p3.16xlarge"
MACHINE = Machine(
    device="cuda", name="NVIDIA H100 80GB HBM3", count=8, memory_bytes=80 * 2**30, cores=96,
    hostname="node",
)  # fmt: skip

DATA = DatasetMetadata(
    dir="data", fingerprint="f", vocab_size=0, train_tokens=0, eval_tokens=0, train_documents=0,
    eval_documents=0, unigram_entropy=0.0, train_samples=10**6, eval_samples=1000,
    num_classes=1000,
)  # fmt: skip


def request(*words: str) -> Request:
    return Request.read([SOURCE, *words], to_train=False, needs_weights=False, only_looks=True)


def preview(*words: str, machine: Machine | None = None) -> PartialResolution:
    return request(*words).preview(machine)


@pytest.mark.parametrize(
    "words",
    [(P5, *TEXT), (P5, *IMAGES), (P3, *IMAGES, "precision.compute=fp16")],
    ids=["text", "images", "images in half precision"],
)
def test_it_fits_and_twice_as_much_does_not(words: tuple[str, ...]) -> None:
    settled = preview(*words)
    size = settled.recipe.optim.micro_batch
    assert isinstance(size, int) and size > 1
    assert predict(SOURCE, *words, layouts=0).plan.micro_batch == size
    assert predict(SOURCE, *words, f"optim.micro_batch={size}", layouts=0).plan.fits == "fits"
    double = predict(SOURCE, *words, f"optim.micro_batch={2 * size}", layouts=0).plan
    assert double.fits != "fits"
    reason = settled.reasons["optim.micro_batch"]
    assert reason.startswith("the largest that fits as planned: ") and "GiB" in reason


def test_where_it_all_fits_it_is_a_ranks_share() -> None:
    assert preview(P5, *IMAGES, "optim.global_batch=200").recipe.optim.micro_batch == 25


def test_norms_over_the_step_leave_the_share_alone() -> None:
    settled = preview(P3, *IMAGES, "model.batch_norm=step", "precision.compute=fp32")
    assert settled.recipe.optim.micro_batch == 4096
    assert settled.reasons["optim.micro_batch"].startswith("not even that is sure to fit")


def test_a_machine_that_is_there_says_how_much_memory_it_has() -> None:
    assert preview(*TEXT, machine=MACHINE).recipe.optim.micro_batch == (
        preview(P5, *TEXT).recipe.optim.micro_batch
    )
    small = replace(MACHINE, memory_bytes=MACHINE.memory_bytes // 4)
    settled = preview(*TEXT, machine=small)
    assert settled.recipe.optim.micro_batch == 1
    assert "not even that is sure to fit" in settled.reasons["optim.micro_batch"]


@pytest.mark.parametrize(
    "word", ["elastic.max_nodes=3", "elastic.min_nodes=1", "cluster.device=cpu"]
)
def test_what_may_shrink_or_has_no_device_keeps_the_usual(word: str) -> None:
    nodes = "cluster.nodes=2"
    machine = (P5,) if word != "cluster.device=cpu" else ()
    settled = preview(*machine, *TEXT, nodes, word, machine=None if machine else MACHINE)
    assert settled.recipe.optim.micro_batch == 1
    assert settled.reasons["optim.micro_batch"].startswith("least memory")


def test_a_run_on_images_keeps_what_it_began_with() -> None:
    asked = request(*IMAGES, "optim.micro_batch=auto")
    began = asked.resolve(MACHINE, DATA)
    small = replace(MACHINE, memory_bytes=MACHINE.memory_bytes // 2)
    assert asked.resolve(small, DATA).recipe.optim.micro_batch != began.recipe.optim.micro_batch
    resumed = asked.resolve(small, DATA, previous=began)
    assert resumed.recipe.optim.micro_batch == began.recipe.optim.micro_batch
    assert resumed.reasons["optim.micro_batch"] == "as the run began"


# --- recompute -----------------------------------------------------------------------------------


def taken_share(*words: str) -> float:
    """Of a device, with what the plan says."""
    found = predict(SOURCE, *words, layouts=0).plan
    assert found.memory_limit_bytes is not None
    return found.device_bytes / found.memory_limit_bytes


@pytest.mark.parametrize("seq_len", [512, 2048, 4096, 8192])
@pytest.mark.parametrize("compute", ["bf16", "fp8"])
def test_it_is_the_first_mode_that_fits(seq_len: int, compute: str) -> None:
    words = (
        P5, "model.preset=llama3-8b", f"data.seq_len={seq_len}", "optim.micro_batch=4",
        "optim.global_batch=1024", "run.steps=10", f"precision.compute={compute}",
    )  # fmt: skip
    modes = ["none", "selective", "4", "3", "2", "full"][compute == "fp8" :]
    shares = {mode: taken_share(*words, f"memory.recompute={mode}") for mode in modes}
    expected = next((mode for mode, share in shares.items() if share <= SAFE_SHARE), "full")
    settled = preview(*words, "memory.recompute=auto")
    assert str(settled.recipe.memory.recompute) == expected, shares
    assert "fit" in settled.reasons["memory.recompute"]
    assert taken_share(*words, "memory.recompute=auto") == shares[expected]


def test_modes_differ_where_it_matters() -> None:
    """Else the test above would show nothing."""
    text = ("model.preset=llama3-8b", "optim.global_batch=1024", "run.steps=10")
    found = {
        preview(
            P5, *text, f"optim.micro_batch={size}", "data.seq_len=4096", "memory.recompute=auto"
        ).recipe.memory.recompute
        for size in (1, 2, 4, 8, 16)
    }
    assert {"none", "full"} < found


@pytest.mark.parametrize(
    ("words", "mode", "why"),
    [
        (["cluster.device=cpu"], "none", "the memory of no device is known"),
        ([P5, "cluster.nodes=2", "elastic.min_nodes=1"], "full", "nodes may come and go"),
        ([P5, "model.compile=true", "parallel.tp=2"], "none", "would not be compiled"),
        ([P5, *IMAGES, "optim.micro_batch=2"], "none", "the first that fits as planned"),
        ([P5, *IMAGES, "optim.micro_batch=4096"], "full", "not even that is sure to fit"),
    ],
)
def test_what_it_is_where_memory_does_not_say(words: list[str], mode: str, why: str) -> None:
    text = TEXT if "model.preset=resnet50" not in words else ()
    settled = preview(*text, *words, "memory.recompute=auto")
    assert settled.recipe.memory.recompute == mode
    assert why in settled.reasons["memory.recompute"]


@pytest.mark.parametrize(("preset", "every"), [("llama2-7b", "auto"), ("llama2-70b", None)])
def test_snapshots_of_an_elastic_run_need_room_in_host_memory(
    preset: str, every: str | None
) -> None:
    words = (P3, f"model.preset={preset}", "precision.compute=fp16", "run.steps=10")
    found = preview(
        *words, "cluster.nodes=2", "elastic.min_nodes=1", "parallel.strategy=FULL_SHARD"
    )
    assert found.recipe.elastic.snapshot_every == every
    assert found.recipe.checkpoint.every == "auto"
    if every is None:
        reason = found.reasons["elastic.snapshot_every"]
        assert "5 copies of the state" in reason and reason.endswith(": checkpoints only")


@pytest.mark.parametrize(("gib", "every"), [(64, "auto"), (2, None)])
def test_snapshots_of_cpu_processes_need_room_in_the_machine(gib: int, every: str | None) -> None:
    machine = replace(MACHINE, device="cpu", name="CPU", count=1, memory_bytes=gib * 2**30)
    words = ("model.preset=gpt2", "cluster.device=cpu", "elastic.max_nodes=2", "run.steps=10")
    found = preview(*words, machine=machine)
    assert found.recipe.elastic.snapshot_every == every
    asked = preview(*words, "elastic.snapshot_every=auto", machine=machine)
    assert asked.recipe.elastic.snapshot_every == "auto"
