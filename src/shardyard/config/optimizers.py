"""Table of the optimizers: one row each, with all that is known of one without torch.

A row has what the recipe check, the planner and the doctor need. It names the update, which is
torch code in ``train/optimizers/``. Only this table dispatches on the name of an optimizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, assert_never

OptimizerName = Literal[
    "adamw", "sgd", "lamb", "lars", "lion", "muon", "schedule_free_adamw", "adafactor"
]
"""Every name has a row in ``OPTIMIZERS``."""

ParamKind = Literal["block matrix", "outer matrix", "other"]
"""``block matrix``: a matrix of a block, or the matrices of its experts. ``outer matrix``: one
outside of blocks, as embeddings and the head. ``other``: norms, biases and convolutions.
"""

MATRICES: tuple[ParamKind, ...] = ("block matrix", "outer matrix")

Form = Literal["element", "row", "column"]
"""Shape of a state: a number for each element, or for each row or column of a matrix."""


def param_kind(name: str, dims: int) -> ParamKind:
    """Return the kind of a parameter.

    Args:
        name: Of the parameter in the model, such as ``model.layers.3.mlp.up_proj.weight``.
        dims: Its dimensions.
    """
    parts = name.split(".")
    is_matrix = dims == 2 or (dims == 3 and "experts" in parts)
    if not is_matrix:
        return "other"
    return "block matrix" if any(map(str.isdecimal, parts)) else "outer matrix"


def shape_of_state(form: Form, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a state of a parameter, or of a part of it, from that one's shape."""
    match form:
        case "element":
            return shape
        case "row":
            return shape[:-1]
        case "column":
            return (*shape[:-2], shape[-1])
        case _:
            assert_never(form)


@dataclass(frozen=True, kw_only=True)
class Average:
    """One state of each parameter: an average over steps."""

    name: str
    """In checkpoints: ``optim.<name>.<parameter>``."""
    factor: str | None
    """Setting of ``optim`` that says how slowly it follows; where that is 0 there is none. None:
    the optimizer has a rule for it, and it is fp32 always.
    """
    kinds: tuple[ParamKind, ...] = (*MATRICES, "other")
    """Parameters that have it."""
    form: Form = "element"
    is_weight: bool = False
    """Whether it is other weights: it begins as the parameter, and is fp32 always."""

    @property
    def is_fp32(self) -> bool:
        """Whether it is fp32 whatever the format of averages."""
        return self.is_weight or self.factor is None


@dataclass(frozen=True, kw_only=True)
class OnePass:
    """An update that reads and writes all that a parameter has once, its copy too."""

    update: str
    """``module:class``, as of ``Optimizer``; made of shards, settings and copies."""
    moved_bytes: int
    """Bytes that it and the norm before it move for a parameter, without its averages."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Facts about one optimizer."""

    state_tensors: tuple[Average, ...]
    counts_steps: bool
    """Whether each parameter has a count of its steps too, one number: ``optim.step.<parameter>``.
    """
    sums: tuple[str, ...] = ()
    """More numbers that each parameter has, in fp64: ``optim.<name>.<parameter>``."""
    settings: tuple[str, ...]
    """Settings of ``optim`` that it reads and some other optimizer does not."""
    knows_lr: bool
    """Whether a learning rate by model size is known. Without one, ``optim.lr`` must be given."""
    typical_lr: str
    """A start for who has to give one; printed."""
    weight_decay: float
    """Weight decay where it is auto."""
    decay_reason: str
    needs_all: bool
    """Whether an update reads or moves all weights at once, not part by part."""
    moved_bytes: int
    """Bytes that an update reads and writes of a parameter, without its averages."""
    update: str
    """``module:class``, a ``train.optimizers.Update``."""
    betas: tuple[float, float] | None = None
    """Published ``optim.betas``, used where a recipe sets none; None: the optimizer reads none."""
    momentum: float | None = None
    """Published ``optim.momentum``, used where a recipe sets none; None: that of the schema."""
    gathers_matrices: bool = False
    """Whether it needs each block matrix whole, so that a rank gets it from those that split it."""
    is_schedule_free: bool = False
    """Whether it averages its own steps in place of a decay of the rate: the rate is constant after
    the warm-up, and evaluations and exports take the average (``evaluation_share``).
    """
    one_pass: OnePass | None = None
    """Update where one rank computes with weight copies; None: they are cast after the update."""


