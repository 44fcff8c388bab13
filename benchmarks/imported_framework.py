"""What the original framework does under its own configuration, on the batches it is given.

One process of several. ``trainer`` takes the Trainer's arguments, as a file or on the line;
``accelerate`` is a loop under ``accelerate launch``; ``deepspeed`` a loop around its engine. Each
writes the mean loss of every step, from logits that all of them make alike. See
``imported_behaviour``.

    torchrun --nproc_per_node 2 -m benchmarks.imported_framework trainer --learning_rate 1e-4 ...
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Dataset

_OF_A_PROCESSOR = {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
    "memory_stats": lambda *_: {},
    "set_device": lambda *_: None,
    "current_device": lambda *_: 0,
}
"""What torchtitan asks of accelerators and torch.cpu lacks; it only prints it."""


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of all steps, one after the other; the model shifts the labels."""

    def __init__(self, path: Path) -> None:
        self._tokens = torch.from_numpy(np.load(path))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


class Losses:
    """Mean loss of each step over micro-batches and ranks, all of which are equally large."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts: list[Tensor] = []
        self._steps: list[float] = []
        self.about: dict[str, Any] = {}

    def add(self, logits_BLV: Tensor, tokens_BL: Tensor) -> None:
        """One micro-batch."""
        self.add_targets(logits_BLV[:, :-1], tokens_BL[:, 1:])

    def add_targets(self, logits_BLV: Tensor, targets_BL: Tensor) -> None:
        """One micro-batch, of which each logit has its target."""
        logits = logits_BLV.detach().float().flatten(0, 1)
        self._parts.append(F.cross_entropy(logits, targets_BL.flatten()))

    def end_step(self) -> None:
        """All micro-batches of a step are there."""
        mean = torch.stack(self._parts).double().mean()
        dist.all_reduce(mean)
        self._steps.append(float(mean) / dist.get_world_size())
        self._parts.clear()

    def write(self) -> None:
        """The file, by the first rank."""
        if dist.get_rank() == 0:
            self._path.write_text(json.dumps({"losses": self._steps, **self.about}))


def main() -> None:
    """Train as the first word says."""
    kind, *words = sys.argv[1:]
    given = Path(os.environ["IMPORTED_CASE"])
    case = json.loads((given / "case.json").read_text())
    torch.manual_seed(0)
    rows, losses = Rows(given / "batches.npy"), Losses(given / "losses.json")
    kinds = {"trainer": trainer, "accelerate": accelerate, "deepspeed": engine}
    (kinds | {"loop": loop, "torchtitan": titan})[kind](case, rows, losses, words)
    losses.write()
    dist.destroy_process_group()


def _model(case: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        case["model"], dtype=torch.float32, attn_implementation="sdpa"
    )


def _count_processes() -> None:
    """accelerate counts one process without accelerators, and wraps nothing: stepped over."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import _init_utils

    def gloo(*_: Any, **__: Any) -> tuple[str, Any]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = gloo
    # FSDP 1 numbers the device that it is told, and refuses it as it has no number itself
    _init_utils._get_device_from_device_id = lambda *_: None
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"


def trainer(case: dict[str, Any], rows: Rows, losses: Losses, words: list[str]) -> None:
    """The Trainer, with arguments from a file where the only word names one."""
    from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

    if Path("source.json").is_file() and "zero_optimization" in Path("source.json").read_text():
        _count_processes()
    if "--fsdp" in words:
        _count_processes()
        words = [word for word in words if word != "--use_cpu"]
    parser = HfArgumentParser((TrainingArguments,))
    if words[:1] == ["--config"]:
        content = json.loads(Path(words[1]).read_text())
        if "warmup_ratio" in content:  # the name of transformers 4
            content["warmup_steps"] = content.pop("warmup_ratio")
        (arguments,) = parser.parse_dict(content, allow_extra_keys=True)
    else:
        words = ["--warmup_steps" if word == "--warmup_ratio" else word for word in words]
        arguments = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)[0]

    class Told(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            named.pop("return_outputs", None)
            loss, outputs = super().compute_loss(model, inputs, *rest, return_outputs=True, **named)
            losses.add(outputs.logits, inputs["input_ids"])
            return loss

        def get_train_dataloader(self) -> Any:
            # dealt here: under DeepSpeed without accelerators accelerate counts one process
            case_of = {**case, "micro_batch": arguments.per_device_train_batch_size}
            return DataLoader(rows, batch_sampler=_places_of_rank(case_of, len(rows)))

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            losses.end_step()

    told = Told(model=_model(case), args=arguments, train_dataset=rows, callbacks=[Ends()])
    told.train()
    losses.about["ran_as"] = type(told.model_wrapped).__name__


def accelerate(case: dict[str, Any], rows: Rows, losses: Losses, _: list[str]) -> None:
    """A loop as accelerate's examples have it; what its file does not say is in the case."""
    from accelerate import Accelerator

    is_plain = not case["shards"] and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true"
    if not is_plain:  # it takes FSDP on accelerators only
        os.environ["ACCELERATE_USE_CPU"] = "false"
        _count_processes()
    accelerator = Accelerator(
        gradient_accumulation_steps=case["accumulation"], cpu=is_plain or None
    )
    if accelerator.distributed_type == "DEEPSPEED":  # the loop has no loader that says it
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        config["train_micro_batch_size_per_gpu"] = case["micro_batch"]
    model = _model(case)
    if case["shards"] == 1:
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), **case["adamw"])
    model, optimizer = accelerator.prepare(model, optimizer)
    losses.about["ran_as"] = type(model).__name__
    batches = _of_rank(case, rows)
    for tokens_BL in batches:
        with accelerator.accumulate(model):
            outputs = model(input_ids=tokens_BL, labels=tokens_BL)
            losses.add(outputs.logits, tokens_BL)
            accelerator.backward(outputs.loss)
            if accelerator.sync_gradients and case["grad_clip"]:
                accelerator.clip_grad_norm_(model.parameters(), case["grad_clip"])
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            losses.end_step()


