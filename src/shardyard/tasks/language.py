"""Common parts of text tasks: samples of tokens, judged by the mean loss of a token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from shardyard.config.mixture import recipe_of_items, source_recipe
from shardyard.config.resolved import Resolved
from shardyard.config.schema.data import Share
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.data.loader import MicroBatch
from shardyard.data.mixture import ConcatenatedSets, MixedStream, WithOnes
from shardyard.data.mixture import MixturePart as MixturePart
from shardyard.data.own.samples import ItemStream, open_item_sets, open_items
from shardyard.data.samples import (
    Prepare,
    SampleSet,
    Stream,
    TextWindows,
    WholeDocuments,
    identity_prepare,
)
from shardyard.data.shards import TokenShards, mixture_at
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.model import ParallelModel
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.token_losses import LanguageModel


class LanguageTask(Task):
    """Reads text as samples of tokens, and is judged by the mean loss of a token."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns read besides the tokens, by the names that an encoder of ``data.format`` gives."""

    @classmethod
    def columns_of(cls, resolved: Resolved) -> Sequence[str]:  # noqa: ARG003
        """Return the columns among these that it reads of a run's data."""
        return cls.columns

    @staticmethod
    def preparation(resolved: Resolved, split: str) -> Prepare:  # noqa: ARG004
        """Return the task's change of a micro-batch of text, made where the batch is read."""
        return identity_prepare

    @classmethod
    def samples(cls, resolved: Resolved, split: str) -> SampleSet:
        """The samples of ``data.seq_len`` tokens that a split is made of."""
        recipe = resolved.recipe
        seq_len = recipe.data.seq_len
        assert isinstance(seq_len, int)
        shards = TokenShards(Path(resolved.data.dir), split, vocab_size=vocabulary(resolved))
        columns = cls.columns_of(resolved)
        if recipe.data.pack == "whole":
            too_long = recipe.data.too_long
            return WholeDocuments(shards, seq_len=seq_len, too_long=too_long, columns=columns)
        return TextWindows(
            shards,
            seq_len=seq_len,
            attend_across_documents=recipe.data.attends_across,
            columns=columns,
        )

    @classmethod
    def open_data(cls, resolved: Resolved) -> TaskData:
        """Both splits: the training samples without end, the held-out ones each once."""
        sets = {each.name: each.data for each in resolved.data.eval_sets}
        return cls._open_splits(resolved)._replace(
            eval_sets={
                name: cls._open_eval(replace(resolved, data=data)) for name, data in sets.items()
            }
        )

    @classmethod
    def _open_eval(cls, resolved: Resolved) -> Stream:
        """The validation samples of one dataset, each once."""
        prepare = cls.preparation(resolved, "eval")
        return Stream(cls.samples(resolved, "eval"), seed=None, prepare=prepare)

    @classmethod
    def _open_splits(cls, resolved: Resolved) -> TaskData:
        if resolved.data.parts:
            return cls._open_mixture(resolved)
        if resolved.data.item_kind is not None:
            return TaskData(*cls._open_items(resolved))
        train = Stream(
            cls.samples(resolved, "train"),
            seed=resolved.recipe.run.seed,
            prepare=cls.preparation(resolved, "train"),
        )
        if not resolved.data.num_samples("eval", int(resolved.recipe.data.seq_len)):
            return TaskData(train, None)
        return TaskData(train, cls._open_eval(resolved))

    @classmethod
    def _open_items(cls, resolved: Resolved) -> tuple[ItemStream, ItemStream | None]:
        if resolved.data.item_kind != "tokens":  # fields of the user's own model, as they are
            return open_items(resolved, vocab_size=None, prepare=lambda _: identity_prepare)
        return open_items(
            resolved, vocab_size=vocabulary(resolved), prepare=partial(cls.preparation, resolved)
        )

    @classmethod
    def _open_mixture(cls, resolved: Resolved) -> TaskData:
        parts = [
            (part, replace(resolved, data=part.data))
            for part in mixture_at(Path(resolved.data.dir))
        ]
        shares = {share.name: share for share in resolved.recipe.data.mixture}
        by_split = [
            cls._sets_of_source(resolved, alone, shares.get(part.name)) for part, alone in parts
        ]
        sets = [each["train"] for each in by_split]
        cls.match_forms(sets)
        train = MixedStream(
            [MixturePart(each, part.slots) for each, (part, _) in zip(sets, parts, strict=True)],
            seed=resolved.recipe.run.seed,
            prepare=cls.preparation(resolved, "train"),
        )
        held_out = {
            part.name: each["eval"]
            for (part, _), each in zip(parts, by_split, strict=True)
            if "eval" in each
        }
        if not held_out:
            return TaskData(train, None)
        cls.match_forms(list(held_out.values()))
        prepare = cls.preparation(resolved, "eval")
        return TaskData(
            train,
            Stream(ConcatenatedSets(list(held_out.values())), seed=None, prepare=prepare),
            {name: Stream(each, seed=None, prepare=prepare) for name, each in held_out.items()},
        )

    @classmethod
    def _sets_of_source(
        cls, resolved: Resolved, source: Resolved, share: Share | None
    ) -> dict[str, SampleSet]:
        """Samples of each split of one source of a mixture, with the columns of all sources."""
        sets: dict[str, SampleSet] = {}
        if source.data.item_kind is not None:
            assert share is not None  # the recipe names each module
            recipe = recipe_of_items(source_recipe(resolved.recipe, share))
            items = open_item_sets(replace(source, recipe=recipe), vocab_size=vocabulary(resolved))
            sets |= items
        else:
            seq_len = int(resolved.recipe.data.seq_len)
            splits = [each for each in ("train", "eval") if source.data.num_samples(each, seq_len)]
            sets |= {split: cls.samples(source, split) for split in splits}
        missing = {*cls.columns_of(resolved)} - {*cls.columns_of(source)}
        if not missing:
            return sets
        return {split: WithOnes(samples, missing) for split, samples in sets.items()}

    @classmethod
    def match_forms(cls, sets: Sequence[SampleSet]) -> None:
        """Give the samples of a mixture's sources one form, where their fields differ in size."""

    @staticmethod
    def compute(
        parts: ParallelModel,
        mesh: Mesh,
        *,
        recipe: Recipe,  # noqa: ARG004
        device: torch.device,
    ) -> LanguageModel:
        """By token losses."""
        return LanguageModel(parts, mesh, device=device)

    @staticmethod
    def empty_batch(recipe: Recipe) -> MicroBatch:
        """Sizes of ``optim.micro_batch`` samples."""
        samples, seq_len = int(recipe.optim.micro_batch), int(recipe.data.seq_len)
        tokens, targets, positions = torch.zeros(3, samples, seq_len, dtype=torch.int64).unbind()
        starts = torch.zeros(samples, 1, dtype=torch.int32)
        return MicroBatch(
            fields={"tokens": tokens, "targets": targets, "positions": positions, "starts": starts},
            samples_B=torch.zeros(samples, dtype=torch.int64),
            work=samples * seq_len,
        )

    @staticmethod
    def scores(loss: float, means: Mapping[str, float]) -> dict[str, float]:
        """Return the loss in nats a token, and the values to report with it."""
        return {"loss": loss, "perplexity": perplexity(loss), **means}


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that is too large."""
    return math.exp(loss) if loss < 700 else math.inf


def vocabulary(resolved: Resolved) -> int:
    """Token ids that the model has to know."""
    if resolved.shape is not None:
        return resolved.shape.vocab_size
    # of the user's own module; a tokenizer that we train has no mask token
    mask_rows = 0 if task_row(resolved.recipe.task.name).is_causal else 1
    return resolved.data.vocab_size + mask_rows
