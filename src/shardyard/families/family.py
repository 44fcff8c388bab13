"""A family's model description: one table of matrices, where modules are, its config.json.

A row of the table is a module with parameters. The table is the source of the planner's counts,
the splits of tensor and expert parallelism, names in Hugging Face's files, and the cut into
stages. So a family is described once. ``tests/families`` hold each row against the real model.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from shardyard.families.dimensions import Labelled, ModelDimensions

Size = Callable[[ModelDimensions], int]
"""From a model's sizes to a number of rows or columns."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Sizes with a name and a source. ``vocab_size`` 0 means: that of the tokenizer."""

    shape: ModelDimensions
    source: str


@dataclass(frozen=True)
class Fused:
    """A matrix of Hugging Face's files that is several of ours, one below the other."""

    module: str
    """Its name, from the top of a block."""
    parts: tuple[str, ...]
    """Our matrices in the order of their rows in it, by the last step of their names."""


@dataclass(frozen=True)
class ModuleSpec:
    """A matrix or a norm: a module's ``weight``, and its ``bias`` where it has one."""

    module: str
    """Its name: from the top of a block, or of the model for what is in no block."""
    rows: Size
    """Outputs of a matrix, entries of a table, elements of a norm."""
    columns: Size | None = None
    """Inputs; None: a norm."""
    bias: Callable[[ModelDimensions], bool] | None = None
    """Whether it has one; None: never."""
    split: Literal["rows", "columns"] | None = None
    """Dimension that tp splits; None: every rank holds all.

    Rows are outputs (heads, inner width, vocabulary), or elements of a norm over them. Columns are
    inputs, so that outputs are sums over ranks.
    """
    per_expert: bool = False
    """There is one for each expert, and ep deals out whole ones."""
    parameter: str = "weight"
    in_files: str | None = None
    """Its name in Hugging Face's files where that differs, from the top of the block, or of the
    model; ``{}``: number of the expert."""
    is_transposed: bool = False
    """In files inputs come first."""
    fused: Fused | None = None
    """The matrix of the files that it is a part of; None: it is one there too. Here they are apart:
    of a share of the whole one rank of tp would have queries, another one values."""
    only_if: Callable[[ModelDimensions], bool] | None = None
    """Whether a model has it, by its shape; None: all have it."""
    is_built: bool = True
    """False: the planner counts it, and models here have none."""

    def elements(self, shape: ModelDimensions) -> int:
        """Parameters, of one expert where there are several."""
        if self.only_if is not None and not self.only_if(shape):
            return 0
        weight = self.rows(shape) * (1 if self.columns is None else self.columns(shape))
        return weight + self._bias_elements(shape)

    def parameters(self, shape: ModelDimensions) -> Iterator[tuple[str, int, bool]]:
        """Name in the block or model, elements, and whether tp splits them: weight and bias."""
        bias = self._bias_elements(shape)
        weight = self.elements(shape) - bias
        if self.only_if is None or self.only_if(shape):
            yield f"{self.module}.{self.parameter}", weight, self.split is not None
        if bias:
            yield f"{self.module}.bias", bias, self.split == "rows"

    def unsplit_elements(self, shape: ModelDimensions) -> int:
        """Return the parameters each rank of tp holds: all, or the bias of a sum over ranks."""
        if self.split is None:
            return self.elements(shape)
        return self._bias_elements(shape) if self.split == "columns" else 0

    def _bias_elements(self, shape: ModelDimensions) -> int:
        is_there = self.only_if is None or self.only_if(shape)
        return self.rows(shape) if is_there and self.bias is not None and self.bias(shape) else 0


@dataclass(frozen=True)
class Product:
    """A matrix product of a block: some matrices that multiply the same input."""

    outputs: tuple[int, ...]
    """Outputs of each matrix."""
    inputs: int
    split: Literal["rows", "columns"] | None
    per_expert: bool


@dataclass(frozen=True, kw_only=True)
class ConfigJson:
    """Reading, validation and writing of a family's config.json. Keys are Hugging Face's."""

    defaults: Mapping[str, Any]
    """Values of keys that a file leaves out. Source: transformers' config classes, 5.23."""
    read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """The content of a file in the words that families share."""
    norm_eps: str = "rms_norm_eps"
    activation: str = "silu"
    """The usual one."""
    other_activations: tuple[str, ...] = ()
    """Other activations that are built; the shape names the one in use."""
    partial_rotary: bool = False
    """Whether positions may turn a part of each head."""
    dropout: str | None = None
    """Share of hidden states that is dropped; None: a model of this kind drops none."""
    window_switch: str | None = None
    """Key without which sliding_window has no effect."""
    layer_types: Callable[[Mapping[str, Any]], list[str]] | None = None
    """Function that returns the type of each block where the key of this name is missing.

    None: all blocks are alike.
    """
    own: tuple[str, ...] = ()
    """Keys that the family supports; in other families, they change models only in transformers."""
    refused: Callable[[Mapping[str, Any]], Mapping[str, bool]] = lambda _: {}
    """Reason -> whether it applies: what this family can say and is not built."""
    written: Callable[[ModelDimensions], dict[str, Any]]
    """All but model_type, for transformers' config class."""