UNAVERAGED = "z"
"""State of an optimizer that averages its steps: the weights without an average."""

_ONE_PASS_BYTES = 24
"""Bytes moved for a parameter where one kernel updates it.

They are the fp32 weight, the gradient for norm, clip and update, and the copy in the computing
format.
"""

OPTIMIZERS: dict[OptimizerName, Optimizer] = {
    "adamw": Optimizer(
        state_tensors=(
            Average(name="exp_avg", factor="betas"),
            Average(name="exp_avg_sq", factor="betas"),
        ),
        counts_steps=True,
        settings=("betas", "eps", "decay_vectors"),
        knows_lr=True,
        typical_lr="3e-4",
        weight_decay=0.1,
        decay_reason="as Llama 2 (arXiv:2307.09288, section 2.2)",
        needs_all=False,
        moved_bytes=_ONE_PASS_BYTES,
        update="shardyard.train.optimizers.fused:AdamW",
        betas=(0.9, 0.95),  # as Llama 2 (arXiv:2307.09288, section 2.2)
        one_pass=OnePass(
            update="shardyard.train.optimizers.one_pass:OnePassAdamW",
            # the gradient for its norm, and for the update; the weight, and its 16-bit copy
            moved_bytes=4 + 4 + 4 + 4 + 2,
        ),
    ),
    "sgd": Optimizer(
        state_tensors=(Average(name="momentum_buffer", factor="momentum"),),
        counts_steps=False,
        settings=("momentum", "nesterov"),
        knows_lr=False,
        typical_lr="0.1",
        weight_decay=0.0,
        decay_reason="sgd decays weights only if you set it",
        needs_all=False,
        moved_bytes=_ONE_PASS_BYTES,
        update="shardyard.train.optimizers.fused:SGD",
    ),
    "lamb": Optimizer(
        state_tensors=(
            Average(name="exp_avg", factor="betas"),
            Average(name="exp_avg_sq", factor="betas"),
        ),
        counts_steps=True,
        settings=("betas", "eps"),
        knows_lr=False,
        typical_lr="1e-3",
        weight_decay=0.01,
        decay_reason="as BERT, which its authors trained (arXiv:1810.04805, appendix A.2)",
        needs_all=True,
        # the direction is written, read for its norm and read again to be applied, and the
        # weight is read for its norm and once more
        moved_bytes=_ONE_PASS_BYTES + 5 * 4,
        update="shardyard.train.optimizers.lamb:LAMB",
        betas=(0.9, 0.999),  # as its authors in all experiments (arXiv:1904.00962, section 4)
    ),
    "lars": Optimizer(
        state_tensors=(Average(name="momentum_buffer", factor="momentum"),),
        counts_steps=False,
        settings=("momentum", "trust_coefficient"),
        knows_lr=False,
        typical_lr="10",
        weight_decay=0.0,
        decay_reason="lars decays weights only if you set it",
        needs_all=True,
        # both norms are read before anything moves
        moved_bytes=_ONE_PASS_BYTES + 2 * 4,
        update="shardyard.train.optimizers.lars:LARS",
    ),
    "lion": Optimizer(
        state_tensors=(Average(name="exp_avg", factor="betas"),),
        counts_steps=False,
        settings=("betas", "decay_vectors"),
        knows_lr=False,
        typical_lr="1e-4, a third of AdamW's,",
        weight_decay=0.3,
        decay_reason="three times AdamW's, as its rate is a third (arXiv:2302.06675, section 5)",
        needs_all=False,
        # the direction is written, and read to be applied; the weight is read for its decay too
        moved_bytes=_ONE_PASS_BYTES + 4 * 4,
        update="shardyard.train.optimizers.lion:Lion",
        betas=(0.9, 0.99),  # as its authors (arXiv:2302.06675, section 5)
    ),
    "muon": Optimizer(
        state_tensors=(
            Average(name="momentum_buffer", factor="momentum", kinds=("block matrix",)),
            Average(name="exp_avg", factor="betas", kinds=("outer matrix", "other")),
            Average(name="exp_avg_sq", factor="betas", kinds=("outer matrix", "other")),
        ),
        counts_steps=True,
        settings=("betas", "eps", "decay_vectors", "momentum"),
        knows_lr=True,  # its steps have the size of AdamW's
        typical_lr="3e-4",
        weight_decay=0.1,
        decay_reason="as Moonlight (arXiv:2502.16982, section 2.2)",
        needs_all=True,
        # the direction is written, sent, and read to be applied
        moved_bytes=_ONE_PASS_BYTES + 4 * 4,
        update="shardyard.train.optimizers.muon:Muon",
        betas=(0.9, 0.95),  # as Moonlight (arXiv:2502.16982)
        momentum=0.95,  # as its author (kellerjordan.github.io/posts/muon)
        gathers_matrices=True,
    ),
    "schedule_free_adamw": Optimizer(
        state_tensors=(
            Average(name=UNAVERAGED, factor="betas", is_weight=True),
            Average(name="exp_avg_sq", factor="betas"),
        ),
        counts_steps=True,
        sums=("weight_sum", "lr_max"),
        settings=("betas", "eps", "decay_vectors"),
        knows_lr=False,
        typical_lr="1e-3, three times AdamW's,",
        weight_decay=0.1,
        decay_reason="as adamw here",
        needs_all=False,
        # the direction and its divisor are written and read, and the weight is read for its decay
        # and written twice
        moved_bytes=_ONE_PASS_BYTES + 7 * 4,
        update="shardyard.train.optimizers.schedule_free:ScheduleFreeAdamW",
        betas=(0.9, 0.999),  # as its authors (arXiv:2405.15682), and their package schedulefree
        is_schedule_free=True,
    ),
    "adafactor": Optimizer(
        state_tensors=(
            Average(name="exp_avg_sq_row", factor=None, kinds=MATRICES, form="row"),
            Average(name="exp_avg_sq_col", factor=None, kinds=MATRICES, form="column"),
            Average(name="exp_avg_sq", factor=None, kinds=("other",)),
        ),
        counts_steps=True,
        settings=("decay_vectors",),
        knows_lr=False,
        typical_lr="1e-3",
        weight_decay=0.0,
        decay_reason="adafactor decays weights only if you set it",
        needs_all=True,
        # squares are written and read twice; the direction is written, read for its norm and read
        # again to be applied, and the weight is read for its decay
        moved_bytes=_ONE_PASS_BYTES + 7 * 4,
        update="shardyard.train.optimizers.adafactor:Adafactor",
    ),
}


