"""Steps of a script that continue from its newest checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardyard.errors import RequestError
from shardyard.library.checkpoint import Loaded, Saves, load_into
from shardyard.library.generators import give_back_to_rank, once, states_of
from shardyard.library.model import Sharded, listed, sharded
from shardyard.library.run_recorder import RunRecorder, active_recorder
from shardyard.library.termination import BeforeTermination
from shardyard.log import info, warn
from shardyard.parallel.rank_agreement import host_group

_NO_SETTINGS = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Keys of an optimizer's group that say how a step is computed, not what it computes."""


def steps(
    total: int,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *others: Any,
    every: int,
    keep_last: int = 2,
) -> Iterator[int]:
    """``range(total)`` from the newest checkpoint's step on. All ranks go through it together.

    After each ``every`` steps, and after the last one, the state is copied into host memory; the
    checkpoint is written from there while the next steps run. It is durable when the loop is left,
    at its end, by ``break`` or by an exception; at SIGTERM, for which the script has no handler of
    its own, before the process ends. A process that is started again, as torchrun does after a
    loss, loads the newest and continues: with the weights, the optimizer, the others, and each
    rank's random number generators (torch, its accelerator, Python, numpy), so that dropout draws
    what it would have drawn.

    Args:
        folder: Seen by all ranks.
        optimizer: One, or several in a list.
        others: What else keeps state, with ``state_dict`` and ``load_state_dict``: schedulers.

    Raises:
        CheckpointError: None could be read, see ``load_checkpoint``, or one could not be written,
            raised after a later step, the same on every rank; earlier ones are intact.
        NotFiniteError: Parameters or optimizer held NaN or infinity, or a buffer NaN.
        RequestError: ``every`` is below 1, or the checkpoint has state of another number of others.
    """
    if every < 1:
        raise RequestError(f"steps(every={every}): give 1 or more, the steps between checkpoints.")
    parts = sharded(model)
    given = _settings(optimizer)
    recorder = active_recorder()
    loaded = load_into(folder, model, optimizer, recorder=recorder)
    first = 0
    if loaded is not None:
        first, states = loaded.step, loaded.values.get("others", [])
        if len(states) != len(others):
            raise RequestError(
                f"the checkpoint in {folder} has the state of {len(states)} objects in addition to "
                f"model and optimizer, but steps() was given {len(others)}. Give those that it was "
                "written with, in their order, or another folder."
            )
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
        if dist.get_rank() == 0:
            _report(loaded, total, given, _settings(optimizer))
        _continue_generators(loaded, parts)
    group = host_group(model)
    saves = Saves(folder, model, optimizer, keep_last=keep_last, group=group, recorder=recorder)
    if recorder is not None:
        recorder.ready(last_step=max(total, first), parameters=_parameters(parts))
    with _finished(saves, parts, recorder) as before_end:
        for step in range(first, total):
            yield step
            if recorder is not None:
                recorder.remaining_steps = total - step - 1
            with before_end.postponed():  # what it holds, the writing thread may wait for
                saves.report()
            if (step + 1) % every == 0 or step + 1 == total:
                values = {
                    "total": total,
                    "others": [other.state_dict() for other in others],
                    "generators": once(parts.agree(states_of(parts.device))),
                    "ranks": dist.get_world_size(),
                }
                with before_end.postponed():
                    saves.begin(step + 1, values)
        with before_end.postponed():
            saves.finish()


@contextmanager
def _finished(
    saves: Saves, parts: Sharded, recorder: RunRecorder | None
) -> Iterator[BeforeTermination]:
    """Finish what is being written, however the block is left."""
    parts.finish_saves = saves.finish
    if recorder is not None:
        recorder.finish_saves = saves.close_early
    try:
        with BeforeTermination(saves.finish_writing) as before_end:
            yield before_end
    finally:
        parts.finish_saves = None
        saves.close()
        if recorder is not None:
            recorder.finish_saves = None


def _parameters(parts: Sharded) -> int | None:
    """Parameters of the whole model; None: a rank knows only its own part."""
    layout = parts.mesh.layout
    if layout.tp > 1 or layout.pp > 1 or layout.ep > 1:
        return None
    return sum(param.numel() for param in parts.params.values())


def _continue_generators(loaded: Loaded, parts: Sharded) -> None:
    saved: Sequence[Mapping[str, Any]] = loaded.values.get("generators", [])
    was, ranks = loaded.values.get("ranks", len(saved)), dist.get_world_size()
    if saved:
        give_back_to_rank(saved, parts.device, rank=dist.get_rank())
    if dist.get_rank() == 0 and (not saved or (len(saved) > 1 and was != ranks)):
        why = f"It was written by {was} ranks, these are {ranks}"
        why = why if saved else "It holds no state of random number generators"
        warn(
            f"{loaded.path}: {why}. Weights, optimizer and step continue exactly; dropout and "
            "other random parts draw other numbers than an unbroken run."
        )


def _report(
    loaded: Loaded,
    total: int,
    configured: Sequence[Mapping[str, Any]],
    used: Sequence[Mapping[str, Any]],
) -> None:
    """Say what was found, and which settings win where the script has others."""
    lines = []
    was = loaded.values.get("total", total)
    if loaded.step >= total:
        lines.append(f"No step is left to train of steps({total}, ...).")
    elif was != total:
        lines.append(
            f"Its run was to end at step {was}; this one ends at {total}, as steps() says."
        )
    apart = [
        f"{key}={now[key]} (your script: {before[key]})"
        for before, now in zip(configured, used, strict=True)
        for key in before
        if key in now and before[key] != now[key]
    ]
    if apart:
        found = ", ".join(dict.fromkeys(apart))
        lines.append(f"The optimizer's settings in the checkpoint are used: {found}.")
    if lines:
        lines.append("For a new run give another folder; set other settings inside the loop.")
        warn(" ".join([f"{loaded.path} holds step {loaded.step}.", *lines]))
    else:
        info(f"{loaded.path}: training continues with step {loaded.step + 1} of {total}.")


def _settings(optimizer: Optimizer | Sequence[Optimizer]) -> list[dict[str, Any]]:
    """Return each group's settings as plain values; a scheduled learning rate as it began."""
    settings = []
    for group in (group for each in listed(optimizer) for group in each.param_groups):
        plain = {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in _NO_SETTINGS
        }
        first = plain.pop("initial_lr", plain.get("lr"))
        settings.append({**plain, "lr": first})
    return settings
