"""Measure how many pairs of texts follow each other, and end where they are too few."""

from dataclasses import replace
from pathlib import Path

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.config.task_lookup import task_row
from shardyard.errors import RequestError

_USUAL_PAIR = 128
"""Tokens of a pair that is drawn to look at, where data.seq_len is not known yet."""


def with_true_pairs(metadata: DatasetMetadata, recipe: Recipe) -> DatasetMetadata:
    """The same with the share of true pairs, where the task judges pairs.

    Raises:
        RequestError: There are so few that the task would learn to call every pair random.
    """
    data = recipe.data
    if not task_row(recipe.task.name).judges_pairs or DATA_FORMATS[data.format].holds_ids:
        return metadata
    # Not above: it imports torch, which takes more seconds than a small corpus.
    from shardyard.data.sentence_pairs import share_of_true_pairs

    seq_len = _USUAL_PAIR if data.seq_len == "auto" else data.seq_len
    share = share_of_true_pairs(Path(metadata.dir), seq_len=seq_len)
    if share is not None and share < data.min_true_pairs:
        raise RequestError(
            f"data.source={data.source!r}: the second text follows the first in {share:.1%} of the "
            f"pairs, less than data.min_true_pairs={data.min_true_pairs:g}; about half should. "
            "Most documents are one sentence to the program: sentences end at . ! ? before a "
            "capital letter, or at a blank line. Give text with capitals, or one sentence a line "
            "with data.format=documents; to train all the same, set data.min_true_pairs=0. What "
            "was prepared is kept."
        )
    return replace(metadata, true_pairs=share)