def engine(case: dict[str, Any], rows: Rows, losses: Losses, words: list[str]) -> None:
    """DeepSpeed's engine under its file; an optimizer of the script where that names none."""
    import deepspeed

    config = json.loads(Path(words[0]).read_text())
    deepspeed.init_distributed("gloo")
    model = _model(case)
    own = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), **case["adamw"])
    wrapped, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=own, config=config
    )
    losses.about["ran_as"] = f"{type(wrapped).__name__}, stage {wrapped.zero_optimization_stage()}"
    for tokens_BL in _of_rank(case, rows):
        outputs = wrapped(input_ids=tokens_BL, labels=tokens_BL)
        losses.add(outputs.logits, tokens_BL)
        wrapped.backward(outputs.loss)
        is_last = wrapped.is_gradient_accumulation_boundary()
        wrapped.step()
        if is_last:
            losses.end_step()


def loop(case: dict[str, Any], rows: Rows, losses: Losses, _: list[str]) -> None:
    """A plain script with DDP, of which a job says processes alone."""
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(_model(case))
    optimizer = torch.optim.AdamW(model.parameters(), **case["adamw"])
    losses.about["ran_as"] = f"{type(model).__name__} of {dist.get_world_size()}"
    for tokens_BL in _of_rank(case, rows):
        outputs = model(input_ids=tokens_BL, labels=tokens_BL)
        losses.add(outputs.logits, tokens_BL)
        outputs.loss.backward()
        if case["grad_clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case["grad_clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.end_step()


def titan(case: dict[str, Any], rows: Rows, losses: Losses, words: list[str]) -> None:
    """torchtitan's own trainer under its file; model, weights and batches are those of the case."""
    from torchtitan import train as torchtitan
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
    from torchtitan.protocols import train_spec

    for name, value in _OF_A_PROCESSOR.items():
        setattr(torch.cpu, name, value)
    for name, module in list(sys.modules.items()):  # each has taken "cuda" where nothing is found
        for each, here in (("device_type", "cpu"), ("device_module", torch.cpu)):
            if name.startswith("torchtitan.") and hasattr(module, each):
                setattr(module, each, here)
    config = ConfigManager().parse_args(["--job.config_file", words[0]])
    tiny = TransformerModelArgs(
        dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=32,
        ffn_dim_multiplier=0.75, norm_eps=1e-6, rope_scaling_args=RoPEScalingArgs(scaling_factor=1),
    )  # fmt: skip
    llama3_args[config.model.flavor] = tiny
    of_file = train_spec.get_train_spec(config.model.name)

    def batches(**_: Any) -> Any:
        for tokens_BL in _of_rank({**case, "micro_batch": config.training.local_batch_size}, rows):
            yield {"input": tokens_BL[:, :-1]}, tokens_BL[:, 1:]

    own = replace(of_file, build_dataloader_fn=batches, build_tokenizer_fn=None)
    train_spec.get_train_spec = lambda _: own

    class Told(torchtitan.Trainer):  # type: ignore[misc]
        def train_step(self, data_iterator: Any) -> None:
            super().train_step(data_iterator)
            losses.end_step()

    told = Told(config)
    (model,) = told.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no sum that multiplies, by 1 as it is
            module.set_force_sum_reduction_for_comms(True)
    weights = Llama3StateDictAdapter(tiny, None).from_hf(_model(case).state_dict())
    set_model_state_dict(
        model, weights, options=StateDictOptions(full_state_dict=True, strict=True)
    )
    of_titan = told.loss_fn

    def told_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Any:
        losses.add_targets(logits_BLV, targets_BL)
        return of_titan(logits_BLV, targets_BL)

    told.loss_fn = told_loss
    losses.about["ran_as"] = type(model).__name__
    told.train()


def _of_rank(case: dict[str, Any], rows: Rows) -> Iterator[Tensor]:
    for places in _places_of_rank(case, len(rows)):
        yield torch.stack([rows[place]["input_ids"] for place in places])


def _places_of_rank(case: dict[str, Any], count: int) -> list[list[int]]:
    """Micro-batches of this rank: consecutive samples, dealt in turn."""
    rank, world, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), case["micro_batch"]
    starts = range(rank * size, count, world * size)
    return [list(range(start, start + size)) for start in starts]


if __name__ == "__main__":
    main()