NUMBERS = frozenset({"step", *(name for row in OPTIMIZERS.values() for name in row.sums)})
"""States that are one number of a parameter."""

UNDECLARED = ("undeclared 1", "undeclared 2")
"""States that a plan counts for an optimizer of the user's own that declares none: as Adam's."""


def _own_row(states: tuple[str, ...]) -> Optimizer:
    """The row of an optimizer of the user's own.

    Args:
        states: Names of its states in a parameter's form.
    """
    return Optimizer(
        state_tensors=tuple(Average(name=name, factor="module") for name in states),
        counts_steps=False,
        settings=("module_settings", "module_states"),
        knows_lr=False,
        typical_lr="1e-3",
        weight_decay=0.0,
        decay_reason="optim.module_settings has that of your optimizer",
        needs_all=False,
        moved_bytes=_ONE_PASS_BYTES,
        update="shardyard.train.optimizers.own:OwnOptimizer",
    )


class OptimizerSettings(Protocol):
    """The ``optim`` section of a recipe."""

    @property
    def name(self) -> OptimizerName:
        """Name of the optimizer."""

    @property
    def betas(self) -> tuple[float, float]:
        """Decay rates of the averages."""

    @property
    def module(self) -> str | None:
        """Import path of an optimizer of the user's own; None: it is the named one."""

    @property
    def module_states(self) -> tuple[str, ...]:
        """States that the user's own optimizer declares."""


