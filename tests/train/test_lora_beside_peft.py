"""A run with adapters beside PEFT's model in the loop that everybody would write."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import BertForMaskedLM, LlamaForCausalLM, PreTrainedModel

from shardyard.config.rules.custom_module import require_shape
from shardyard.families.lora import is_adapter, peft_targets
from shardyard.models.build import hf_config
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run

pytestmark = pytest.mark.heavy

STEPS, BATCH, RATE, TOLERANCE = 4, 6, 1.0, 1e-5
CASES: dict[str, dict[str, Any]] = {
    "all": {"preset": "llama-tiny", "lora": {"rank": 4, "alpha": 8}},
    "some": {
        "preset": "llama-tiny",
        "lora": {"rank": 3, "rslora": True, "targets": ["q_proj", "model.layers.1.mlp"]},
    },
    "bert": {"preset": "bert-tiny", "lora": {"rank": 2, "targets": ["output.dense", "query"]}},
}


def _peft(training: Training) -> Any:
    """PEFT's model with the weights of a run that has not begun."""
    from peft import LoraConfig, get_peft_model

    recipe, shape = training.resolved.recipe, require_shape(training.resolved.shape)
    kind = LlamaForCausalLM if shape.is_causal else BertForMaskedLM
    model: PreTrainedModel = kind._from_config(hf_config(shape))
    held = {name: _whole(each).detach() for name, each in training.task.model.named_parameters()}
    base = {name: each for name, each in held.items() if not is_adapter(name)}
    missing, unexpected = model.load_state_dict(base, strict=False)
    assert not unexpected and all("decoder" in name for name in missing), (missing, unexpected)
    lora = recipe.model.lora
    assert lora.rank is not None
    config = LoraConfig(
        r=lora.rank, lora_alpha=int(lora.alpha), lora_dropout=0.0, use_rslora=lora.rslora,
        target_modules=peft_targets(shape, lora.targets),
    )  # fmt: skip
    adapted = get_peft_model(model, config)
    params = {_our_name(n): p for n, p in adapted.named_parameters() if p.requires_grad}
    adapters = {name: each for name, each in held.items() if is_adapter(name)}
    assert params.keys() == adapters.keys(), "the same targets"
    for name, param in params.items():
        if "lora_A" in name:  # drawn as PEFT draws them
            bound = param.shape[1] ** -0.5
            for drawn in (param, adapters[name]):
                assert 0.9 * bound < drawn.detach().abs().max() <= bound
        else:
            assert not adapters[name].any() and not param.any()
        param.data.copy_(adapters[name])
    return adapted


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _our_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "")


def _adapters(training: Training) -> dict[str, Tensor]:
    return {
        name: _whole(tensor).clone()
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    }


def _beside(runs: list[RunDir]) -> list[Any]:
    """Of each run: PEFT's losses and norms; how far weights and gradients are from PEFT's."""
    answers = []
    for run_dir in runs:
        hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
        training = set_up(run_dir, 0, hooks, local_rank=0)
        adapted = _peft(training)
        params = {_our_name(n): p for n, p in adapted.named_parameters() if p.requires_grad}
        optimizer = torch.optim.SGD(params.values(), lr=RATE)

        found = []
        for step in range(STEPS):
            loss = _loss(training, adapted, step, reduction="mean")
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.get_total_norm([p.grad for p in params.values()])
            optimizer.step()
            optimizer.zero_grad()
            found.append((float(loss.detach()), float(norm)))
        loop = Loop(training)
        for _ in range(STEPS):
            loop.step()
        last = _adapters(training)
        apart = {name: _far(last[f"model.{name}"], param) for name, param in params.items()}
        _loss(training, adapted, STEPS, reduction="sum").backward()  # type: ignore[no-untyped-call]
        training.stepper.accumulate(next(training.loader))
        for name, ours in training.task.model.named_parameters():
            assert (ours.grad is not None) == is_adapter(name), name
            if ours.grad is not None:
                apart[f"gradient of {name}"] = _far(_whole(ours.grad), params[name].grad)
        training.close()
        answers.append((found, apart, len(params)))
    return answers


def _loss(training: Training, model: Any, step: int, *, reduction: str) -> Tensor:
    batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
    logits, targets = model(input_ids=batch["tokens"]).logits, batch["targets"]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def _far(found: Tensor, expected: Any) -> float:
    """As a share of what it is."""
    return float((found - expected.detach()).norm() / expected.detach().norm())


def test_losses_gradients_and_weights_are_those_of_peft(corpus: Corpus, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    runs = []
    for case, model in CASES.items():
        sections: dict[str, dict[str, Any]] = {
            "run": {"steps": 100},
            "model": model,
            "optim": {
                "name": "sgd", "lr": RATE, "weight_decay": 0.0, "grad_clip": None,
                "schedule": "constant", "warmup_steps": 0, "global_batch": BATCH, "micro_batch": 4,
            },
            "checkpoint": {"every": 1000},
        }  # fmt: skip
        if case == "bert":
            sections["task"] = {"name": "masked_lm"}
        runs.append(make_run(tmp_path / case, corpus, sections))
    answers = run_on_ranks(_beside, 1, runs)[0]
    for case, run_dir, (expected, apart, number) in zip(CASES, runs, answers, strict=True):
        assert number == {"all": 28, "some": 10, "bert": 8}[case]
        for line, pair in zip(read_steps(run_dir.metrics), expected, strict=True):
            assert (line["loss"], line["grad_norm"]) == pytest.approx(pair, rel=TOLERANCE), case
        assert all(each < TOLERANCE for each in apart.values()), (case, apart)
