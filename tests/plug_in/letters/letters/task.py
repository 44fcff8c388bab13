"""The task `vowels`: next tokens, of which those without vowels are read and not learnt."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from letters.row import Vowels
from shardyard.config.resolved import Resolved
from shardyard.data.loader import IGNORED, MicroBatch
from shardyard.data.samples import Prepare
from shardyard.tasks.language import LanguageTask


class VowelTask(LanguageTask):
    """Predicts tokens that hold vowels."""

    @staticmethod
    def preparation(resolved: Resolved, split: str) -> Prepare:  # noqa: ARG004 (both the same)
        """Which tokens count, of the tokenizer that was prepared."""
        asked = resolved.recipe.task.own("vowels", Vowels)
        tokenizer = Tokenizer.from_file(str(Path(resolved.data.dir) / "tokenizer.json"))
        words = [tokenizer.decode([id]) for id in range(tokenizer.get_vocab_size())]
        vowels = [sum(letter in asked.letters for letter in word) for word in words]
        counts_V = torch.tensor(vowels) >= asked.at_least

        def hide(batch: MicroBatch, lengths_B: Tensor) -> MicroBatch:  # noqa: ARG001 (padding is no target)
            targets = batch["targets"]
            counts = counts_V[targets.clamp_min(0)] & (targets != IGNORED)
            return batch.with_fields(targets=torch.where(counts, targets, IGNORED))

        return hide

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:  # noqa: ARG004
        """The loss, and how likely a vowel is on average."""
        return {"loss": loss, "vowel_score": math.exp(-loss)}