def optimizer_of(optim: OptimizerSettings) -> Optimizer:
    """Return the row of the optimizer that a recipe names.

    Raises:
        LookupError: There is none of that name; there is no fallback to another.
    """
    if optim.module is not None:
        return _own_row(optim.module_states or UNDECLARED)
    if optim.name not in OPTIMIZERS:
        raise LookupError(f"no optimizer is called {optim.name!r}: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optim.name]


def states_of(optim: OptimizerSettings, kind: ParamKind) -> tuple[Average, ...]:
    """Return the states that these settings hold of each parameter of a kind."""
    return tuple(
        average
        for average in optimizer_of(optim).state_tensors
        if kind in average.kinds and (average.factor is None or getattr(optim, average.factor))
    )


def has_factored_states(optim: OptimizerSettings) -> bool:
    """Whether states of matrices are numbers of rows and columns."""
    return any(each.form != "element" for each in states_of(optim, "block matrix"))


def evaluation_share(optim: OptimizerSettings) -> float | None:
    """Share of the way from the trained weights to ``UNAVERAGED`` where weights are evaluated.

    Gradients are taken at y = (1 - beta) z + beta x, which is trained; x is the average. None: the
    trained weights are evaluated.
    """
    if not optimizer_of(optim).is_schedule_free:
        return None
    return 1.0 - 1.0 / optim.betas[0]


def factors_of(optim: OptimizerSettings) -> dict[str, float]:
    """Setting -> the slowest of the averages that it rules; none of the user's own optimizer."""
    found: dict[str, float] = {}
    if optim.module is not None:
        return found
    for average in optimizer_of(optim).state_tensors:
        if average.factor is not None:
            value = getattr(optim, average.factor)
            found[average.factor] = max(value) if isinstance(value, tuple) else value
    return found


def moved_bytes(optim: OptimizerSettings) -> int:
    """Return the bytes that an update moves for a parameter, with its averages in fp32."""
    held = [each for each in states_of(optim, "block matrix") if each.form == "element"]
    return optimizer_of(optim).moved_bytes + 8 * len(held)


def readers_of(setting: str) -> tuple[OptimizerName, ...]:
    """Optimizers that read a setting which not all of them do; none for any other setting."""
    return tuple(name for name, row in OPTIMIZERS.items() if setting in row.settings)


# What others call our optimizers, for whoever brings their configurations.

Elsewhere = Literal["deepspeed", "trainer", "torchtitan"]

NAMES: dict[OptimizerName, Mapping[Elsewhere, tuple[str, ...]]] = {
    "adamw": {
        "deepspeed": ("adam", "adamw", "fusedadam"),
        "trainer": (
            "adamw_torch",
            "adamw_torch_fused",
            "adamw_torch_xla",
            "adamw_hf",
            "adamw_apex_fused",
        ),
        "torchtitan": ("adamw",),
    },
    "sgd": {"deepspeed": ("sgd",), "trainer": ("sgd",)},
    "lamb": {"deepspeed": ("lamb",)},
    "lars": {},
    "lion": {
        "deepspeed": ("lion", "fusedlion"),
        "trainer": ("lion_32bit",),
    },
    "muon": {},
    "schedule_free_adamw": {"trainer": ("schedule_free_adamw",)},
    "adafactor": {"trainer": ("adafactor",)},
}
"""In small letters; one row for each of ``OPTIMIZERS``."""


def optimizer_by_alias(where: Elsewhere, name: str) -> OptimizerName | None:
    """Our name of the optimizer that others call ``name``; None where it is not there."""
    return next(
        (ours for ours, others in NAMES.items() if name.lower() in others.get(where, ())), None
    )
