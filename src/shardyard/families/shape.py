"""A model's sizes with its family: counts of parameters and matrix products."""

from dataclasses import dataclass, fields
from functools import cached_property

from shardyard.errors import RequestError
from shardyard.families.dimensions import ModelDimensions
from shardyard.families.family import Family, Product
from shardyard.families.registry import PLANNED, family_of, labelled_family


@dataclass(frozen=True, kw_only=True)
class ModelShape(ModelDimensions):
    """Sizes of one transformer with its family, whose table gives the counts."""

    @classmethod
    def of(cls, dimensions: ModelDimensions) -> "ModelShape":
        """Return the shape of these dimensions."""
        own = fields(ModelDimensions)
        return cls(**{each.name: getattr(dimensions, each.name) for each in own})

    def __hash__(self) -> int:
        # the sizes that differ most: rope_scaling is a dict, which has no hash
        return hash((self.model_type, self.hidden_size, self.intermediate_size, self.vocab_size))

    @cached_property
    def family(self) -> Family:
        """Return the family of this model type.

        Raises:
            RequestError: There is no such kind, or only one of it and these sizes has experts.
        """
        family = family_of(self.model_type)
        if self.label_head is not None:
            family = labelled_family(self.model_type, self.label_head)
        if (self.num_experts > 0) != family.has_experts:
            has = "has" if family.has_experts else "has no"
            raise RequestError(
                f"num_experts={self.num_experts} with model_type={self.model_type!r}, which {has} "
                "experts: its parameters would be counted as those of another model. Name the "
                "type that these sizes are of."
            )
        return family

    @cached_property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate: three matrices instead of two (SwiGLU)."""
        return self.family.is_gated

    @cached_property
    def is_causal(self) -> bool:
        """Return whether tokens attend only to earlier ones."""
        return self.family.is_causal

    @property
    def is_planned_only(self) -> bool:
        """Whether the planner knows this family and training does not."""
        return self.model_type in PLANNED

    @property
    def rotated_width(self) -> int:
        """Elements of a head that are turned by position."""
        has_angles = self.family.rotary is not None
        return int(self.head_width * self.partial_rotary_factor) if has_angles else 0

    # --- counts, from the family's table ----------------------------------------------------------

    @cached_property
    def expert_parameters(self) -> int:
        """Parameters of one expert; 0 for a dense model."""
        if not self.num_experts:
            return 0
        return sum(row.elements(self) for row in self.family.block if row.per_expert)

    @cached_property
    def shared_block_parameters(self) -> int:
        """Parameters of one block without its experts: what every token visits."""
        return sum(row.elements(self) for row in self.family.block if not row.per_expert)

    @cached_property
    def block_parameters(self) -> int:
        """Parameters of one transformer block, norms and biases included."""
        return self.shared_block_parameters + self.num_experts * self.expert_parameters

    @cached_property
    def unsplit_block_parameters(self) -> int:
        """Parameters of a block that every rank of tp holds: norms, routers, biases of sums."""
        return sum(row.unsplit_elements(self) for row in self.family.block)

    @cached_property
    def embedding_parameters(self) -> int:
        """All that comes before the first block: the table of tokens, and what is added to it."""
        return sum(row.elements(self) for row in self.family.before)

    @cached_property
    def small_parameters(self) -> tuple[int, int]:
        """Return the parameters on every rank of tp before the first block, and after the last."""
        family = self.family
        before = sum(row.unsplit_elements(self) for row in family.before)
        return before, sum(row.unsplit_elements(self) for row in family.after)

    @cached_property
    def split_norm_width(self) -> int:
        """Elements of all norms of a block over outputs that tp splits."""
        return sum(row.rows(self) for row in self.family.split_norms)

    @property
    def table_parameters(self) -> int:
        """Parameters of the table of tokens, or of a head over the vocabulary."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the head's matrix."""
        return self.logits_width * self.hidden_size

    @property
    def tables(self) -> int:
        """Matrices over the vocabulary: the table of tokens, and the head that has its own."""
        return 1 if self.tie_word_embeddings or self.label_head is not None else 2

    @cached_property
    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        head = 0 if self.tie_word_embeddings else self.family.head.elements(self)
        blocks = self.num_hidden_layers * self.block_parameters
        others = sum(row.elements(self) for row in self.family.after if row is not self.family.head)
        return self.embedding_parameters + blocks + others + head

    @cached_property
    def matmul_parameters(self) -> int:
        """Parameters in a matrix product of every token: no table, and only the visited experts.

        Of a block all but the scales of the stream's norms; biases and norms of heads are so few
        that other tools, whose FLOP these are held against, count them too.
        """
        visited = self.shared_block_parameters + self.num_experts_per_tok * self.expert_parameters
        blocks = self.num_hidden_layers * (visited - self.family.stream_norms * self.hidden_size)
        return blocks + self.head_parameters

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """Matrix products of a block, in their order; those of one input are one product."""
        return self.family.products(self)
