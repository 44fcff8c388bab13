"""Modules whose matrices are apart, in place of transformers' own that fuse or transpose them.

A rank of tp has a share of the queries, of the keys and of the values, or of the gate and of what
it opens; rows of the fused matrix lie in another order. In files they stay fused (``hf.py``).

Shape suffixes: B = samples, H = heads, L = tokens, D = width of the model, E = head width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from shardyard.errors import RequestError
from shardyard.families.family import ModuleSpec
from shardyard.families.file_tensors import pieces_in_block
from shardyard.families.shape import ModelShape
from shardyard.models.attention import Attention, attention_forward
from shardyard.models.hf import piece_in
from shardyard.models.local_shard import parameter_of
from shardyard.models.submodules import blocks_of

Make = Callable[[str], nn.Linear]
"""From the last step of a matrix' name to a module of its size."""


class SplitAttention(nn.Module):
    """Attention of transformers' families with a matrix each for queries, keys and values."""

    is_causal = True

    def __init__(self, make: Make, names: Sequence[str], shape: ModelShape) -> None:
        """Take the names of queries, keys, values and output."""
        super().__init__()
        _add_modules(self, make, names)
        *self._inputs, self._output = names
        self._head_width = shape.head_width
        self._window = shape.sliding_window

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Attention | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend as transformers' blocks call it; each rank of tp has a share of the heads."""
        q_BHLE, k_BHLE, v_BHLE = (
            getattr(self, name)(hidden_states).unflatten(-1, (-1, self._head_width)).transpose(1, 2)
            for name in self._inputs
        )
        if position_embeddings is not None:
            q_BHLE, k_BHLE = (_rotated(x, *position_embeddings) for x in (q_BHLE, k_BHLE))
        out_BLHE, _none = attention_forward(
            self, q_BHLE, k_BHLE, v_BHLE, attention_mask,
            scaling=self._head_width**-0.5, sliding_window=self._window,
        )  # fmt: skip
        out_BLD: Tensor = getattr(self, self._output)(out_BLHE.flatten(2))
        return out_BLD, None


class SplitGatedMLP(nn.Module):
    """An MLP with a matrix each for the gate and what it opens."""

    def __init__(self, make: Make, names: Sequence[str], shape: ModelShape) -> None:
        """Take the names of the gate, what it opens, and the output."""
        super().__init__()
        _add_modules(self, make, names)
        self._names = names
        self.act_fn = _activation(shape)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        gate, up, down = (getattr(self, name) for name in self._names)
        out_BLD: Tensor = down(self.act_fn(gate(hidden_states)) * up(hidden_states))
        return out_BLD


class PlainMLP(nn.Module):
    """An MLP without a gate, of plain matrices."""

    def __init__(self, make: Make, names: Sequence[str], shape: ModelShape) -> None:
        """Take the names of the first matrix and the second."""
        super().__init__()
        _add_modules(self, make, names)
        self._names = names
        self.act_fn = _activation(shape)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        up, down = (getattr(self, name) for name in self._names)
        out_BLD: Tensor = down(self.act_fn(up(hidden_states)))
        return out_BLD


_KINDS: Mapping[str, Callable[[Make, Sequence[str], ModelShape], nn.Module]] = {
    "attention": SplitAttention,
    "gated_mlp": SplitGatedMLP,
    "mlp": PlainMLP,
}
"""Words of ``Family.unfused``."""


def split_fused(model: PreTrainedModel, shape: ModelShape) -> None:
    """Put our modules in the place of those that fuse matrices, with the same weights.

    Raises:
        RequestError: Somebody has put something of another kind into them.
    """
    family = shape.family
    if not family.unfused:
        return
    rows = {row.module: row for row in family.block}
    for name, block in blocks_of(model, family).items():
        theirs = dict(block.named_parameters())
        for module, kind in family.unfused.items():
            _check_unmodified(block.get_submodule(module), f"{name}.{module}")
            with torch.device("meta"):
                names = [name.rpartition(".")[2] for name in rows if name.startswith(f"{module}.")]
                ours = _KINDS[kind](_maker(rows, module, shape), names, shape)
            setattr(block, module, ours.train(block.training))
        shapes = {own: param.shape for own, param in block.named_parameters()}
        replaced = tuple(f"{module}." for module in family.unfused)
        for in_files, pieces in pieces_in_block(shapes, family).items():
            for piece in pieces:
                if piece.parameter.startswith(replaced):
                    _set(block, piece.parameter, piece_in(theirs[in_files], piece))


def plain_embedding(model: PreTrainedModel, shape: ModelShape) -> None:
    """Replace a table that multiplies its rows by a plain one.

    ``forward.py`` multiplies instead: only the rows of a share of the table are looked up.
    """
    family = shape.family
    theirs = model.get_submodule(family.embedding.module)
    _check_unmodified(theirs, family.embedding.module)
    assert isinstance(theirs, nn.Embedding)
    with torch.device("meta"):
        rows, width = theirs.weight.shape
        ours = nn.Embedding(rows, width, padding_idx=theirs.padding_idx)
    ours.weight = theirs.weight  # which may be the head's too
    model.set_submodule(family.embedding.module, ours.train(theirs.training))


def _add_modules(parent: nn.Module, make: Make, names: Sequence[str]) -> None:
    for name in names:
        parent.add_module(name, make(name))


def _activation(shape: ModelShape) -> nn.Module:
    activation: nn.Module = ACT2FN[shape.hidden_act or shape.family.config_json.activation]
    return activation


def _maker(rows: Mapping[str, ModuleSpec], module: str, shape: ModelShape) -> Make:
    def make(name: str) -> nn.Linear:
        row = rows[f"{module}.{name}"]
        assert row.columns is not None, "a matrix"
        has_bias = row.bias is not None and row.bias(shape)
        return nn.Linear(row.columns(shape), row.rows(shape), bias=has_bias)

    return make


def _set(block: nn.Module, name: str, part: Tensor) -> None:
    module, _, parameter = name.rpartition(".")
    own = part.detach().clone(memory_format=torch.contiguous_format)  # the whole can then be freed
    setattr(block.get_submodule(module), parameter, parameter_of(own, part))


def _check_unmodified(original: nn.Module, name: str) -> None:
    """Reject modules that a user has put into transformers' module: they would be lost with it."""
    for path, module in original.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(("transformers.", "torch.nn.modules")):
            raise RequestError(
                f"there is a {kind.__name__} at {name}{'.' * bool(path)}{path}, which transformers "
                "did not put there. Fused matrices are taken apart so that they can be split, and "
                "what a wrapper (LoRA, quantization) adds would be lost. Merge it into the weights "
                "first, or put it on other modules."
            )


def _rotated(x_BHLE: Tensor, cos_BLe: Tensor, sin_BLe: Tensor) -> Tensor:
    """Rotary positions on the first elements of each head: as many as there are angles."""
    width = cos_BLe.shape[-1]
    turned, rest = x_BHLE[..., :width], x_BHLE[..., width:]
    first, second = turned.chunk(2, dim=-1)
    across = torch.cat((-second, first), dim=-1)
    turned = turned * cos_BLe[:, None] + across * sin_BLe[:, None]
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
