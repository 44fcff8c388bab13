"""A module of the user's own before it is changed: its blocks by name, and what would go wrong."""

import difflib
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardyard.errors import Problem, RequestError
from shardyard.models.batch_norm import batch_norms_in
from shardyard.parallel.collectives import gather, sum_over
from shardyard.parallel.matmul import is_plain
from shardyard.parallel.tensor import Split, compute_on_shares, make_vocab_parallel, sum_after

# A plan names the matrices of any module that tensor parallelism splits, and how it splits them.
#
# =============  =================================  ================================================
# word           module                             effect
# =============  =================================  ================================================
# columns        nn.Linear                          each rank computes a run of the outputs
# rows           nn.Linear                          each rank takes a run of the inputs; sums added
# vocabulary     nn.Embedding; nn.Linear (a head)   rows of a table; a head's outputs are gathered
# =============  =================================  ================================================
#
# Operations between columns and rows must treat each output by itself: heads, or the inner width of
# an MLP. Every rank computes everything else alike, as one process would. Each rank's loss counts
# as its part of the whole (loss / ranks). The gradients of parameters that all ranks hold are
# therefore partial sums everywhere, and ``rows`` adds up gradients as it adds up outputs.

WORDS = ("columns", "rows", "vocabulary")

_SPLIT_SIZE = {"columns": "out_features", "rows": "in_features", "vocabulary": "out_features"}
"""Word -> the size of an nn.Linear that is split."""


def read_plan(
    model: nn.Module, plan: Mapping[str, str], *, tp: int
) -> tuple[dict[str, str], list[Problem]]:
    """Return the word of each module, and all problems of the plan.

    Args:
        plan: Name of a module, or pattern of names (``layers.*.out``), -> a word.
    """
    named = {name: module for name, module in model.named_modules() if name}
    words: dict[str, str] = {}
    errors: list[Problem] = []
    for pattern, word in plan.items():
        path = f"plan[{pattern!r}]"
        matched = names_matching(pattern, named)
        if word not in WORDS:
            text = f"={word!r} is not a way to split a module. Use {', '.join(WORDS)}."
            errors.append(Problem(path, text))
        elif not matched:
            errors.append(Problem(path, f"names no module. {_nearest(pattern, named)}"))
        else:
            wrong = (_misfit(named[name], name, word, tp=tp) for name in matched)
            errors += [Problem(path, text) for text in wrong if text]
        twice = [name for name in matched if words.get(name, word) != word]
        if twice:
            text = f"={word!r}, but another pattern says {words[twice[0]]!r} of {twice[0]}."
            errors.append(Problem(path, f"{text} Use one."))
        words |= dict.fromkeys(matched, word)
    return words, errors


def names_matching(pattern: str, names: Iterable[str]) -> list[str]:
    """List the names of modules that match a pattern; ``*`` matches one step of a path."""
    parts = pattern.split(".")
    return [
        name
        for name in names
        if name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts))
    ]


def split_by_plan(model: nn.Module, mesh: DeviceMesh, words: Mapping[str, str]) -> None:
    """Split a model over the one axis of ``mesh``, in place.

    Args:
        words: Name of a module -> word, as ``read_plan`` found them to fit.
    """
    group = mesh.get_group()
    split = Split(mesh)

    def add_up(x: Tensor) -> Tensor:
        return sum_over(x, group)

    for name, word in words.items():
        module = model.get_submodule(name)
        if word == "rows":
            sum_after(split(module, Shard(1)), add_up)
        elif isinstance(module, nn.Embedding):
            make_vocab_parallel(split(module, Shard(0)), add_up)
        elif word == "vocabulary":
            _gather_after(split(module, Shard(0)), mesh)
        else:
            split(module, Shard(0))
    for module in model.modules():
        split(module, Replicate())


