"""Report a run's length where whole steps make it longer than what was asked for."""

from fractions import Fraction

from shardyard.config.formulas import first_batch
from shardyard.config.resolved import Resolved
from shardyard.config.run_length import Length, requested_samples


def length_lines(resolved: Resolved) -> list[str]:
    """A line for each phase whose length is rounded up."""
    found = []
    for number, phase in enumerate(resolved.of_phases, 1):
        seq_len = int(phase.recipe.data.seq_len)
        epoch = phase.data.num_samples("train", seq_len)
        asked = requested_samples(phase.recipe, epoch)
        if asked is None:
            continue
        length = Length(requested=asked, batch=first_batch(phase.recipe.optim))
        if length.factor != 1:
            of = f" of phase {number}" if resolved.phases else ""
            epochs = float(Fraction(length.samples, epoch)) if epoch else 0
            found.append(
                f"length{of}: {float(asked):,.10g} samples are asked for, and {length.steps:,} "
                f"steps of {length.batch:,} train {length.samples:,} ({epochs:.4g} epochs)"
            )
    return found
