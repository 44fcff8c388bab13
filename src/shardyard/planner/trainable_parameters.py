"""Trained parameters of a model where a recipe freezes some of it: elements, block by block.

Frozen parameters have no gradient, no optimizer state and no master copy. Below the lowest
trained parameter there is no backward pass, and no activation is kept for one.
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardyard.config.layout import Layout
from shardyard.config.schema.recipe import Lora, Model
from shardyard.families.family import Family, ModuleSpec
from shardyard.families.lora import targets_of, trained_modules
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import is_frozen


class Elements(NamedTuple):
    """Trained parameters of a block, or of an end of the model, by who holds them."""

    whole: int
    """Every rank of tp holds them."""
    split: int
    """tp splits them."""
    experts: int
    """ep deals them out, and tp splits them."""

    def on_rank(self, layout: Layout) -> float:
        """Before the data axes split them."""
        return self.whole + (self.split + self.experts / layout.ep) / layout.tp


class AdapterSize(NamedTuple):
    """Adapter of a matrix of a block (LoRA); tp splits half of each of its products."""

    inputs: int
    outputs: int


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """Adapters that are trained next to frozen blocks."""

    rank: int
    has_dropout: bool
    blocks: tuple[tuple[AdapterSize, ...], ...]
    at_end: float
    """Share of the blocks whose last matrix has one."""

    def average(self, of: Callable[[AdapterSize], float]) -> float:
        """Return the mean over the blocks of a sum over all adapters of a block."""
        return sum(of(each) for block in self.blocks for each in block) / len(self.blocks)


@dataclass(frozen=True, kw_only=True)
class TrainableElements:
    """Trained elements of a model, a part of whose parameters is frozen."""

    blocks: tuple[Elements, ...]
    table: Elements
    """The table of tokens."""
    before: Elements
    """Other parameters before the blocks."""
    norm: Elements
    head: Elements
    """0 where it is the table."""
    after: Elements
    """Other parameters after the blocks: of a pooler, and a head for pairs."""
    is_tied: bool
    products: tuple[float, ...]
    """Share of each block's matrix products whose matrix is trained, by elements."""
    gathers: tuple[int, ...]
    """Inputs of each block that tp gathers again, for the gradients of matrices."""
    adapters: Adapters | None = None
    """Adapters, where of the blocks only they are trained. These add to the model's parameters."""

    @property
    def added(self) -> int:
        """Count of those ``parameters`` that the model's shape does not include."""
        return 0 if self.adapters is None else sum(sum(each) for each in self.blocks)

    @property
    def parameters(self) -> int:
        """All that is trained."""
        ends = (self.table, self.before, self.norm, self.head, self.after)
        return sum(sum(each) for each in (*self.blocks, *ends))

    @property
    def head_is_trained(self) -> bool:
        """Whether the head has a gradient, by its own name or as the table."""
        return any(self.head) or (self.is_tied and any(self.table))

    @property
    def lowest(self) -> int:
        """The first block with a backward pass; the number of blocks: none has one."""
        # What comes before the blocks gets its gradient through all of them.
        if any(self.table) or any(self.before):
            return 0
        return next((n for n, each in enumerate(self.blocks) if any(each)), len(self.blocks))

    @property
    def passes_head(self) -> bool:
        """Whether anything beneath the head needs a gradient."""
        return self.lowest < len(self.blocks) or any(self.norm) or any(self.after)


class BackwardShares(NamedTuple):
    """Shares of some blocks' backward passes that are computed, against a model that trains all."""

    inputs: float = 1.0
    """Blocks that pass a gradient on."""
    matrices: float = 1.0
    """Products that make the gradient of a matrix."""
    head_input: float = 1.0
    head_matrix: float = 1.0


def backward_shares(trained: TrainableElements | None, blocks: Iterable[int]) -> BackwardShares:
    """On average of these blocks, by number."""
    if trained is None:
        return BackwardShares()
    numbers = list(blocks)
    return BackwardShares(
        inputs=sum(number >= trained.lowest for number in numbers) / len(numbers),
        matrices=sum(trained.products[number] for number in numbers) / len(numbers),
        head_input=float(trained.passes_head),
        head_matrix=float(trained.head_is_trained),
    )


def trained_of(shape: ModelShape, model: Model) -> TrainableElements | None:
    """Return what ``model.lora`` or ``model.frozen`` leave to train. None: all of the model."""
    if model.lora.rank is not None:
        return _adapters(shape, model.lora, model.lora.rank)
    return trainable_after_freezing(shape, model.frozen)


