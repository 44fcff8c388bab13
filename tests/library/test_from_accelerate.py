"""Loops of accelerate, and the same ones with two lines of ours: weights, losses and metrics.

The loops are those of transformers' ``run_clm_no_trainer``, ``run_mlm_no_trainer``,
``run_glue_no_trainer``, ``run_swag_no_trainer`` and ``run_image_classification_no_trainer``:
weight decay by group, a linear schedule with warm-up, accumulation that ends with the epoch,
clipping, and metrics gathered from uneven numbers of samples.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    get_scheduler,
)

import shardyard
from tests.distributed.ranks import run_on_ranks

pytestmark = pytest.mark.heavy

BATCH, MICRO_BATCHES, EPOCHS = 2, 2, 2
TRAINED = 20
"""Samples: 5 batches a rank, of which the last is a step alone."""
STEPS = 3 * EPOCHS
Samples = list[dict[str, Tensor]]


def _bert(kind: Any, **settings: Any) -> Any:
    config = BertConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return kind(config)


def _llama() -> Any:
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _vit() -> Any:
    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _text(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(5, 61, (12,), generator=draw)
    return {"input_ids": tokens, "labels": tokens}


def _masked(number: int) -> dict[str, Tensor]:
    tokens = _text(number)["input_ids"]
    is_masked = torch.randperm(12, generator=torch.Generator().manual_seed(number)) < 3
    return {
        "input_ids": tokens.masked_fill(is_masked, 4),
        "labels": tokens.masked_fill(~is_masked, -100),
    }


def _sentence(number: int) -> dict[str, Tensor]:
    """Padded, with a label."""
    tokens = _text(number)["input_ids"]
    is_text = torch.arange(12) < 5 + number % 7
    return {
        "input_ids": tokens * is_text,
        "attention_mask": is_text.long(),
        "labels": tokens[0] % 3,
    }


def _choices(number: int) -> dict[str, Tensor]:
    texts = [_sentence(4 * number + choice) for choice in range(4)]
    found = {key: torch.stack([text[key] for text in texts]) for key in texts[0]}
    return {**found, "labels": torch.tensor(number % 4)}


def _image(number: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(number)
    pixels = torch.randn(3, 8, 8, generator=draw)
    return {"pixel_values": pixels, "labels": pixels[:, 0, 0].argmax()}


def _loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = output.loss
    return loss.repeat(len(batch["labels"]))


def _is_right(output: Any, batch: dict[str, Tensor]) -> Tensor:
    right: Tensor = output.logits.argmax(dim=-1) == batch["labels"]
    return right.float()


@dataclass(frozen=True)
class Loop:
    model: Callable[[], Any]
    sample: Callable[[int], dict[str, Tensor]]
    metric: Callable[[Any, dict[str, Tensor]], Tensor]
    """Of each sample of a batch."""
    evaluated: int = 11
    """Samples, which do not divide among ranks."""


LOOPS = {
    "clm": Loop(_llama, _text, _loss, 12),
    "mlm": Loop(lambda: _bert(BertForMaskedLM), _masked, _loss, 12),
    "glue": Loop(lambda: _bert(BertForSequenceClassification, num_labels=3), _sentence, _is_right),
    "swag": Loop(lambda: _bert(BertForMultipleChoice), _choices, _is_right),
    "image classification": Loop(_vit, _image, _is_right),
}
Trained = tuple[dict[str, Tensor], list[float], float]
"""Weights, the learning rate after each step, and the mean of the metric."""


def _parts(loop: Loop) -> tuple[Any, torch.optim.Optimizer, Samples, Samples]:
    torch.manual_seed(0)
    model = loop.model()
    decays = {True: [], False: []}  # type: dict[bool, list[Tensor]]
    for name, param in model.named_parameters():
        decays["bias" not in name and "LayerNorm.weight" not in name].append(param)
    groups = [
        {"params": decays[True], "weight_decay": 0.1},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    samples = [loop.sample(number) for number in range(TRAINED + loop.evaluated)]
    # with a smaller eps, biases whose gradient is zero but for rounding (of keys) would drift
    optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)
    return model, optimizer, samples[:TRAINED], samples[TRAINED:]


def _schedule(optimizer: torch.optim.Optimizer, *, times: int) -> Any:
    return get_scheduler(
        "linear", optimizer, num_warmup_steps=2 * times, num_training_steps=STEPS * times
    )


def by_accelerate(loop: Loop) -> Trained:
    model, optimizer, train, evaluated = _parts(loop)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    # as the scripts do: accelerate steps the schedule once for each rank
    schedule = _schedule(optimizer, times=accelerator.num_processes)
    model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
        model,
        optimizer,
        DataLoader(train, batch_size=BATCH),  # type: ignore[arg-type]
        DataLoader(evaluated, batch_size=BATCH),  # type: ignore[arg-type]
        schedule,
    )
    rates = []
    for _epoch in range(EPOCHS):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                rates.append(schedule.get_last_lr()[0])
    model.eval()
    found = []
    for batch in eval_loader:
        with torch.no_grad():
            found.append(accelerator.gather_for_metrics(loop.metric(model(**batch), batch)))
    weights = accelerator.unwrap_model(model).state_dict()
    accelerator.free_memory()
    return weights, rates, float(torch.cat(found)[: len(evaluated)].mean())


def by_wrap(loop: Loop, layout: str) -> Trained:
    os.environ["SHARDYARD_PARALLEL"] = layout
    model, optimizer, train, evaluated = _parts(loop)
    model, optimizer = shardyard.wrap(model, optimizer)
    schedule = _schedule(optimizer, times=1)
    # accelerate deals whole batches in turn
    batches = [list(range(first, first + BATCH)) for first in range(0, TRAINED, BATCH)]
    mine = batches[dist.get_rank() :: dist.get_world_size()]
    loader: Any = DataLoader(train, batch_sampler=mine)  # type: ignore[arg-type]
    rates = []
    for _epoch in range(EPOCHS):
        model.train()
        for number, batch in enumerate(loader, start=1):
            loss = model(**batch).loss / MICRO_BATCHES
            loss.backward()
            if number % MICRO_BATCHES == 0 or number == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                rates.append(schedule.get_last_lr()[0])
    model.eval()
    sampler: Any = DistributedSampler(evaluated, shuffle=False)  # type: ignore[arg-type]
    right = []
    for batch in DataLoader(evaluated, batch_size=BATCH, sampler=sampler):  # type: ignore[arg-type]
        with torch.no_grad():
            right.append(loop.metric(model(**batch), batch))
    of_rank = torch.cat(right)
    of_ranks = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, of_rank)
    metric = torch.stack(of_ranks, dim=1).flatten()[: len(evaluated)].mean()
    whole = {
        name: each.full_tensor() if isinstance(each, DTensor) else each
        for name, each in model.state_dict().items()
    }
    return whole, rates, float(metric)


def _differences(ours: Trained, theirs: Trained) -> list[str]:
    (weights, rates, metric), (wanted, wanted_rates, wanted_metric) = ours, theirs
    found = [
        f"{name}: {float((weights[name] - each).abs().max()):.1e}"
        for name, each in wanted.items()
        if not torch.allclose(weights[name], each, rtol=0, atol=1e-6)
    ]
    if rates != pytest.approx(wanted_rates) or len(rates) != STEPS:
        found.append(f"learning rates {rates} for {wanted_rates}")
    if metric != pytest.approx(wanted_metric, rel=1e-5):
        found.append(f"metric {metric} for {wanted_metric}")
    return found


def _each_loop(layouts: list[str]) -> dict[tuple[str, str], list[str]]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    found = {}
    for name, loop in LOOPS.items():
        theirs = by_accelerate(loop)
        for layout in layouts:
            found[name, layout] = _differences(by_wrap(loop, layout), theirs)
    return found


def test_the_loops_of_transformers_scripts_train_as_by_accelerate() -> None:
    for found in run_on_ranks(_each_loop, 2, ["", "zero=3"]):
        assert found == {(name, layout): [] for name in LOOPS for layout in ("", "zero=3")}
