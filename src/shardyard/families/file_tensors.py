"""The tensors of Hugging Face's files: their names and shapes, and our parameters in them.

Works only on names and shapes, without torch. So a folder can be compared with the model that
its config.json describes before the run starts.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from shardyard.families.family import Family, ModuleSpec
from shardyard.families.shape import ModelShape


@dataclass(frozen=True)
class ParameterPiece:
    """A parameter, or one expert of it, in a tensor of Hugging Face's files."""

    parameter: str
    shape: tuple[int, ...]
    """Ours, of one expert where it is one."""
    expert: int | None = None
    offset: int = 0
    """Rows of the tensor that come before, being of other parameters."""
    is_transposed: bool = False
    """The tensor has a column where we have a row."""


def file_tensors(
    shapes: Mapping[str, Sequence[int]], family: Family
) -> dict[str, tuple[ParameterPiece, ...]]:
    """Names in Hugging Face's files, and what of our parameters each tensor is made of.

    Args:
        shapes: Of whole parameters, by our names.
    """
    tensors: dict[str, tuple[ParameterPiece, ...]] = {}
    begin, ends = f"{family.blocks}.", (*family.before, *family.after)
    renamed = {f"{row.module}.{row.parameter}": row.in_files for row in ends if row.in_files}
    for block, group in groupby(shapes, key=lambda name: _block_of(name, begin)):
        names = list(group)
        if block is None:
            for name in names:
                tensors[renamed.get(name, name)] = (ParameterPiece(name, tuple(shapes[name])),)
            continue
        prefix = f"{begin}{block}."
        inside = {name.removeprefix(prefix): shapes[name] for name in names}
        for in_files, pieces in pieces_in_block(inside, family).items():
            tensors[f"{prefix}{in_files}"] = tuple(
                replace(piece, parameter=f"{prefix}{piece.parameter}") for piece in pieces
            )
    return tensors


def pieces_in_block(
    shapes: Mapping[str, Sequence[int]], family: Family
) -> dict[str, tuple[ParameterPiece, ...]]:
    """The same in one block, by names from its top."""
    rows = {f"{row.module}.{row.parameter}": row for row in family.block}
    tensors: dict[str, list[ParameterPiece]] = {}
    for name, sizes in shapes.items():
        module, _, kind = name.rpartition(".")
        row = rows.get(name) or rows.get(f"{module}.weight")
        shape = tuple(sizes)
        if row is None:
            tensors[name] = [ParameterPiece(name, shape)]
        elif row.per_expert and row.in_files is not None:
            for expert in range(shape[0]):
                piece = ParameterPiece(name, shape[1:], expert)
                tensors[row.in_files.format(expert)] = [piece]
        else:
            in_files = name if row.fused is None else f"{row.fused.module}.{kind}"
            is_transposed = row.is_transposed and kind == row.parameter
            piece = ParameterPiece(name, shape, is_transposed=is_transposed)
            tensors.setdefault(row.in_files or in_files, []).append(piece)
    return {in_files: _stacked(pieces, rows) for in_files, pieces in tensors.items()}


def _stacked(
    pieces: list[ParameterPiece], rows: Mapping[str, ModuleSpec]
) -> tuple[ParameterPiece, ...]:
    """Pieces in the order in which their tensor has them."""
    if len(pieces) == 1:
        return tuple(pieces)

    def part_index(piece: ParameterPiece) -> int:
        module = piece.parameter.rpartition(".")[0]
        fused = rows[f"{module}.weight"].fused
        assert fused is not None, "several in one tensor"
        return fused.parts.index(module.rpartition(".")[2])

    found, offset = [], 0
    for piece in sorted(pieces, key=part_index):
        found.append(replace(piece, offset=offset))
        offset += piece.shape[0]
    return tuple(found)


def whole_shape(pieces: Sequence[ParameterPiece]) -> tuple[int, ...]:
    """Return the shape of the tensor in the files."""
    ours = (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])
    return ours[::-1] if pieces[0].is_transposed else ours


def _block_of(name: str, begin: str) -> str | None:
    return name.removeprefix(begin).partition(".")[0] if name.startswith(begin) else None


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name of each parameter of a model -> its shape; a tied head is its table of tokens."""
    family = shape.family
    ends, block = (*family.before, *family.after), family.block
    found = dict(family.uncounted(shape))
    found |= dict(_shapes_of(ends, shape))
    in_block = dict(_shapes_of(block, shape))
    for number in range(shape.num_hidden_layers):
        found |= {f"{family.blocks}.{number}.{name}": sizes for name, sizes in in_block.items()}
    if shape.tie_word_embeddings:
        found.pop(f"{family.head.module}.{family.head.parameter}", None)
    return found


def _shapes_of(
    rows: Iterable[ModuleSpec], shape: ModelShape
) -> Iterable[tuple[str, tuple[int, ...]]]:
    for row in rows:
        if not row.is_built or not row.elements(shape):
            continue
        sides = (row.rows(shape),) if row.columns is None else (row.rows(shape), row.columns(shape))
        expert = (shape.num_experts,) if row.per_expert else ()
        yield f"{row.module}.{row.parameter}", (*expert, *sides)
        if row.bias is not None and row.bias(shape):
            yield f"{row.module}.bias", (row.rows(shape),)


def head_of(family: Family) -> str:
    """Name of the head's matrix in files."""
    return family.head.in_files or f"{family.head.module}.{family.head.parameter}"


def table_of(family: Family) -> str:
    """Name in files of the table of tokens, which a tied head is."""
    return family.embedding.in_files or f"{family.embedding.module}.{family.embedding.parameter}"


def stored_names(stored: Iterable[str], required: Container[str], family: Family) -> dict[str, str]:
    """Name of each wanted tensor -> its name in the files, as transformers finds it.

    Files of other versions have other names, files of a model without its head lack a prefix, and
    of a tied pair either name will do.
    """
    stored_as: dict[str, str] = {}
    for name in stored:
        now = name_now(name, required, family)
        if now == name or now not in stored_as:
            stored_as[now] = name
    for target, source in {head_of(family): table_of(family), **family.tied_names}.items():
        if (
            source in required
            and source not in stored_as
            and target not in required
            and target in stored_as
        ):
            stored_as[source] = stored_as[target]
    return {name: theirs for name, theirs in stored_as.items() if name in required}


def name_now(name: str, required: Container[str], family: Family) -> str:
    """The name that a tensor in a file of another version, or without its head, has now."""
    for older, now in family.other_names.items():
        if name.endswith(older):
            name = name.removesuffix(older) + now
    if name in required:
        return name
    prefix = f"{family.blocks.partition('.')[0]}."
    inner = name.removeprefix(prefix)
    if inner != name and inner in required:
        return inner
    return f"{prefix}{name}" if f"{prefix}{name}" in required else name
