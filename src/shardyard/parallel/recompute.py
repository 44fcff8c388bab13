"""Activation recompute: keep less in the forward pass, compute it again in the backward pass.

The forward method of a module is replaced, not the module: wrapping it would change the names of
its parameters, and with them checkpoints.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardyard import torch_private
from shardyard.errors import RequestError
from shardyard.models import moe
from shardyard.models.random import SampleKeys
from shardyard.parallel import tensor
from shardyard.parallel.offload import ActivationOffload

_SAVED_OPERATORS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.convolution.default,
    *torch_private.ops_saved_by_selective_recompute(),
    *moe.SAVED_OPERATORS,
    *tensor.SAVED_OPERATORS,
}
"""Operators whose results ``selective`` keeps because they are costly.

Norms, activations and casts are recomputed.
"""


def apply_recompute(
    blocks: dict[str, nn.Module],
    recompute: str | int | tuple[str, ...],
    *,
    keys: SampleKeys | None,
    offload: ActivationOffload | None = None,
) -> list[str]:
    """Turn recompute on for the blocks, or the parts of them, that the setting names.

    Args:
        blocks: The transformer blocks by full name, in order.
        recompute: none, full, selective, n for every n-th block, or names of modules in a block.
        keys: What dropout asks; in a pipeline later samples have passed when a block is redone.
            None: dropout is torch's own, and its generator is set back.
        offload: Where ``selective`` keeps results; None: on the device.

    Returns:
        Full names of the modules whose activations are recomputed.

    Raises:
        RequestError: No block has a module of a given name.
    """
    chosen = _chosen(blocks, recompute)
    contexts = partial(selective_contexts, offload) if recompute == "selective" else None
    for module in chosen.values():
        _recompute_in_backward(module, contexts, keys)
    return list(chosen)


def _chosen(
    blocks: dict[str, nn.Module], recompute: str | int | tuple[str, ...]
) -> dict[str, nn.Module]:
    match recompute:
        case "none":
            return {}
        case "full" | "selective":
            return blocks
        case int(every):
            return dict(list(blocks.items())[::every])
        case tuple(names):
            return _named(blocks, names)
        case _:
            raise AssertionError(f"memory.recompute={recompute!r} has no meaning here")


def _named(blocks: dict[str, nn.Module], names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Modules of blocks by full name.

    Raises:
        RequestError: No block has a module of a given name.
    """
    chosen: dict[str, nn.Module] = {}
    for name in names:
        found = {
            f"{block_name}.{name}": part
            for block_name, block in blocks.items()
            if (part := _part(block, name)) is not None
        }
        if not found:
            first = next(iter(blocks.values()))
            raise RequestError(
                f"memory.recompute names the module {name!r}, which no block has. Name some of: "
                f"{', '.join(_part_names(first))}."
            )
        chosen.update(found)
    return chosen


def _part(block: nn.Module, name: str) -> nn.Module | None:
    try:
        return block.get_submodule(name)
    except AttributeError:
        return None


def _part_names(block: nn.Module) -> Iterable[str]:
    return [name for name, _ in block.named_modules() if name]


def _recompute_in_backward(
    module: nn.Module, contexts: Callable[[], Any] | None, keys: SampleKeys | None
) -> None:
    # counter-based dropout has no generator state to keep and restore
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": keys is None}
    if contexts is not None:
        options |= {"context_fn": contexts, **torch_private.HOOKS_BYPASS_SAVED_RESULTS}
    forward = module.forward
    if keys is None:
        module.forward = partial(checkpoint, forward, **options)
        return

    def with_samples(
        samples_B: Tensor | None, lengths_B: Tensor | None, *args: Any, **kwargs: Any
    ) -> Any:
        later = keys.samples_B, keys.lengths_B
        keys.samples_B, keys.lengths_B = samples_B, lengths_B
        try:
            return forward(*args, **kwargs)
        finally:
            keys.samples_B, keys.lengths_B = later

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            # one graph has both passes: no other sample comes between, and a compiler refuses to
            # change what lies outside of the region, compiling nothing at all
            return checkpoint(forward, *args, **options, **kwargs)
        return checkpoint(with_samples, keys.samples_B, keys.lengths_B, *args, **options, **kwargs)

    module.forward = checkpointed


def selective_contexts(offload: ActivationOffload | None = None) -> Any:
    """For torch's ``checkpoint``: costly results are kept, the others made again."""
    contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    if offload is not None:  # autograd does not see these results, so its hooks would not
        torch_private.keep_results(contexts, offload.pack, offload.unpack)
    return contexts


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    if operator in _SAVED_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