@dataclass(frozen=True, kw_only=True)
class LabelHead:
    """Names of what a model has in the place of its head over the vocabulary."""

    of_samples: str = "score"
    """Matrix over one token of each sample."""
    of_tokens: str = "score"
    """Matrix over every token; it has a bias."""
    samples_have_bias: bool = False
    pooler: str | None = None
    """Dense layer, followed by tanh, over the token that stands for a sample; None: none.

    With it that is the first token, else the last one.
    """
    samples_dropped: bool = False
    """Whether the head over samples drops a share of its input; that over tokens always does."""


DROPOUT_OF_LABELS = "dropout"
"""Module that drops a share of the input of a head over labels."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model. Names of modules are from the top of its model with a head."""

    model_type: str
    is_causal: bool = True
    """Whether tokens attend only to earlier ones, to predict the next token; else hidden ones."""
    is_gated: bool = True
    """The MLP has a gate, norms do not subtract the mean, positions are angles."""

    embedding: ModuleSpec
    """The table of tokens."""
    positions: ModuleSpec | None = None
    """A table of learned positions, added to the embedding of a token."""
    token_types: ModuleSpec | None = None
    """A table of kinds of tokens: the row of a token's kind is added to its embedding."""
    scales_embedding: bool = False
    """The embedding of a token is multiplied by the root of its width."""
    embedding_norm: ModuleSpec | None = None
    """The norm before the first block."""
    embedding_end: str | None = None
    """Module for the sum of the embeddings in models without a norm there; it has no parameters."""
    block: tuple[ModuleSpec, ...]
    """Rows of one block, in the order of its forward pass."""
    norm: ModuleSpec
    """Norm between the last block and the head."""
    head: ModuleSpec
    pooler: ModuleSpec | None = None
    """Dense layer over a sample's first token, in models that may judge pairs of texts."""
    pair_head: ModuleSpec | None = None
    """Two logits of what that says: the second text follows the first, or it is from elsewhere."""
    labels: tuple[Labelled, ...] = ("samples", "tokens")
    """Units over whose labels transformers has a head for this kind."""
    label_head: LabelHead = LabelHead()
    """Heads over labels, one of which replaces the head (``families/registry.py``)."""
    labelled: Labelled | None = None
    """Unit that the head gives a label to; None: it predicts tokens."""

    blocks: str
    """The list of transformer blocks."""
    operators: tuple[str, ...] = ()
    """Modules of a block that have no parameters of their own."""
    rotary: str | None = None
    """Module that turns positions into every block's angles; it has only buffers."""
    rotary_by_type: bool = False
    """Whether blocks with a window have other angles, which that module is asked for by type."""
    end: str | None = None
    """A module that holds norm and head, and parameters of its own."""
    dropped: tuple[str, ...] = ()
    """Modules of a block whose output passes through dropout."""
    gathered: tuple[str, ...] = ()
    """Modules of a block that need all tokens of a sample at their input."""
    unfused: Mapping[str, str] = field(default_factory=dict)
    """Modules of a block in whose place come ours, whose matrices are apart and not transposed:
    name -> kind, of ``models/unfuse.py``."""
    sparse: str | None = None
    """The module of a block that has a router and experts; None: a block has one MLP."""

    other_names: Mapping[str, str] = field(default_factory=dict)
    """Ends of names in files of other versions -> ends of names in files written now."""
    tied_names: Mapping[str, str] = field(default_factory=dict)
    """Names in files that are another name of a parameter -> its name; the head has its setting."""
    ignored_names: Mapping[str, str] = field(default_factory=dict)
    """Pattern of names in files that the model has no place for and needs none -> why, in words
    that follow the names; ``config/weights_match.py`` has those of all families."""
    is_always_tied: bool = False
    """Whether the head is always the table of tokens, for any config."""
    uncounted: Callable[[ModelDimensions], Mapping[str, tuple[int, ...]]] = lambda _: {}
    """Parameters that have no row, as the planner does not count them: name -> shape."""
    config_json: ConfigJson
    initial_std: float = 0.02
    """Standard deviation of random matrices; biases begin with zero."""
    begins_smaller_by_depth: bool = False
    """Random matrices whose outputs are added to the stream are divided by the root of how many
    there are."""
    initial_norm: float = 1.0
    """Initial value of norms: zero where one is added to them."""
    is_one_graph: bool = False
    """Whether a block is one graph to torch's compiler, with any activation checkpointing.

    Blocks that compute the same have the same graph (``tests/distributed/test_one_graph.py``).
    """
    refused_schedules: Mapping[str, str] = field(default_factory=dict)
    """Pipeline schedule -> why no model of this kind goes through it, and what to use."""
    presets: Mapping[str, Preset] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """Whether each block has a mixture of experts in the place of its MLP."""
        return any(row.per_expert for row in self.block)

    @property
    def stream_norms(self) -> int:
        """Norms of a block that are as wide as the model."""
        return sum(row.columns is None and row.rows is hidden for row in self.block)

    @property
    def ends_with_norm(self) -> bool:
        """Whether what the last matrix of a block returns is normed before it is added."""
        return self.block[-1].columns is None

    @property
    def before(self) -> tuple[ModuleSpec, ...]:
        """Return the rows before the first block, on the first stage of a pipeline."""
        rows = (self.embedding, self.positions, self.token_types, self.embedding_norm)
        return tuple(row for row in rows if row is not None)

    @property
    def after(self) -> tuple[ModuleSpec, ...]:
        """Return the rows after the last block, on the last stage."""
        rows = (self.norm, self.head, self.pooler, self.pair_head)
        return tuple(row for row in rows if row is not None)

    @property
    def pools(self) -> bool:
        """Whether a head over labels of samples reads what a pooler makes of the first token."""
        return self.labelled == "samples" and self.pooler is not None

    @property
    def drawn_modules(self) -> tuple[str, ...]:
        """Return the modules of a task's own heads, as prefixes of parameter names.

        They begin at random where a folder has none.
        """
        rows = (self.pooler, self.pair_head, None if self.labelled is None else self.head)
        return tuple(f"{row.module}." for row in rows if row is not None)

    @property
    def head_dropout(self) -> str | None:
        """Return the module that drops a share of the head's input; None: nothing is dropped."""
        drops = self.labelled == "tokens" or (
            self.labelled == "samples" and self.label_head.samples_dropped
        )
        return DROPOUT_OF_LABELS if drops else None

    @property
    def colwise(self) -> tuple[str, ...]:
        """Matrices of a block whose outputs tp splits; experts are dealt out apart."""
        return tuple(row.module for row in self._matrices() if row.split == "rows")

    @property
    def split_norms(self) -> tuple[ModuleSpec, ...]:
        """Norms of a block over outputs that tp splits: ranks add up their squares."""
        return tuple(row for row in self.block if row.columns is None and row.split == "rows")

    @property
    def rowwise(self) -> tuple[str, ...]:
        """Matrices of a block whose inputs tp splits; their outputs are sums over ranks."""
        return tuple(row.module for row in self._matrices() if row.split == "columns")

    @property
    def unsplit(self) -> tuple[str, ...]:
        """List what keeps tp at 1: matrices that tp does not split in modules that need all tokens.

        Such a module would see all tokens and return them all, where each rank holds its share.
        """
        found = []
        for name in self.gathered:
            under = [row for row in self._matrices() if f"{row.module}.".startswith(f"{name}.")]
            whole = [row.module for row in under if row.split is None]
            found += whole or ([] if any(row.split == "rows" for row in under) else [name])
        sums = len(self.rowwise)
        if sums < len(self.gathered) or not self.gathered:
            found += [
                row.module
                for row in self._matrices()
                if row.split is None and row.module not in found
            ]
        return tuple(dict.fromkeys(found))

    @property
    def block_modules(self) -> tuple[str, ...]:
        """Every module in a block, by its name there."""
        rows = (row.module for row in self.block if row.is_built)
        return tuple(dict.fromkeys((*self.operators, *rows)))

    def products(self, shape: ModelDimensions) -> tuple[Product, ...]:
        """Matrix products of a block; neighbours that multiply the same input are one."""
        found = []
        matrices = [row for row in self.block if row.columns is not None and row.elements(shape)]
        for (inputs, split, per_expert, _), rows in groupby(matrices, key=_input_of(shape)):
            outputs = tuple(row.rows(shape) for row in rows)
            found.append(Product(outputs, inputs, split, per_expert))
        return tuple(found)

    def _matrices(self) -> Iterator[ModuleSpec]:
        rows = (row for row in self.block if row.columns is not None)
        return (row for row in rows if row.is_built and not row.per_expert)


