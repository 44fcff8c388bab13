"""A Hugging Face folder of a model that a script has wrapped."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from shardyard.errors import RequestError, StorageError
from shardyard.library.state import sharded


def export(model: nn.Module, folder: str | Path) -> None:
    """Write what ``save_pretrained`` writes, whatever ranks hold. All ranks call it together.

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
    state = {}
    for name, tensor in model.state_dict().items():
        whole = _whole(tensor)  # one after the other: each rank holds one of them at most
        if dist.get_rank() == 0:
            state[name] = whole.cpu()
    problem = ""
    if dist.get_rank() == 0:
        try:
            _write(model, parts.built_as, state, Path(folder))
        except OSError as error:
            problem = (
                f"export() could not write {folder}: {error}. Give a folder that rank 0 may write "
                "to, with room for the weights."
            )
    problem = parts.agree(problem)[0]
    if problem:
        raise StorageError(problem)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def _write(
    model: PreTrainedModel, built_as: type[Any], state: dict[str, Tensor], folder: Path
) -> None:
    """By a module of the class that the script built, which holds the whole tensors."""
    folder.mkdir(parents=True, exist_ok=True)  # save_pretrained only logs that it is a file
    with torch.device("meta"):
        plain = built_as(model.config)
    plain.load_state_dict(state, strict=False, assign=True)
    plain.tie_weights()
    plain.generation_config = getattr(model, "generation_config", None)
    plain.save_pretrained(folder)
