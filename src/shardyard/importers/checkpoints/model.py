"""Which tensors of a checkpoint are the model, under the names of Hugging Face's files."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardyard.errors import CheckpointError, RequestError
from shardyard.families.registry import family_of
from shardyard.importers.checkpoints.checkpoint import Checkpoint, first_words
from shardyard.importers.checkpoints.like import Like
from shardyard.importers.checkpoints.stored import FLOATS, Stored, blocks, check_cover

WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module")
"""Steps of names that wrappers add. Source: FSDP1, activation checkpointing and torch.compile of
torch 2.13; DDP's and DeepSpeed's ``module`` stands before all others and is a prefix."""

_BUFFERS = (".inv_freq", ".position_ids", ".masked_bias", ".attn.bias", ".attention.bias")
"""What models make anew, and older checkpoints hold."""

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Model:
    """The weights to write, and what was left."""

    tensors: Mapping[str, Stored]
    left: Mapping[str, int]
    """What else the checkpoint holds, by the first step of its names -> tensors."""


def find_model(checkpoint: Checkpoint, like: Like, *, prefix: str | None = None) -> Model:
    """Pick the model's tensors, and hold them to what the folder says of it.

    Args:
        prefix: What stands before the model's names; None: it is found.

    Raises:
        CheckpointError: Tensors are missing, too many, of other shapes, or damaged.
        RequestError: It is not clear which tensors are the model.
    """
    named = _without_wrappers(checkpoint)
    before = _prefix(named, like, checkpoint) if prefix is None else prefix
    under = {
        name.removeprefix(before): tensor
        for name, tensor in named.items()
        if name.startswith(before)
    }
    firsts = _firsts(like)
    taken = {
        name: tensor
        for name, tensor in under.items()
        if name.partition(".")[0] in firsts and not name.endswith(_BUFFERS)
    }
    if not taken:
        raise RequestError(f"--prefix {before!r}: no tensor of the model has it. {_names(named)}")
    taken = {name: check_cover(name, tensor) for name, tensor in taken.items()}
    taken = _untied(taken, like)
    _refuse_other(taken, like, checkpoint)
    used = {before + name for name in taken}
    rest = [name for name in named if name not in used and not name.startswith(before)]
    rest += [name for name in under if name not in taken and name.partition(".")[0] not in firsts]
    left = Counter(name.partition(".")[0] for name in rest)
    return Model(tensors=dict(sorted(taken.items())), left=dict(sorted(left.items())))


def _without_wrappers(checkpoint: Checkpoint) -> dict[str, Stored]:
    found: dict[str, Stored] = {}
    for name, tensor in checkpoint.tensors.items():
        plain = ".".join(step for step in name.split(".") if step not in WRAPPERS)
        if plain in found:
            raise CheckpointError(f"{checkpoint.path} holds {plain} twice, once as {name}.")
        found[plain] = tensor
    return found


def _prefix(named: Mapping[str, Stored], like: Like, checkpoint: Checkpoint) -> str:
    anchor = like.anchor
    before = sorted(
        {name.removesuffix(anchor) for name in named if f".{name}".endswith(f".{anchor}")}
    )
    if len(before) == 1:
        return before[0]
    if before:
        shown = ", ".join(repr(each) for each in before[:_SHOWN])
        raise RequestError(
            f"{checkpoint.path} holds {len(before)} models, under {shown}: give one as --prefix."
        )
    raise CheckpointError(
        f"{checkpoint.path} holds no {anchor}, with which a model like that of {like.folder} "
        f"begins. {_names(named)} --like names a folder of the same model; names of another kind "
        "are not known here."
    )


def _names(named: Mapping[str, Stored]) -> str:
    shown = ", ".join(sorted(named)[:_SHOWN])
    return f"It has {len(named)} tensors: {shown}{', ...' if len(named) > _SHOWN else ''}."


def _firsts(like: Like) -> set[str]:
    """What names of the model begin with."""
    firsts = first_words(like.known or ())
    if like.shape is not None:
        family = family_of(like.shape.model_type)
        rows = (*family.before, *family.after)
        firsts |= first_words([family.blocks, *(row.in_files or row.module for row in rows)])
    return firsts


def _untied(taken: Mapping[str, Stored], like: Like) -> dict[str, Stored]:
    """Without a head that is the table of tokens, as Hugging Face's files leave it out."""
    if like.shape is None or not like.is_tied:
        return dict(taken)
    family = family_of(like.shape.model_type)
    head, table = (f"{row.module}.{row.parameter}" for row in (family.head, family.embedding))
    if head not in taken or table not in taken:
        return dict(taken)
    if taken[head].pieces != taken[table].pieces and not _are_equal(taken[head], taken[table]):
        raise CheckpointError(
            f"{head} and {table} differ, though {like.folder} ties them (tie_word_embeddings). "
            "Give a folder whose config.json does not."
        )
    return {name: tensor for name, tensor in taken.items() if name != head}


def _are_equal(one: Stored, other: Stored) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(blocks(one, one.dtype), blocks(other, other.dtype), strict=True)
    return all(bytes(first) == bytes(second) for first, second in pairs)


def _refuse_other(taken: Mapping[str, Stored], like: Like, checkpoint: Checkpoint) -> None:
    """Raise where the tensors are not those of the model that the folder describes."""
    odd = sorted(name for name, tensor in taken.items() if tensor.dtype not in FLOATS)
    if odd:
        raise CheckpointError(
            f"{checkpoint.path}: {', '.join(odd[:_SHOWN])}: {taken[odd[0]].dtype} is no dtype of "
            "weights that are trained; quantised weights are not read."
        )
    if like.known is not None:
        shapes = {name: tensor.shape for name, tensor in taken.items()}
        wrong = sorted(
            name for name in {*shapes, *like.known} if shapes.get(name) != like.known.get(name)
        )
        if wrong:
            raise CheckpointError(
                f"{checkpoint.path} is not the model of {like.folder}: "
                f"{_differences(wrong, shapes, like.known)}. --like names a folder of this model."
            )
    elif like.shape is not None:
        count = sum(tensor.elements for tensor in taken.values())
        if count != like.shape.parameters:
            raise CheckpointError(
                f"{checkpoint.path} holds {count:,} parameters, and the model of {like.folder} has "
                f"{like.shape.parameters:,}. Give the folder of this model as --like; with weights "
                "in it, what differs is named."
            )


def _differences(
    wrong: Iterable[str],
    held: Mapping[str, tuple[int, ...]],
    known: Mapping[str, tuple[int, ...]],
) -> str:
    names = list(wrong)
    words = []
    for name in names[:_SHOWN]:
        if name not in held:
            words.append(f"{name} is missing")
        elif name not in known:
            words.append(f"{name} is not in that model")
        else:
            words.append(f"{name} is {held[name]}, there {known[name]}")
    more = len(names) - _SHOWN
    return ", ".join(words) + (f" and {more} more" if more > 0 else "")
