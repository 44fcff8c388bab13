"""A bare FSDP2 training loop, written by hand as a torch tutorial would: what we are held against.

It has no data order, no resume, no metrics file, no drain: only the model, the optimizer and the
step. Nothing of shardyard is imported.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class BareLoop:
    """One rank's bare loop over random windows of a token file."""

    def __init__(
        self,
        config: Any,
        tokens: np.ndarray[Any, np.dtype[Any]],
        *,
        device: torch.device,
        compute: torch.dtype,
        micro_batch: int,
        micro_batches: int,
        seq_len: int,
        lr: float,
        recompute: bool,
        seed: int,
    ) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="sdpa"
            )
        if recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for block in self.model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.model.to_empty(device=device)
        self.model.init_weights()
        self.model.tie_weights()
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self._device = device
        self._micro_batches = micro_batches
        self._batches = _batches(tokens, micro_batch, seq_len, seed)

    def step(self) -> float:
        """One optimizer step; returns its mean loss, which waits for the device."""
        total = torch.zeros((), device=self._device)
        for _ in range(self._micro_batches):
            tokens_BL, targets_BL = (t.to(self._device) for t in next(self._batches))
            logits_BLV = self.model(input_ids=tokens_BL, use_cache=False).logits
            loss = F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())
            (loss / self._micro_batches).backward()
            total += loss.detach() / self._micro_batches
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(total)


def _batches(
    tokens: np.ndarray[Any, np.dtype[Any]], micro_batch: int, seq_len: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(tokens) - seq_len - 1, micro_batch)
        rows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
        batch = torch.from_numpy(rows.astype(np.int64))
        yield batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
