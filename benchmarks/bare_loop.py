"""A bare FSDP2 training loop, written by hand as a good engineer would: what we are held against.

It has the model, the optimizer and the step, and nothing else: no data order, no resume, no metrics
file, no drain, no skipping of a step that is not finite. Nothing of shardyard is imported. It waits
for nothing it does not need: no loss is read while it runs, the norm is the only collective of
its own.

Shape suffixes: B = samples, L = tokens of a sample, V = vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


class BareLoop:
    """One rank's loop over random windows of a long array of tokens.

    Args:
        model: Sharded, with its weights: ``sharded_llama`` or ``sharded_module``.
        logits: From the model and token ids (B, L) to logits (B, L, V).
        micro_batches: Forward and backward passes of this rank in one step.
        gathers_once: Whether parameters stay whole from one micro-batch to the next.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: npt.NDArray[np.int64],
        *,
        device: torch.device,
        micro_batch: int,
        micro_batches: int,
        seq_len: int,
        lr: float,
        seed: int,
        logits: Callable[[nn.Module, Tensor], Tensor] | None = None,
        gathers_once: bool = False,
    ) -> None:
        self.model = model
        self._logits = logits or _of_transformers
        self._gathers_once = gathers_once
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._device = device
        self._micro_batches = micro_batches
        self._batches = _batches(
            tokens, micro_batch=micro_batch, seq_len=seq_len, seed=seed, pin=device.type != "cpu"
        )

    def step(self) -> Tensor:
        """One optimizer step; returns its mean loss on this rank, still on the device."""
        total = torch.zeros((), device=self._device)
        for later in reversed(range(self._micro_batches)):
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(later == 0)  # one reduction a step
                self.model.set_reshard_after_backward(later == 0 or not self._gathers_once)
            tokens_BL, targets_BL = (
                ids_BL.to(self._device, non_blocking=True) for ids_BL in next(self._batches)
            )
            logits_BLV = self._logits(self.model, tokens_BL)
            loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())
            (loss / self._micro_batches).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() / self._micro_batches
        self._clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _clip(self, max_norm: float) -> None:
        params = list(self.model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # one all-reduce here instead of one per parameter
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)


def _of_transformers(model: nn.Module, tokens_BL: Tensor) -> Tensor:
    logits_BLV: Tensor = model(input_ids=tokens_BL, use_cache=False).logits
    return logits_BLV


def sharded_module(model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Any module, sharded block by block; it computes in fp32."""
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model.train()


def sharded_llama(
    config: Any,
    *,
    device: torch.device,
    compute: torch.dtype,
    recompute: bool,
    compiles: bool = False,
    gathers_once: bool = False,
) -> Any:
    """A model of the Llama family with random weights: fp32 shards, ``compute`` while whole.

    Args:
        config: transformers'.
        recompute: Whether every block is computed again in the backward pass.
        compiles: Whether torch.compile compiles every block.
        gathers_once: Whether parameters stay whole from their first use to the step: more memory.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    reshards = False if gathers_once else None  # None: torch's own choice
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    if not is_tied:
        fully_shard(model.model.embed_tokens, mp_policy=policy, reshard_after_forward=reshards)
    for block in model.model.layers:
        if compiles:
            block.compile()
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
    if not is_tied:
        last: list[nn.Module] = [model.model.norm, model.lm_head]
        fully_shard(last, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)
    model.to_empty(device=device)
    model.init_weights()
    model.tie_weights()
    model.train()
    return model


def _batches(
    tokens: npt.NDArray[np.int64], *, micro_batch: int, seq_len: int, seed: int, pin: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - seq_len - 1, micro_batch)
        rows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        batch = torch.from_numpy(rows)
        inputs_BL, targets_BL = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        yield (inputs_BL.pin_memory(), targets_BL.pin_memory()) if pin else (inputs_BL, targets_BL)
