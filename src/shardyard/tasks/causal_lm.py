"""Predict the next token: from a micro-batch to the sum of its token losses.

Shape suffixes: B = samples, L = tokens of a sample, V = vocabulary.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.models.attention import document_mask
from shardyard.models.dropout import SampleKeys


class CausalLM:
    """Forward pass and loss of a causal language model."""

    def __init__(self, model: nn.Module, keys: SampleKeys, *, attend_across: bool) -> None:
        self.model = model
        self._keys = keys
        self._attend_across = attend_across

    def logits(self, batch: MicroBatch) -> Tensor:
        """Logits (B, L, V) in the model's output format."""
        self._keys.samples_B = batch.samples_B
        # positions are always given: transformers would infer them, with a device sync
        mask = None if self._attend_across else document_mask(batch.positions_BL)
        output = self.model(
            input_ids=batch.tokens_BL, position_ids=batch.positions_BL, attention_mask=mask
        )
        logits_BLV: Tensor = output.logits
        return logits_BLV

    def loss_sum(self, batch: MicroBatch) -> Tensor:
        """Sum over predicted tokens of the cross-entropy in nats, fp32; 0 if none counts."""
        logits_BLV = self.logits(batch)
        return F.cross_entropy(
            logits_BLV.flatten(0, 1).float(),
            batch.targets_BL.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
