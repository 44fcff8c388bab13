"""Checks of a prepared dataset that look at its numbers: what they reject stays prepared."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from shardyard.config.data_choices import DATA_FORMATS
from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.data import Data
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.byte_ranges import SourceFile, Span
from shardyard.data.readers.columns import TextOf
from shardyard.data.sources import read_sections
from shardyard.data.token_ids import ids_of
from shardyard.errors import RequestError


def check_loss_share(metadata: DatasetMetadata, data: Data, *, setting: str) -> None:
    """Raise where so little or so much is learnt that the template or the data must be wrong.

    Args:
        setting: Setting that names the files.
    """
    if metadata.train_learnt is None or data.loss_on == "all":
        return
    least, most = data.loss_share
    learnt, tokens = metadata.train_learnt, metadata.train_tokens
    if not tokens:  # a set that is only validated on
        learnt, tokens = metadata.eval_learnt or 0, metadata.eval_tokens
    share = learnt / tokens
    if not least <= share <= most:
        raise RequestError(
            f"{setting}={data.source!r}: answers are {share:.2%} of the tokens "
            f"({learnt:,} of {tokens:,}), outside of data.loss_share="
            f"[{least}, {most}]. Look at the rows and the chat template; if this is as it should "
            "be, widen data.loss_share. What was prepared is kept."
        )


def check_document_count(metadata: DatasetMetadata, recipe: Recipe) -> None:
    """Raise where a split has no second document that half of the pairs could be made with."""
    data = recipe.data
    if not task_row(recipe.task.name).judges_pairs or DATA_FORMATS[data.format].holds_samples:
        return
    for split, documents in (
        ("train", metadata.train_documents),
        ("eval", metadata.eval_documents),
    ):
        if documents == 1:
            raise RequestError(
                f"data.source={data.source!r}: the {split} split has one document, and "
                f"task.name={recipe.task.name} makes pairs of texts from two. Give more documents, "
                "or change data.eval_fraction. What was prepared is kept."
            )


_USUAL_PAIR = 128
"""Tokens of a pair that is drawn to look at, where data.seq_len is not known yet."""


def with_true_pairs(metadata: DatasetMetadata, recipe: Recipe) -> DatasetMetadata:
    """The same with the share of true pairs, where the task judges pairs.

    Raises:
        RequestError: There are so few that the task would learn to call every pair random.
    """
    data = recipe.data
    if not task_row(recipe.task.name).judges_pairs or DATA_FORMATS[data.format].holds_samples:
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


_ROWS, _FEWEST_ROWS = 64, 8
"""Rows that are looked at, and with how few nothing is concluded."""


def check_blocks(files: Sequence[SourceFile], text_of: TextOf, data: Data) -> None:
    """Raise where rows of ids look like blocks of one stream, and the recipe does not say it.

    As documents each would get an end in the middle of a text.
    """
    row = DATA_FORMATS[data.format]
    if not row.holds_ids or row.holds_samples or data.id_rows is not None or not files:
        return
    spans = (Span(files[0], 0, files[0].size_bytes),)
    rows = [ids_of(each.text) for each in islice(read_sections(spans, text_of), _ROWS)]
    lengths = {len(ids_N) for ids_N in rows}
    is_open = any(ids_N[-1] != text_of.end_id for ids_N in rows)
    if len(rows) >= _FEWEST_ROWS and len(lengths) == 1 and is_open:
        raise RequestError(
            f"data.source={data.source!r}: its first {len(rows)} rows have {lengths.pop():,} ids "
            "each, and some do not end with the id that ends a text: they look like blocks cut "
            "from one stream. Set data.id_rows=blocks, or data.id_rows=documents if each is a text."
        )