def trainable_after_freezing(shape: ModelShape, frozen: Sequence[str]) -> TrainableElements | None:
    """Return what ``model.frozen`` leaves to train. None: all of the model."""
    if not frozen:
        return None
    family = shape.family
    is_tied = shape.tie_word_embeddings
    prefixes = [f"{family.blocks}.{block}." for block in range(shape.num_hidden_layers)]
    names = (f"{family.embedding.module}.weight", f"{family.head.module}.weight")
    # Tied, embedding and head are one parameter: either name freezes both.
    table_is_frozen = is_tied and any(is_frozen(name, frozen) for name in names)
    nothing = Elements(0, 0, 0)
    others = [row for row in family.before if row is not family.embedding]
    return TrainableElements(
        blocks=tuple(_elements(shape, family.block, prefix, frozen) for prefix in prefixes),
        table=nothing if table_is_frozen else _elements(shape, [family.embedding], "", frozen),
        before=_elements(shape, others, "", frozen),
        norm=_elements(shape, [family.norm], "", frozen),
        head=nothing if is_tied else _elements(shape, [family.head], "", frozen),
        after=_elements(shape, _others_after(family), "", frozen),
        is_tied=is_tied,
        products=tuple(
            _active_elements(shape, prefix, frozen) / _active_elements(shape, prefix, ())
            for prefix in prefixes
        ),
        gathers=tuple(_gathers(shape, prefix, frozen) for prefix in prefixes),
    )


def _adapters(shape: ModelShape, lora: Lora, rank: int) -> TrainableElements:
    blocks, sizes, at_end = [], [], 0
    for targets in targets_of(shape, lora.targets).values():
        at_end += any(each.row.module == shape.family.rowwise[-1] for each in targets)
        # tp splits one matrix of an adapter as its target is split, and keeps the other whole.
        halves = [target.elements(shape, rank) for target in targets]
        blocks.append(Elements(sum(a for a, _ in halves), sum(b for _, b in halves), 0))
        sizes.append(
            tuple(AdapterSize(each.inputs(shape), each.row.rows(shape)) for each in targets)
        )
    family, saved = shape.family, trained_modules(shape, lora.modules_to_save)
    return TrainableElements(
        blocks=tuple(blocks),
        table=_saved_elements(shape, [family.embedding], saved),
        before=Elements(0, 0, 0),
        norm=_saved_elements(shape, [family.norm], saved),
        head=_saved_elements(shape, [family.head], saved),
        after=_saved_elements(shape, _others_after(family), saved),
        is_tied=shape.tie_word_embeddings,
        products=(0.0,) * shape.num_hidden_layers,
        # A frozen base has no gradients of matrices, so tp gathers none of its inputs again.
        gathers=(0,) * shape.num_hidden_layers,
        adapters=Adapters(
            rank=rank,
            has_dropout=lora.dropout > 0,
            blocks=tuple(sizes),
            at_end=at_end / len(blocks),
        ),
    )


def _others_after(family: Family) -> list[ModuleSpec]:
    """Return the rows after the blocks that are neither the norm nor the head."""
    return [row for row in family.after if row not in (family.norm, family.head)]


def _saved_elements(
    shape: ModelShape, rows: Sequence[ModuleSpec], saved: Container[str]
) -> Elements:
    """Return the parameters of modules outside of the blocks that adapters leave trained."""
    left = [name for row in rows for name, *_ in row.parameters(shape) if name not in saved]
    return _elements(shape, rows, "", left)


def _elements(
    shape: ModelShape, rows: Iterable[ModuleSpec], prefix: str, frozen: Sequence[str]
) -> Elements:
    whole = split = experts = 0
    for row in rows:
        for name, elements, is_split in row.parameters(shape):
            if is_frozen(f"{prefix}{name}", frozen):
                continue
            if row.per_expert:
                experts += shape.num_experts * elements
            elif is_split:
                split += elements
            else:
                whole += elements
    return Elements(whole, split, experts)


def _active_elements(shape: ModelShape, prefix: str, frozen: Sequence[str]) -> int:
    return sum(
        # Work, not size: a token visits few of the experts.
        elements * (shape.num_experts_per_tok if row.per_expert else 1)
        for row in shape.family.block
        if row.columns is not None
        for name, elements, _ in row.parameters(shape)
        if not is_frozen(f"{prefix}{name}", frozen)
    )


def _gathers(shape: ModelShape, prefix: str, frozen: Sequence[str]) -> int:
    family = shape.family
    return sum(
        any(
            not is_frozen(f"{prefix}{matrix}.weight", frozen)
            for matrix in family.colwise
            if f"{matrix}.".startswith(f"{module}.")
        )
        for module in family.gathered
    )
