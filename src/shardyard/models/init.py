"""Random initial weights: each element is a function of (seed, parameter name, index).

Every layout therefore starts from the same weights, each rank computes only the elements it holds,
and no rank ever holds more than a slice of a whole parameter.
"""

import math
from collections.abc import Callable, Collection, Iterator

from torch import Tensor, nn

from shardyard.errors import RequestError
from shardyard.families.lora import A, is_adapter
from shardyard.models.local_shard import LocalShard, local_shard
from shardyard.models.moe import Experts
from shardyard.models.random import key_of, normal, uniform

_PIECE = 2**22
"""Elements made at a time: bounds the int64 and fp64 scratch at about 200 MiB."""


def fill_random(
    model: nn.Module,
    *,
    seed: int,
    std: Callable[[str], float],
    norm: float,
    only: Collection[str] | None = None,
) -> None:
    """Fill all that has storage in place, but adapters: matrices normal(0, std), norms ``norm``,
    biases zero.

    Args:
        std: From the name of a matrix.
        only: Names of parameters to fill; None: all.

    The rule is that of Hugging Face's ``PreTrainedModel._init_weights`` for these families.

    Raises:
        RequestError: A parameter belongs to a kind of module without a rule.
    """
    filled = set()
    for module_name, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full_name = f"{module_name}.{name}" if module_name else name
            if param in filled:  # tied: a pipeline stage may only have its first name
                continue
            is_left_out = only is not None and full_name not in only
            if is_adapter(full_name) or param.is_meta or is_left_out:
                continue
            filled.add(param)
            shard = local_shard(param)
            if _is_norm(module) and not full_name.endswith(".bias"):
                shard.tensor.fill_(norm)
            else:
                _fill(shard, module, full_name, seed=seed, std=std(full_name))


def fill_adapters(model: nn.Module, *, seed: int) -> None:
    """Fill adapters in place, if there are any: A uniform, and B zero, so that they add 0.

    PEFT does the same: within 1 / sqrt(inputs), torch's own rule for a linear module.
    """
    for name, param in model.named_parameters():
        if not is_adapter(name):
            continue
        shard = local_shard(param)
        if name.endswith(f".{A}.weight"):
            bound = 1.0 / math.sqrt(shard.whole_shape[1])
            _fill_drawn(shard, key_of(seed, "init", name), uniform, bound)
        else:
            shard.tensor.zero_()


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _fill(shard: LocalShard, module: nn.Module, name: str, *, seed: int, std: float) -> None:
    if name.endswith(".bias"):
        shard.tensor.zero_()
    elif isinstance(module, nn.Linear | nn.Embedding | Experts):
        _fill_drawn(shard, key_of(seed, "init", name), normal, std)
    else:
        raise RequestError(
            f"parameter {name} belongs to a {type(module).__name__}, which has no rule of "
            "initialisation. Load weights (model.weights=load) or use a model of another family."
        )


def fill_part(name: str, part: LocalShard, *, seed: int, std: Callable[[str], float]) -> None:
    """Fill a part of a matrix as a random model has it."""
    _fill_drawn(part, key_of(seed, "init", name), normal, std(name))


def _fill_drawn(
    shard: LocalShard, key: int, draw: Callable[[int, Tensor], Tensor], scale: float
) -> None:
    if shard.tensor.numel() > _PIECE:
        for half in _halves(shard):
            _fill_drawn(half, key, draw, scale)
    elif shard.tensor.numel():
        shard.tensor.copy_(draw(key, shard.linear_index()) * scale)


def _halves(shard: LocalShard) -> Iterator[LocalShard]:
    sizes = list(shard.tensor.shape)
    longest = sizes.index(max(sizes))
    half = sizes[longest] // 2
    for start, size in ((0, half), (half, sizes[longest] - half)):
        offsets = list(shard.offsets)
        offsets[longest] += start
        piece = shard.tensor.narrow(longest, start, size)
        yield LocalShard(piece, tuple(offsets), shard.whole_shape)
