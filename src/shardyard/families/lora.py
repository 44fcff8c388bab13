"""Matrices with an adapter (LoRA, Hu et al. 2021, arXiv:2106.09685), and its size.

``model.lora.targets`` names matrices from the top of the model, as ``model.frozen`` does, or
from the top of a block (``self_attn``). It may also name the last step of a name (``q_proj``):
in every block then. An adapter is two matrices next to the target W: A (rank x inputs) and
B (outputs x rank). The target then computes W x + scale B A x, and W itself is not trained.
"""

import difflib
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardyard.errors import Problem
from shardyard.families.family import ModuleSpec
from shardyard.families.file_tensors import parameter_shapes
from shardyard.families.shape import ModelShape
from shardyard.families.trainable import is_frozen, parameters_of

SETTING = "model.lora.targets"
A, B = "lora_A", "lora_B"
"""Names of an adapter's two matrices inside of its target, as PEFT calls them."""
LABEL_HEADS = ("classifier", "score")
"""Heads over labels that PEFT trains. Source: ``PeftModelForSequenceClassification``, 0.21."""


@dataclass(frozen=True)
class LoraTarget:
    """A matrix with an adapter."""

    module: str
    """From the top of the model."""
    row: ModuleSpec
    """Row in the family's table."""

    def elements(self, shape: ModelShape, rank: int) -> tuple[int, int]:
        """Parameters of the adapter: those that every rank of tp holds, and those that it splits.

        tp splits what meets the split side of the target: B of outputs, A of inputs.
        """
        a, b = rank * self.inputs(shape), self.row.rows(shape) * rank
        return (a, b) if self.row.split == "rows" else (b, a)

    def inputs(self, shape: ModelShape) -> int:
        """Columns of the matrix."""
        assert self.row.columns is not None, "no norm"
        return self.row.columns(shape)


def is_adapter(parameter: str) -> bool:
    """Whether a parameter is a matrix of an adapter, by its full name."""
    return parameter.endswith((f".{A}.weight", f".{B}.weight"))


