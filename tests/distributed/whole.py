"""All of what ranks hold in parts."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A copy of its own; all ranks that split the tensor call it together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
