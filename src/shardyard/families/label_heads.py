"""Families with a head over labels: of each sample, or of each token.

The blocks are those of the language model, and so are their names in files. The head over the
vocabulary is left out. Source: ``ForSequenceClassification`` and ``ForTokenClassification`` of
transformers 5.23.
"""

import re
from dataclasses import replace
from functools import cache

from shardyard.families.dimensions import Labelled
from shardyard.families.family import Family, ModuleSpec, always, hidden, labels
from shardyard.families.registry import family_of


@cache
def labelled_family(model_type: str, labelled: Labelled) -> Family:
    """The family of a model type with a head over labels in the place of its own.

    Raises:
        RequestError: As ``family_of``.
    """
    family = family_of(model_type)
    names = family.label_head
    of_samples = labelled == "samples"
    has_bias = names.samples_have_bias or not of_samples
    pooler = names.pooler if of_samples else None
    return replace(
        family,
        labelled=labelled,
        # what is between the last block and the head over the vocabulary, and a part of that
        norm=family.norm if family.end is None else replace(family.norm, is_built=False),
        head=ModuleSpec(
            names.of_samples if of_samples else names.of_tokens, labels, hidden,
            bias=always if has_bias else None,
        ),
        pooler=None if pooler is None else ModuleSpec(pooler, hidden, hidden, bias=always),
        pair_head=None,
        end=None,
        tied_names={},
        is_always_tied=False,
        uncounted=lambda _: {},
        ignored_names={_of_vocabulary(family): "the task has no head over the vocabulary"},
    )  # fmt: skip


def _of_vocabulary(family: Family) -> str:
    """Return a pattern of the tensors that a language model has and one over labels has not."""
    base = f"{family.blocks.partition('.')[0]}."
    rows = (family.head, family.pooler, family.pair_head)
    names = {(family.head.in_files or f"{family.head.module}.weight").rpartition(".")[0]}
    names |= {row.module.removeprefix(base) for row in rows if row is not None}
    names |= set() if family.end is None else {family.end}
    tops = "|".join(re.escape(name) for name in sorted(names))
    return rf"({re.escape(base)})?({tops})\..*"
