"""Prepared rows with labels as samples. Shape suffix: L = tokens in a sample."""

from pathlib import Path

import numpy as np

from shardyard.data.loader import IGNORED
from shardyard.data.own.stored import StoredItems
from shardyard.data.samples import Sample
from shardyard.data.shards import LABELS_VERSION, read_manifest
from shardyard.errors import DataError


class LabelledSet:
    """The ``SampleSet`` of one split of prepared rows, a row each.

    Fields: tokens, positions and segments (L,). With labels of samples also label and reads (),
    the place of the token that the head reads; with labels of tokens targets (L,).
    """

    def __init__(
        self, folder: Path, split: str, *, seq_len: int, vocab_size: int, reads_last: bool
    ) -> None:
        """Args:
            vocab_size: Token ids that the model has.
            reads_last: Whether the head reads the last token of a sample, and not the first.

        Raises:
            DataError: A file is missing or damaged, or of another vocabulary.
        """
        manifest = read_manifest(folder, (LABELS_VERSION,))
        if manifest["vocab_size"] > vocab_size:
            raise DataError(
                f"{folder} has {manifest['vocab_size']:,} token ids, and the model {vocab_size:,}. "
                "Set data.tokenizer to the model's own, or prepare again."
            )
        self._items = StoredItems(folder, split, manifest["splits"][split]["stored"])
        self.num_samples = len(self._items)
        self._of_tokens = manifest["request"]["labelled"] == "tokens"
        self._label_type = np.float64 if not manifest["label_names"] else np.int64
        self._seq_len = seq_len
        self._reads_last = reads_last

    def sample(self, index: int, epoch: int) -> Sample:  # noqa: ARG002 - the same in every one
        """Row ``index`` of the split."""
        found = self._items[index]
        length = min(len(found["tokens"]), self._seq_len)
        fields = self.padding().fields
        for name in ("tokens", "segments"):
            fields[name][:length] = found[name][:length]
        fields["positions"][length:] = np.arange(self._seq_len - length)  # padding is for itself
        if self._of_tokens:
            fields["targets"][:length] = found["label"][:length]
        else:
            fields["label"][()] = found["label"]
            fields["reads"][()] = length - 1 if self._reads_last else 0
        return Sample(fields, length)

    def padding(self) -> Sample:
        """Return tokens 0 without a label to predict."""
        zeros = [np.zeros(self._seq_len, dtype=np.int64) for _ in range(2)]
        fields = {
            "tokens": zeros[0],
            "segments": zeros[1],
            "positions": np.arange(self._seq_len, dtype=np.int64),
        }
        if self._of_tokens:
            fields["targets"] = np.full(self._seq_len, IGNORED, dtype=np.int64)
        else:
            fields["label"] = np.zeros((), dtype=self._label_type)
            fields["reads"] = np.zeros((), dtype=np.int64)
        return Sample(fields, 0)
