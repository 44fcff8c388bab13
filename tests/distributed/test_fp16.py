"""fp16: losses, loss scale and skipped steps of every layout are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from shardyard.checkpoint.load import read_values
from shardyard.checkpoint.verify import read_manifest
from shardyard.config.rules.custom_module import require_shape
from shardyard.errors import TrainingError
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train import loss_scaling
from shardyard.train.hooks import Faults, Hooks
from shardyard.train.loop import FINISHED, Loop
from shardyard.train.run import train
from shardyard.train.setup import set_up
from tests.distributed.image_runs import make_image_run, write_network, write_pictures
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here

STEPS = 7
ROUNDING = 2e-3
"""fp16 keeps 11 bits."""
TOO_LARGE, GROWTH_INTERVAL = 2.0**25, 2
"""So that some steps overflow, and the scale comes back to where one does."""

Run = tuple[RunDir, int, frozenset[int]]
"""Run, attempt, and steps whose gradients are broken."""


def made(
    folder: Path, corpus: Corpus, *, processes: int = 1, attempt: int = 0, **sections: Any
) -> RunDir:
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "model": {"dropout": 0.1},
        "optim": {"micro_batch": 2, "lr": 1e-3, "decay_steps": STEPS, "max_skipped_steps": 0},
        "precision": {"compute": "fp16"},
        "cluster": {"devices": processes},
        "checkpoint": {"every": 100},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return make_run(folder, corpus, merged, attempt=attempt)


def trained(runs: list[Run], first: float, growth: int) -> list[str]:
    """Outcomes, or the message of a TrainingError, where the scale begins so and grows so often."""
    loss_scaling.FIRST, loss_scaling.GROWTH_INTERVAL = first, growth
    return [_outcome(*run) for run in runs]


def _outcome(run: RunDir, attempt: int, broken: frozenset[int]) -> str:
    faults = Faults(gradient_steps=broken)
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None, faults=faults)
    try:
        return train(run, attempt, hooks)
    except TrainingError as error:
        return str(error)


def scales(run: RunDir) -> list[float]:
    return [line["loss_scale"] for line in read_steps(run.metrics)]


def skipped(run: RunDir) -> list[int]:
    return [line["step"] for line in read_steps(run.metrics) if line["grad_norm"] is None]


LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 3": {"parallel": {"dp_shard": 2}},
    "zero 1": {"parallel": {"dp_shard": 2, "zero": 1}},
    "zero 2": {"parallel": {"dp_shard": 2, "zero": 2}, "memory": {"loss_chunk": 16}},
    "tp": {"parallel": {"tp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "pp that splits its backward pass": {
        "parallel": {"pp": 2, "schedule": "zero-bubble", "zero": 2}
    },
}  # fmt: skip
SMALLEST = ["zero 3"]
OTHERS = [name for name in LAYOUTS if name not in SMALLEST]
SYSTEM = pytest.mark.system


@pytest.mark.parametrize(
    ("names", "model", "first"),
    [
        (SMALLEST, "llama-tiny", TOO_LARGE),
        pytest.param(OTHERS, "llama-tiny", TOO_LARGE, marks=SYSTEM),
        pytest.param(SMALLEST, "qwen3-moe-tiny", 2.0**20, marks=SYSTEM),
    ],
    ids=["smallest", "others", "experts"],
)  # fmt: skip
def test_every_layout_has_the_same_losses_scales_and_skipped_steps(
    corpus: Corpus, tmp_path: Path, names: list[str], model: str, first: float
) -> None:
    its: dict[str, Any] = {"model": {"preset": model}}
    exact = made(tmp_path / "exact", corpus, **its, precision={"compute": "fp32"})
    one = made(tmp_path / "one", corpus, **its)
    others = [made(tmp_path / n, corpus, processes=2, **its, **LAYOUTS[n]) for n in names]
    for processes, runs in ((1, [exact, one]), (2, others)):
        calls: list[Run] = [(run, 0, frozenset()) for run in runs]
        told = run_on_ranks(trained, processes, calls, first, GROWTH_INTERVAL)
        assert told[0] == [FINISHED] * len(runs)
    assert set(scales(exact)) == {None}
    assert skipped(one)[0] == 1, "it begins too large"
    assert 1 < len(skipped(one)) < STEPS
    for run in others:
        assert (scales(run), skipped(run)) == (scales(one), skipped(one)), run.path.name
        for found, expected in zip(read_steps(run.metrics), read_steps(one.metrics), strict=True):
            assert found["loss"] == pytest.approx(expected["loss"], rel=ROUNDING), run.path.name
            if expected["grad_norm"] is not None:
                norm = pytest.approx(expected["grad_norm"], rel=ROUNDING)
                assert found["grad_norm"] == norm, run.path.name
    exact_first = next(iter(read_steps(exact.metrics)))
    assert next(iter(read_steps(one.metrics)))["loss"] == pytest.approx(exact_first["loss"], 1e-3)


def _beside(run: RunDir) -> list[tuple[float, float, float]]:
    """Loss, norm and scale of a plain loop, which takes the same steps beside a run."""
    loss_scaling.FIRST, loss_scaling.GROWTH_INTERVAL = TOO_LARGE, GROWTH_INTERVAL
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run, 0, hooks, local_rank=0)
    masters = {
        name.removeprefix("model."): _whole(tensor).clone().requires_grad_()
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    }
    optimizer = torch.optim.SGD(masters.values(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=TOO_LARGE, growth_interval=GROWTH_INTERVAL)
    model = LlamaForCausalLM._from_config(hf_config(require_shape(training.resolved.shape))).half()
    found = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * 6, step * 6 + 6), 6)
        model.load_state_dict({name: each.detach() for name, each in masters.items()})
        logits: Tensor = model(input_ids=batch["tokens"]).logits.float()
        # of a full micro-batch of 6 samples of 32 tokens, up to the next power of two
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        scale = scaler.get_scale()
        scaler.scale(loss / 256).backward()  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters():
            assert param.grad is not None
            masters[name].grad = param.grad.float()
            param.grad = None
        scaler.unscale_(optimizer)
        number = int((batch["targets"] >= 0).sum())
        for each in masters.values():
            assert each.grad is not None
            each.grad *= 256 / number
        norm = torch.nn.utils.get_total_norm(
            [m.grad for m in masters.values() if m.grad is not None]
        )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((float(loss.detach()) / number, float(norm), scale))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    training.close()
    return found


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def test_steps_are_those_of_a_plain_loop_with_a_scaler_of_torch(
    corpus: Corpus, tmp_path: Path
) -> None:
    optim = {
        "name": "sgd", "momentum": 0.0, "lr": 1e-2, "weight_decay": 0.0, "grad_clip": None,
        "schedule": "constant", "warmup_steps": 0, "micro_batch": 6,
    }  # fmt: skip
    run = made(tmp_path / "run", corpus, optim=optim, model={"dropout": 0.0})
    expected = run_on_ranks(_beside, 1, run)[0]
    lines = list(read_steps(run.metrics))
    assert [line["loss_scale"] for line in lines] == [scale for *_, scale in expected]
    assert 1 < len(skipped(run)) < STEPS
    for line, (loss, norm, _) in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(loss, rel=1e-4)
        if line["step"] not in skipped(run):
            assert line["grad_norm"] == pytest.approx(norm, rel=ROUNDING)


def test_an_overflow_is_no_fault_and_a_resume_has_the_same_scale(
    corpus: Corpus, tmp_path: Path
) -> None:
    whole = made(tmp_path / "whole", corpus)
    parts = made(tmp_path / "parts", corpus, run={"steps": 4})
    made(tmp_path / "parts", corpus, attempt=1)
    broken = frozenset({2})
    calls: list[Run] = [(whole, 0, broken), (parts, 0, broken), (parts, 1, broken)]
    told = run_on_ranks(trained, 1, calls, 2.0**16, 3)[0]
    assert told == [FINISHED] * 3  # though no step may be skipped for a fault
    assert [scale / 2**16 for scale in scales(whole)] == [1, 1, 0.5, 0.5, 0.5, 1, 1]
    assert (scales(parts), skipped(parts)) == (scales(whole), [2])
    ends = [read_manifest(run.checkpoint(STEPS)).files for run in (whole, parts)]
    assert ends[0] == ends[1]  # weights, averages and the scale, bit for bit
    assert read_values(parts.checkpoint(STEPS))["loss_scale"] == {"scale": 2.0**16, "good_steps": 2}


def test_what_no_scale_mends_ends_the_run(corpus: Corpus, tmp_path: Path) -> None:
    always = frozenset(range(1, 30))
    moving = made(tmp_path / "moving", corpus, run={"steps": 30}, optim={"decay_steps": 30})
    fixed = made(tmp_path / "fixed", corpus, precision={"loss_scale": 2.0**40})
    told = run_on_ranks(trained, 1, [(moving, 0, always), (fixed, 0, frozenset())], 4.0, 3)[0]
    assert "step 3: gradients overflow fp16 with a loss scale of 1," in told[0]
    assert "Resume with precision.compute=fp32, or bf16 where the device has it" in told[0]
    assert scales(moving) == [4, 2, 1]
    assert "1 steps in a row were skipped" in told[1]
    assert "Resume with precision.loss_scale=dynamic or a smaller one" in told[1]


def test_a_network_with_batch_normalisation_learns_as_in_fp32(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "pictures")
    network = write_network(tmp_path / "network", "resnet")

    def steps(compute: str, processes: int) -> list[dict[str, Any]]:
        sections: dict[str, Any] = {
            "run": {"steps": 3},
            "precision": {"compute": compute},
            "cluster": {"devices": processes},
        }
        folder = tmp_path / f"{compute}-{processes}"
        run = make_image_run(folder, pictures, network, sections)
        assert run_on_ranks(train_here, processes, run) == [FINISHED] * processes
        return list(read_steps(run.metrics))

    exact, one, two = steps("fp32", 1), steps("fp16", 1), steps("fp16", 2)
    assert [line["loss_scale"] for line in two] == [line["loss_scale"] for line in one]
    assert {line["loss_scale"] for line in exact} == {None}
    for found, expected in ((one, exact), (two, one)):
        losses = [line["loss"] for line in found]
        assert losses == pytest.approx([line["loss"] for line in expected], rel=1e-2)
