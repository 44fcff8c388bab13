"""Continuing from an earlier step (``resume --step``): settings that may differ, skipped data."""

from dataclasses import replace

from shardyard.config.fingerprint import MAY_CHANGE_FROM_AN_EARLIER_STEP
from shardyard.config.formulas import step_samples
from shardyard.config.resolved import Resolved
from shardyard.train.resume import Saved
from shardyard.train.state import Progress


def may_differ(changed: str, whole: Resolved, saved: Saved) -> bool:
    """Whether a setting, as ``compare`` words it, may differ from that of a saved state."""
    setting = changed.partition(":")[0]
    return setting in MAY_CHANGE_FROM_AN_EARLIER_STEP and _is_gone_back_to(saved, whole)


def from_earlier_step(saved: Saved, whole: Resolved, *, devices: int) -> Progress:
    """Progress of a saved state, with the samples that ``--skip-steps`` passes over."""
    progress, back_to = saved.progress, whole.back_to
    if back_to is None or not _is_gone_back_to(saved, whole):
        return progress
    optim = whole.of_phases[progress.phase].recipe.optim
    samples = back_to.skip_steps * step_samples(optim, devices=devices)
    return replace(progress, passed_over=progress.passed_over + samples)


def _is_gone_back_to(saved: Saved, whole: Resolved) -> bool:
    back_to = whole.back_to
    return back_to is not None and saved.snapshot is None and saved.progress.step == back_to.step