def _gather_after(module: nn.Module, mesh: DeviceMesh) -> None:
    assert isinstance(module, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        return gather(F.linear(x, module.weight, module.bias), x.dim() - 1, mesh.get_group())

    compute_on_shares(module, forward)


def _misfit(module: nn.Module, name: str, word: str, *, tp: int) -> str | None:
    """Why a module cannot be split so; None: it can."""
    kinds = (nn.Linear, nn.Embedding) if word == "vocabulary" else (nn.Linear,)
    own = next((kind for kind in kinds if is_plain(module, kind)), None)
    if own is None:
        wanted = " or ".join(f"nn.{kind.__name__}" for kind in kinds)
        return (
            f"={word!r}: {name} is a {type(module).__name__}. What is split must be a plain "
            f"{wanted}, as its weight is used without it. Name the matrices inside it."
        )
    size_name = "num_embeddings" if own is nn.Embedding else _SPLIT_SIZE[word]
    size = int(getattr(module, size_name))
    if size % tp:
        legal = [str(n) for n in range(1, min(size, 64) + 1) if size % n == 0]
        return (
            f"={word!r}: tp={tp} does not divide {size_name}={size} of {name}. Every rank takes "
            f"an equal part. Use a tp of {', '.join(legal)}, or pad {size_name}."
        )
    return None


def _nearest(pattern: str, named: Mapping[str, nn.Module]) -> str:
    can_be_split = [
        name for name, module in named.items() if isinstance(module, nn.Linear | nn.Embedding)
    ]
    near = difflib.get_close_matches(pattern, can_be_split, n=3, cutoff=0.3) or can_be_split[:3]
    return f"Did you mean one of: {', '.join(near)}?" if near else "It has none to split."


_FORWARD = nn.BatchNorm1d.forward


def blocks_named(
    model: nn.Module, names: Sequence[str], *, setting: str = "blocks"
) -> tuple[dict[str, nn.Module], list[Problem]]:
    """List the modules to shard one by one; a list of modules means those in it."""
    chosen: dict[str, nn.Module] = {}
    found = []
    named = {name: module for name, module in model.named_modules() if name}
    for pattern in names:
        matched = names_matching(pattern, named)
        if not matched:
            lists = [name for name, module in named.items() if isinstance(module, nn.ModuleList)]
            have = lists or [name for name in named if "." not in name]
            text = f"={pattern!r} names no module. The model has {', '.join(have[:6])}."
            found.append(Problem(setting, text))
        for name in matched:
            if isinstance(named[name], nn.ModuleList | nn.ModuleDict | nn.Sequential):
                inner = named[name].named_children()
                chosen |= {f"{name}.{child}": module for child, module in inner}
            else:
                chosen[name] = named[name]
    return chosen, found


def module_errors(
    model: nn.Module, blocks: Mapping[str, nn.Module], *, tp: int, setting: str = "blocks"
) -> list[Problem]:
    """Return the problems that would otherwise cause silent errors."""
    found = []
    if any(param.is_meta for param in model.parameters()):
        text = (
            "is on the meta device: how its weights begin only you know. Build it with its "
            "weights; each rank keeps its share, block by block."
        )
        found.append(Problem("model", text))
    dropouts = [n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if tp > 1 and dropouts:
        text = (
            f"drops at {dropouts[0]}: the ranks of tp compute the same tokens and would draw "
            "other masks for them. Set p=0, or use tp=1."
        )
        found.append(Problem("model", text))
    inward = [n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    if tp > 1 and inward:
        text = (
            f"has {inward[0]}, an nn.MultiheadAttention: it uses the parameters of a module in it, "
            "which tp holds in parts. Use nn.Linear and scaled_dot_product_attention, or tp=1."
        )
        found.append(Problem("model", text))
    return [*found, *_batch_norm_errors(model, tp), *_shared_parameters(model, blocks, setting)]


def _batch_norm_errors(model: nn.Module, tp: int) -> Iterator[Problem]:
    """Batch normalisation whose running statistics would not be those of the step."""
    norms = batch_norms_in(model)
    if tp > 1 and norms:
        text = (
            f"has {next(iter(norms))}, a batch normalisation: ranks of tp hold other features, or "
            "count the same samples again. Use GroupNorm or LayerNorm, or tp=1."
        )
        yield Problem("model", text)
    synchronised = [n for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm)]
    if synchronised:
        text = (
            f"has {synchronised[0]}, an nn.SyncBatchNorm: what it normalises over are the "
            "micro-batches that all ranks happen to compute at once, so that another number of "
            "them learns otherwise, and its running statistics are not those of a step. Use "
            "nn.BatchNorm with a larger optim.micro_batch, or GroupNorm."
        )
        yield Problem("model", text)
    changed = [name for name, norm in norms.items() if type(norm).forward is not _FORWARD]
    if changed:
        text = (
            f"has {changed[0]}, a batch normalisation with a forward method of its own: running "
            "statistics of a step are counted where torch's own computes. Use torch's, or another "
            "norm."
        )
        yield Problem("model", text)


def _shared_parameters(
    model: nn.Module, blocks: Mapping[str, nn.Module], setting: str
) -> list[Problem]:
    """A parameter in two groups would become two."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    found = []
    for places in names.values():
        homes = {next((b for b in blocks if place.startswith(f"{b}.")), "") for place in places}
        if len(homes) > 1:
            text = (
                f"keep {' and '.join(places)} apart, which are one parameter: as parts of two "
                "blocks they would be two. Leave their modules out of blocks."
            )
            found.append(Problem(setting, text))
    nested = [b for b in blocks for other in blocks if b.startswith(f"{other}.")]
    if nested:
        found.append(Problem(setting, f"name {nested[0]} and a module around it. Name one."))
    return found


def reject_scalars(model: nn.Module, *, or_whole: str = "") -> None:
    """Reject parameters without rows: ranks share rows, so these cannot be shared.

    Args:
        or_whole: Settings with which every process holds the model whole, so that it may stay.
    """
    scalars = {name: param for name, param in model.named_parameters() if param.dim() == 0}
    if scalars:
        (name, param), more = next(iter(scalars.items())), ""
        if len(scalars) > 1:
            more = f" and {len(scalars) - 1} others"
        value = "..." if param.is_meta else repr(round(float(param.item()), 6))
        raise RequestError(
            f"the parameter {name}{more} of this {type(model).__name__} is a single number "
            "without a dimension, and ranks share parameters by their first one. Give it one, with "
            f"its value: nn.Parameter(torch.tensor([{value}])) computes the same."
            f"{or_whole and f' Or let every process hold the model whole: {or_whole}.'}"
        )


def check_weights_equal(model: nn.Module, control: dist.ProcessGroup) -> None:
    """A rank keeps its share of what it holds, so all must hold the same."""
    other = rank_with_other_weights(model, control)
    if other is not None:
        raise RequestError(
            f"rank {other} has built the model with other weights than rank 0. Each rank keeps its "
            "share of what it has, so the parts would not fit together. Seed all ranks alike "
            "(torch.manual_seed) before the model is built, or load the same files."
        )


def rank_with_other_weights(model: nn.Module, control: dist.ProcessGroup) -> int | None:
    """The first rank whose parameters differ from those of rank 0; None: there is none."""
    sums = [float(param.detach().sum(dtype=torch.float64)) for param in model.parameters()]
    digest = zlib.crc32(struct.pack(f"{len(sums)}d", *sums))
    digests = [0] * dist.get_world_size(control)
    dist.all_gather_object(digests, digest, group=control)
    return next((rank for rank, found in enumerate(digests) if found != digests[0]), None)