def _input_of(shape: ModelDimensions) -> Callable[[ModuleSpec], tuple[Any, ...]]:
    """Return a key that is equal for two matrices that multiply the same input."""

    def key(row: ModuleSpec) -> tuple[Any, ...]:
        assert row.columns is not None, "no norm"
        return row.columns(shape), row.split, row.per_expert, row.module.rpartition(".")[0]

    return key


# --- sizes that tables are made of ----------------------------------------------------------------


def vocabulary(shape: ModelDimensions) -> int:
    return shape.vocab_size


def positions(shape: ModelDimensions) -> int:
    return shape.max_position_embeddings


def hidden(shape: ModelDimensions) -> int:
    return shape.hidden_size


def heads(shape: ModelDimensions) -> int:
    return shape.queries_width


def kv_heads(shape: ModelDimensions) -> int:
    return shape.keys_width


def head(shape: ModelDimensions) -> int:
    return shape.head_width


def labels(shape: ModelDimensions) -> int:
    return shape.num_labels


def inner(shape: ModelDimensions) -> int:
    return shape.intermediate_size


def experts(shape: ModelDimensions) -> int:
    return shape.num_experts


def expert_inner(shape: ModelDimensions) -> int:
    return shape.expert_width


def shared_inner(shape: ModelDimensions) -> int:
    return shape.shared_expert_intermediate_size


def has_attention_bias(shape: ModelDimensions) -> bool:
    """A bias that the config decides on."""
    return shape.attention_bias


def always(_: ModelDimensions) -> bool:
    return True
