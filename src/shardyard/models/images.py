"""Networks that classify images, as transformers defines them: built, filled, made to drop.

Every rank holds the whole network while it is built, with the same weights: each element of a
parameter is a function of (seed, name, index), or comes from the folder.
"""

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification

from shardyard.errors import RequestError
from shardyard.families.images.network import ImageKind, ImageNetwork
from shardyard.families.images.registry import KINDS
from shardyard.models.batch_norm import KINDS as BATCH_NORMS
from shardyard.models.folder_report import loading_errors
from shardyard.models.random import (
    SampleKeys,
    dropout_key,
    keep_mask,
    key_of,
    normal,
    random_bits,
    uniform,
)

_HEAD = "classifier"
_TRUNCATED_AT = 2.0
"""Standard deviations, as in the code of the Vision Transformer's authors."""

Draw = Callable[[int, Tensor], Tensor]


def network_config(network: ImageNetwork) -> Any:
    """transformers' config of a network."""
    content = {key: value for key, value in network.config.items() if key != "model_type"}
    labels = {number: f"LABEL_{number}" for number in range(network.num_classes)}
    return AutoConfig.for_model(
        network.model_type,
        **content,
        id2label=labels,
        label2id={label: number for number, label in labels.items()},
    )


def build_network(network: ImageNetwork) -> nn.Module:
    """A network in fp32; on the meta device where that is set."""
    config = network_config(network)
    built: nn.Module = AutoModelForImageClassification.from_config(config, dtype=torch.float32)
    return built


def blocks_of_network(model: nn.Module, network: ImageNetwork) -> dict[str, nn.Module]:
    """Return the blocks that are recomputed, compiled and sharded one by one, by full name."""
    kinds = KINDS[network.model_type].block_classes
    return {name: each for name, each in model.named_modules() if type(each).__name__ in kinds}


# --- weights --------------------------------------------------------------------------------------


@torch.no_grad()
def fill_network(
    model: nn.Module, network: ImageNetwork, *, seed: int, zero_last_norm: bool = False
) -> None:
    """Draw all weights as the authors of each network do.

    Args:
        zero_last_norm: Whether each residual branch begins at zero (arXiv:1706.02677, section 5.1).
    """
    _fill(model, network, seed=seed, only=[name for name, _ in model.named_parameters()])
    last = KINDS[network.model_type].last_norm
    if zero_last_norm and last is not None:
        for block in blocks_of_network(model, network).values():
            nn.init.zeros_(_part(block, last).weight)  # type: ignore[arg-type]