def scale_of(*, rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor of an adapter's output.

    Source for the root: Kalajdzievski 2023, arXiv:2312.03732.
    """
    return alpha / (math.sqrt(rank) if rslora else rank)


def targets_of(shape: ModelShape, patterns: Sequence[str]) -> dict[int, list[LoraTarget]]:
    """Block -> its matrices with an adapter; no pattern names all that can have one.

    These are the matrices of attention and of a dense MLP; not those of experts, nor routers.
    """
    family = shape.family
    found = {}
    for block in range(shape.num_hidden_layers):
        above = f"{family.blocks}.{block}."
        found[block] = [
            LoraTarget(above + row.module, row)
            for row in _matrices(shape)
            if not patterns or _is_named(above, row.module, patterns)
        ]
    return found


def trained_modules(shape: ModelShape, patterns: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that are trained next to the adapters, by name, with their shapes.

    A head over labels always is.

    Args:
        patterns: ``model.lora.modules_to_save``: names from the top of the model, or their ends. A
            tied head is the table of tokens.
    """
    has_labels = shape.label_head is not None
    if not patterns and not has_labels:
        return {}
    family, sizes = shape.family, parameter_shapes(shape)
    rows = [
        row
        for row in _outside_blocks(shape)
        if _is_saved(row, patterns) or (has_labels and row is family.head)
    ]
    table = f"{family.embedding.module}.weight"
    found = {
        table if name not in sizes and shape.tie_word_embeddings else name
        for name in (f"{row.module}.{kind}" for row in rows for kind in ("weight", "bias"))
    }
    return {name: sizes[name] for name in sizes if name in found}


def _outside_blocks(shape: ModelShape) -> list[ModuleSpec]:
    """Return the rows outside of the blocks that can be trained next to adapters."""
    family = shape.family
    pooler = None if shape.label_head is None else family.pooler
    rows = (family.embedding, family.norm, family.head, pooler)
    return [row for row in rows if row is not None and row.is_built]


def _is_saved(row: ModuleSpec, patterns: Sequence[str]) -> bool:
    """Whether patterns name a row outside of the blocks, or a pooler, which holds one layer."""
    pooler, _, layer = row.module.rpartition(".")
    is_pooler = layer == "dense" and _is_named("", pooler, patterns)
    return is_pooler or _is_named("", row.module, patterns)


def tied_head(shape: ModelShape, trained: Container[str]) -> tuple[str, str] | None:
    """Return the names of the head and of the table that it is, if that is trained; else None."""
    head, table = (f"{row.module}.weight" for row in (shape.family.head, shape.family.embedding))
    return (head, table) if shape.tie_word_embeddings and table in trained else None


def trained_module_errors(shape: ModelShape, patterns: Sequence[str]) -> list[Problem]:
    """List patterns of ``model.lora.modules_to_save`` that name no module outside of the blocks."""
    family, rows = shape.family, _outside_blocks(shape)
    known = [row.module for row in rows]
    setting, found = "model.lora.modules_to_save", []
    if patterns and family.end is not None:
        text = f"={', '.join(patterns)}: a {shape.model_type} trains only adapters. Leave it out."
        return [Problem(setting, text)]
    for pattern in patterns:
        if shape.label_head is not None and pattern in LABEL_HEADS:
            continue  # PEFT lists both names, whichever the model has
        if not any(_is_saved(row, [pattern]) for row in rows):
            text = f"={pattern!r} names no module outside of the blocks. Name some of: "
            found.append(Problem(setting, f"{text}{', '.join(known)}."))
    return found


def lora_target_errors(shape: ModelShape, patterns: Sequence[str]) -> list[Problem]:
    """Patterns that name no matrix that can have an adapter."""
    above = f"{shape.family.blocks}.0."
    known = [row.module for row in _matrices(shape)]
    others = {
        name.removeprefix(above).rpartition(".")[0]
        for names in parameters_of(shape).values()
        for name in names
    }
    found = list(_fused_target_errors(shape, patterns))
    for pattern in patterns:
        if any(targets_of(shape, [pattern]).values()):
            continue
        if any(_is_named(above, name, [pattern]) or is_frozen(name, [pattern]) for name in others):
            text = (
                "gets no adapter: the dense matrices of blocks have them, not the table of tokens, "
                "the head, norms, routers and experts."
            )
        else:
            names = [*known, *(name.rpartition(".")[2] for name in known)]
            near = difflib.get_close_matches(pattern, names, n=1)
            text = "names no matrix that has an adapter."
            text += f" Did you mean {near[0]}?" if near else ""
        text = f"={pattern!r} {text} There are, in {above}*: {', '.join(known)}."
        found.append(Problem(SETTING, text))
    return found


def _fused_target_errors(shape: ModelShape, patterns: Sequence[str]) -> Iterable[Problem]:
    """Targets that are no matrix of their own in files: PEFT would look for a larger one."""
    targets = [each for block in targets_of(shape, patterns).values() for each in block]
    fused = list(dict.fromkeys(each.row.module for each in targets if each.row.fused is not None))
    if fused:
        plain = [row.module for row in _matrices(shape) if row.fused is None]
        text = (
            f" {'mean' if patterns else 'are left open, which means'} {', '.join(fused)}: in files "
            f"of {shape.model_type} they are parts of larger matrices, so an adapter of theirs "
            f"opens in no other library. Name some of: {', '.join(plain)}."
        )
        yield Problem(SETTING, text)


def peft_targets(shape: ModelShape, patterns: Sequence[str]) -> list[str]:
    """``target_modules`` of PEFT's adapter_config.json: it takes the ends of names, whole steps.

    The shortest that mean these matrices and no other module.
    """
    family = shape.family
    by_block = targets_of(shape, patterns)
    wanted = [target.module for targets in by_block.values() for target in targets]
    modules = {name.rpartition(".")[0] for names in parameters_of(shape).values() for name in names}
    rows = list(dict.fromkeys(t.row.module for targets in by_block.values() for t in targets))
    for names in ([row.rpartition(".")[2] for row in rows], rows):
        meant = {module for module in modules if any(_ends(module, name) for name in names)}
        if meant == set(wanted) and not family.has_experts:
            return list(dict.fromkeys(names))
    return wanted


def _matrices(shape: ModelShape) -> list[ModuleSpec]:
    return [
        row
        for row in shape.family.block
        if row.columns is not None and row.split is not None and row.is_built and not row.per_expert
    ]


def _is_named(above: str, module: str, patterns: Sequence[str]) -> bool:
    if is_frozen(above + module, patterns) or is_frozen(module, patterns):
        return True
    return any(fnmatchcase(module.rpartition(".")[2], each) for each in patterns)


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
