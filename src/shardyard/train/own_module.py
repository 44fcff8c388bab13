"""The model of ``model.module``: made by the user's function on every rank, checked, sharded.

What is random in it is drawn from a seed of its own for each micro-batch, by the position of its
first sample. So a resume draws what the run would have drawn, and it does not matter which rank
computes a micro-batch.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardyard.config.schema.recipe import Recipe
from shardyard.data.micro_batch import MicroBatch
from shardyard.errors import Problem, RecipeError, RequestError
from shardyard.models.build import freeze
from shardyard.models.counter_random import key_of
from shardyard.parallel.apply import REMEDY, parallelize_own
from shardyard.parallel.ddp import stays_whole
from shardyard.parallel.mesh import Mesh
from shardyard.parallel.own_module import (
    blocks_named,
    module_problems,
    refuse_differing_weights,
    refuse_scalars,
)
from shardyard.parallel.precision import DTYPES
from shardyard.python_program import look_in_current_folder
from shardyard.tasks.custom import Loss, OwnComputation
from shardyard.train.generic_model import (
    blocks_of_causal_lm,
    loss_of_causal_lm,
    loss_of_documents,
    open_causal_lm,
    refuse_mixed_documents,
)


def build_own(
    recipe: Recipe,
    mesh: Mesh,
    *,
    vocab_size: int,
    device: torch.device,
    control: dist.ProcessGroup,
    folder: Path | None = None,
) -> OwnComputation:
    """Make, check and shard the model. All ranks call it together.

    Args:
        control: A gloo group of all ranks.
        folder: Of a model that transformers makes (``generic_model.py``).

    Raises:
        RequestError: There is no such function, or what it returns cannot be trained.
        RecipeError: Settings that do not fit the model; all of them.
    """
    place = str(recipe.model.module)
    torch.manual_seed(recipe.run.seed)
    found: list[Problem] = []
    if folder is None:
        model, loss = _made(place, vocab_size=vocab_size, seq_len=int(recipe.data.seq_len))
        blocks, found = blocks_named(model, recipe.model.blocks, setting="model.blocks")
    else:
        place = str(folder)
        opened = open_causal_lm(recipe, folder, vocab_size=vocab_size)
        model, loss, blocks = opened, loss_of_causal_lm, blocks_of_causal_lm(opened)
        if not recipe.data.attends_across:
            is_whole = recipe.data.pack == "whole"
            setting = "data.pack=whole" if is_whole else "data.attend_across_documents=false"
            refuse_mixed_documents(opened, setting)
            loss = loss_of_documents
    if not stays_whole(model, mesh, recipe):
        refuse_scalars(model, or_whole="parallel.strategy=NO_SHARD in fp32")
    found += module_problems(model, blocks, tp=1, setting="model.blocks")
    if found:
        raise RecipeError(found, place if folder is not None else f"model.module={place}")
    refuse_differing_weights(model, control)
    model.float()  # master weights
    freeze(model, recipe.model.frozen, held_in=DTYPES[recipe.precision.compute])
    model.to(device)
    remedy = REMEDY.format("parallel.zero=2")
    norms = parallelize_own(model, mesh, recipe=recipe, blocks=blocks, words={}, remedy=remedy)
    reads = _Reads(recipe.run.seed, device)
    said_by = f"the loss of {place}"
    return OwnComputation(model, mesh, loss, said_by=said_by, norms=norms, reads=reads)


class _Reads:
    """What a loss function of the user's own is given of a micro-batch."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._device = device

    def __call__(self, batch: MicroBatch) -> tuple[dict[str, Tensor], bool]:
        """Its fields on the device, without padding, and whether it counts."""
        first = int(batch.samples_B[0])  # in host memory
        torch.manual_seed(key_of(self._seed, "module", first) % 2**63)
        return dict(batch.cut().to(self._device).fields), not batch.is_padding


def _made(place: str, *, vocab_size: int, seq_len: int) -> tuple[nn.Module, Loss]:
    """What the function of the user returns."""
    answer = _function(place)(vocab_size=vocab_size, seq_len=seq_len)
    is_pair = isinstance(answer, tuple) and len(answer) == 2
    if not is_pair or not isinstance(answer[0], nn.Module) or not callable(answer[1]):
        raise RequestError(
            f"model.module={place} returned {_shown(answer)}. It must return two things: an "
            "nn.Module, and a function of (model, batch) that returns the sum of the losses of a "
            "batch and how many they are."
        )
    model, loss = answer
    return model, loss


def _function(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    look_in_current_folder()
    try:
        found: Callable[..., Any] = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise RequestError(
            f"model.module={place}: there is no module {error.name} here. Start the run where it "
            "is, set PYTHONPATH, or install it."
        ) from error
    except AttributeError as error:
        raise RequestError(
            f"model.module={place}: {module} has no {name}. Name a function that makes the model."
        ) from error
    return found


def _shown(answer: Any) -> str:
    if isinstance(answer, tuple):
        return f"({', '.join(type(each).__name__ for each in answer)})"
    return f"a {type(answer).__name__}"
