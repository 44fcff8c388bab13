"""A Hugging Face folder of a model that a script has wrapped."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardyard.errors import RequestError, StorageError
from shardyard.families.family import Family
from shardyard.families.file_tensors import file_tensors
from shardyard.families.registry import family_of
from shardyard.library.model import Sharded, sharded


def export(model: nn.Module, folder: str | Path) -> None:
    """Write what ``save_pretrained`` writes, in any layout. All ranks call it together.

    Args:
        folder: Written by rank 0.

    Raises:
        RequestError: The model is none of transformers', or was not wrapped by ``wrap()``.
        StorageError: The folder could not be written. The same on every rank.
    """
    parts = sharded(model)
    if not isinstance(model, PreTrainedModel) or parts.built_as is None:
        raise RequestError(
            "export() writes folders of transformers' models that have been through wrap(), which "
            f"this {type(model).__name__} is not. Use shardyard.save_checkpoint(); of a run, the "
            "command shardyard export."
        )
    state = _on_rank_0(model.state_dict(), parts)
    problem = ""
    if dist.get_rank() == 0:
        try:
            family = family_of(model.config.model_type) if parts.is_supported else None
            _write(model, parts.built_as, state, Path(folder), family)
        except OSError as error:
            problem = (
                f"export() could not write {folder}: {error}. Give a folder that rank 0 may write "
                "to, with room for the weights."
            )
    problem = parts.agree(problem)[0]
    if problem:
        raise StorageError(problem)


def _on_rank_0(state: Mapping[str, Any], parts: Sharded) -> dict[str, Tensor]:
    """Return whole tensors of all ranks, on rank 0; elsewhere none. All ranks call it together.

    Stages of pp, and experts of ep, are only on some ranks: the first that has one sends it.
    """
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    by_rank: list[dict[str, tuple[torch.Size, torch.dtype]]] = parts.agree(forms)
    rank, found = dist.get_rank(), dict[str, Tensor]()
    for name in sorted({name for each in by_rank for name in each}):
        owner = next(each for each, names in enumerate(by_rank) if name in names)
        # one after the other: each rank holds one of them whole at most
        whole = _whole(state[name]) if name in state else None
        if rank == owner != 0:
            assert whole is not None
            dist.send(_bytes(whole.cpu().contiguous()), 0, group=parts.control)
        elif rank == 0 and owner != 0:
            shape, dtype = by_rank[owner][name]
            found[name] = torch.empty(shape, dtype=dtype)
            dist.recv(_bytes(found[name]), owner, group=parts.control)
        elif rank == 0:
            assert whole is not None
            found[name] = whole.cpu()
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def _write(
    model: PreTrainedModel,
    built_as: type[Any],
    state: dict[str, Tensor],
    folder: Path,
    family: Family | None,
) -> None:
    """By a module of the class that the script built, which holds the whole tensors.

    Args:
        family: Whose fused matrices and packed experts ``wrap`` took apart; None: it did not.
    """
    folder.mkdir(parents=True, exist_ok=True)  # save_pretrained only logs that it is a file
    with torch.device("meta"):
        plain = built_as(model.config)
    if family is not None:
        state = _joined(state, plain.state_dict(), family)
    plain.load_state_dict(state, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = getattr(model, "generation_config", None)
    plain.save_pretrained(folder)


def _joined(state: Mapping[str, Tensor], names: Iterable[str], family: Family) -> dict[str, Tensor]:
    """transformers' parameters, by its names, of those that are apart here."""
    made_of = file_tensors({name: tensor.shape for name, tensor in state.items()}, family)
    found = {}
    for name in names:
        module = name.rpartition(".")[0]
        if name in made_of:
            rows = torch.cat([state[piece.parameter] for piece in made_of[name]])
            found[name] = rows.mT.contiguous() if made_of[name][0].is_transposed else rows
        elif name in state:
            found[name] = state[name]
        elif name.endswith("experts.gate_up_proj"):
            found[name] = torch.cat([state[f"{module}.gate"], state[f"{module}.up"]], dim=1)
        elif name.endswith("experts.down_proj"):
            found[name] = state[f"{module}.down"]
        elif name.endswith(".gate.weight"):
            found[name] = state[f"{module.removesuffix('gate')}router.weight"]
    return found