@torch.no_grad()
def load_network(
    model: nn.Module,
    network: ImageNetwork,
    folder: Path,
    *,
    seed: int,
    rows: Sequence[int] | None = None,
) -> None:
    """Take the weights and running statistics of a folder, and its head where the classes match.

    Args:
        rows: Row of the folder's head for each output (``class_names.head_order``); None: the head
            begins at random.

    Raises:
        RequestError: The folder holds no weights in safetensors, or of another network.
    """
    try:
        theirs, told = AutoModelForImageClassification.from_pretrained(
            folder, config=network_config(network), dtype=torch.float32, use_safetensors=True,
            local_files_only=True, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise RequestError(
            f"{folder}: its weights cannot be loaded ({why}). Give a folder with model.safetensors "
            "next to its config.json, or model.weights=random."
        ) from error
    lacking = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    wrong = loading_errors(folder, told, head=f"{_HEAD}.")
    if wrong:
        raise RequestError("\n".join(wrong))
    state = theirs.state_dict()
    heads = [name for name in state if name.startswith(f"{_HEAD}.")]
    # Without a mapping of classes, equal sizes do not mean equal classes: drop the folder's head.
    if rows is None:
        lacking |= set(heads)
    elif not lacking:
        state |= {name: state[name][list(rows)] for name in heads}
    model.load_state_dict(state)
    _fill(model, network, seed=seed, only=lacking)


def _fill(model: nn.Module, network: ImageNetwork, *, seed: int, only: Collection[str]) -> None:
    wanted = set(only)
    for place, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            full = f"{place}.{name}" if place else name
            if full not in wanted:
                continue
            rule = _rule(KINDS[network.model_type], module, name)
            if isinstance(rule, float):
                param.fill_(rule)
                continue
            draw, scale = rule
            index = torch.arange(param.numel()).view(param.shape)
            param.copy_(draw(key_of(seed, "init", full), index) * scale)


def _rule(kind: ImageKind, module: nn.Module, name: str) -> float | tuple[Draw, float]:
    """A value, or a draw and its scale."""
    if isinstance(module, (*BATCH_NORMS, nn.LayerNorm)):
        return 1.0 if name == "weight" else 0.0
    if kind.weights == "truncated_normal":  # as torchvision and transformers have it
        is_drawn = name in ("weight", "cls_token", "position_embeddings")
        return (_truncated_normal, 0.02) if is_drawn else 0.0
    if isinstance(module, nn.Conv2d):
        if name != "weight":
            return 0.0
        # by what goes out, which keeps gradients' size
        out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        return normal, math.sqrt(2.0 / out)
    assert isinstance(module, nn.Linear), type(module).__name__
    if kind.is_head_by_inputs:
        return uniform, 1.0 / math.sqrt(module.in_features)
    return (uniform, 1.0 / math.sqrt(module.out_features)) if name == "weight" else 0.0


def _truncated_normal(key: int, counter: Tensor) -> Tensor:
    within = math.erf(_TRUNCATED_AT / math.sqrt(2.0))
    return torch.erfinv(uniform(key, counter) * within) * math.sqrt(2.0)


# --- dropout and stochastic depth -----------------------------------------------------------------


class _Drop:
    """A mask that is a function of (seed, position of the sample, place, element)."""

    def __init__(self, module_name: str, *, drop: float, seed: int, keys: SampleKeys) -> None:
        self._drop = drop
        self._dropout_key = dropout_key(seed, module_name)
        self._keys = keys

    def _masked(self, x: Tensor, *, elements: int) -> Tensor:
        """Drop by each sample's first ``elements``: one for all of it, or one for each element."""
        samples_B = self._keys.samples_B
        assert samples_B is not None
        key_B1 = random_bits(self._dropout_key, samples_B.to(x.device))[:, None]
        kept = keep_mask(key_B1, torch.arange(elements, device=x.device), drop=self._drop)
        shape = (len(x), *([1] * (x.dim() - 1))) if elements == 1 else x.shape
        return x * kept.view(shape) * (1.0 / (1.0 - self._drop))


class _DropBranch(_Drop):
    """Stochastic depth (arXiv:1603.09382): a forward hook that drops a branch of whole samples."""

    def __call__(self, module: nn.Module, _args: Any, output: Any) -> Any:
        if not module.training:
            return None
        if isinstance(output, tuple):
            return (self._masked(output[0], elements=1), *output[1:])
        return self._masked(output, elements=1)


class _DropFeatures(_Drop):
    """A hook before the head."""

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
        if not module.training:
            return None
        features = args[0]
        return (self._masked(features, elements=features[0].numel()), *args[1:])


def add_image_dropout(
    model: nn.Module,
    network: ImageNetwork,
    *,
    dropout: float,
    drop_path: float,
    seed: int,
    keys: SampleKeys,
) -> None:
    """Put our draws in the place of transformers' own. Call before sharding.

    Args:
        drop_path: The l-th of L blocks, from 0, drops its branches of drop_path x l / L samples.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if dropout:
        head = model.get_submodule(_HEAD)
        head.register_forward_pre_hook(_DropFeatures(_HEAD, drop=dropout, seed=seed, keys=keys))
    blocks = blocks_of_network(model, network)
    for number, (name, block) in enumerate(blocks.items()):
        drop = drop_path * number / len(blocks)
        if not drop:
            continue
        for branch in KINDS[network.model_type].branches:
            hook = _DropBranch(f"{name}.{branch}", drop=drop, seed=seed, keys=keys)
            _part(block, branch).register_forward_hook(hook)


def set_batch_norm_momentum(model: nn.Module, momentum: float) -> None:
    """Set ``momentum`` of all batch normalisations: the share of a step, as torch counts it."""
    for module in model.modules():
        if isinstance(module, BATCH_NORMS):
            module.momentum = momentum


def _part(module: nn.Module, path: str) -> nn.Module:
    """A module by its path in another; -1 is the last of a list."""
    for step in path.split("."):
        module = list(module.children())[-1] if step == "-1" else module.get_submodule(step)
    return module
