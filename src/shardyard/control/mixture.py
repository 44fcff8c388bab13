"""What is told of a mixture once its sources are prepared and the length of the run is known."""

from shardyard.config.mixture import SLOTS
from shardyard.config.resolved import Resolved

_MANY_PASSES = 4.0
"""Up to so many passes text is nearly as good as new text (arXiv:2305.16264)."""


def mixture_lines(resolved: Resolved) -> list[str]:
    """A line for each source of a mixture: its share, its tokens, and how often they are read."""
    seq_len = int(resolved.recipe.data.seq_len)
    return [
        f"source {part.name}: {part.slots / SLOTS:.1%} of the samples, {part.data.train_tokens:,} "
        f"tokens, read {part.passes(resolved.samples, seq_len):.2f} times"
        for part in resolved.data.parts
    ]


def mixture_warnings(resolved: Resolved) -> list[str]:
    """One for each source that is read over and over."""
    seq_len = int(resolved.recipe.data.seq_len)
    passes = {part.name: part.passes(resolved.samples, seq_len) for part in resolved.data.parts}
    return [
        f"source {name} of data.mixture is read {times:.1f} times in this run. From about "
        f"{_MANY_PASSES:.0f} times on text teaches less and less (arXiv:2305.16264): lower its "
        "weight, give more of it, or train for less."
        for name, times in passes.items()
        if times > _MANY_PASSES
    ]
