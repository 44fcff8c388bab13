"""A layout: how many ranks each axis has. Which are legal: ``config/rules/layout.py``."""

from dataclasses import dataclass

WHY_NOT = {
    "cp": "attention would have to exchange keys and values, and where that is is not known",
    "tp": "how its matrices may be split is not known",
    "pp": "where it can be cut, and what passes there, is not known",
    "ep": "which of its tensors are experts, and how tokens reach them, is not known",
}
"""Axis -> why a module of one's own has none."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of the mesh axes, and what dp_shard keeps split between uses."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int
    """1 optimizer state; 2 also gradients; 3 also parameters."""

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.data_ranks * self.cp * self.tp * self.pp
