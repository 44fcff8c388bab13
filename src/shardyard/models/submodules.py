"""The parts of a model that its family names: blocks, table of tokens, head, ..."""

from torch import nn

from shardyard.families.family import Family, ModuleSpec


def blocks_of(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """The transformer blocks by full name, in order."""
    blocks = model.get_submodule(family.blocks)
    return {f"{family.blocks}.{name}": block for name, block in blocks.named_children()}


def part_of(model: nn.Module, name: ModuleSpec | str | None) -> nn.Module | None:
    """A module by its row or full name; None where a family or a stage does not have it."""
    name = name.module if isinstance(name, ModuleSpec) else name
    part: nn.Module | None = None if name is None else model
    for child in (name or "").split("."):
        part = getattr(part, child, None)
    return part


def is_tied(model: nn.Module, family: Family) -> bool:
    """Whether the head of a model or stage multiplies by its table of tokens."""
    embedding, head = part_of(model, family.embedding), part_of(model, family.head)
    return embedding is not None and head is not None and embedding.weight is head.weight


def dropout_modules(model: nn.Module, family: Family) -> dict[str, nn.Module]:
    """Modules whose output passes through dropout, by full name."""
    norm = family.embedding_norm or family.embedding
    first = family.embedding_end or norm.module
    embedded = part_of(model, first)
    places = {} if embedded is None else {first: embedded}
    for block_name, block in blocks_of(model, family).items():
        for name in family.dropped:
            places[f"{block_name}.{name}"] = block.get_submodule(name)
    return places
