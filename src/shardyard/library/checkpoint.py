"""Save and load a model and any torch optimizer in the checkpoint format of runs.

Without pickle, and loaded into any layout.
"""

import json
import time
import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardyard.checkpoint.buffers import buffers_of
from shardyard.checkpoint.load import (
    load_tensors,
    read_shapes,
    read_values,
    select_sound_checkpoint,
)
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.save import Abandoned, Durable, Saver
from shardyard.errors import CheckpointError, NotFiniteError, RequestError
from shardyard.library.model import Optimizers, listed, sharded
from shardyard.library.run_recorder import RunRecorder, recorder_of
from shardyard.log import warn

_TIMEOUT_S = 600.0
"""Limit on the wait of ranks for each other before a load, as elastic.collective_timeout_s."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Content of a checkpoint other than tensors."""

    step: int
    values: dict[str, Any]
    """Values as they were given to ``save_checkpoint``."""
    path: Path = field(default=Path(), compare=False)
    """The folder of the checkpoint."""


def save_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    step: int,
    values: dict[str, Any] | None = None,
    keep_last: int = 2,
) -> None:
    """Write ``folder/step-<8 digits>``, then let ``folder/latest`` name it. All ranks call it.

    Args:
        folder: Seen by all ranks.
        values: Anything else that JSON can hold, for instance a scheduler's ``state_dict()``.
        keep_last: Newest checkpoints kept.

    Raises:
        CheckpointError: It could not be written; earlier ones are intact. The same on every rank.
        NotFiniteError: Parameters or optimizer hold NaN or infinity, or a buffer NaN.
        RequestError: ``values`` are no JSON, or the optimizer keeps what is no tensor.
    """
    parts = sharded(model)
    if parts.finish_saves is not None:  # they may be of the same folder
        parts.finish_saves()
    saves = Saves(
        folder,
        model,
        optimizer,
        keep_last=keep_last,
        group=parts.control,
        recorder=recorder_of(folder),
    )
    try:
        saves.begin(step, values or {})
        saves.finish()
    finally:
        saves.close()


class Saves:
    """Checkpoints of one model, each written while its script continues.

    All ranks make the same calls.

    Args:
        group: A gloo group of all ranks, for this use only.
        recorder: Of the run that the checkpoints are of; None: of none.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        optimizer: Optimizers,
        *,
        keep_last: int,
        group: dist.ProcessGroup,
        recorder: RunRecorder | None,
    ) -> None:
        self._recorder = recorder
        self._folder = Path(folder)
        self._model = model
        self._optimizers = listed(optimizer)
        self._saver = Saver(
            self._folder,
            group=group,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            keep_last=keep_last,
        )

    def begin(self, step: int, values: dict[str, Any]) -> None:
        """Copy the state into host memory; it may change as soon as this returns.

        Waits for an earlier save that is still being written.

        Raises:
            CheckpointError: The earlier one could not be written. The same on every rank.
            RequestError: ``values`` are no JSON, or the optimizer keeps what is no tensor.
        """
        groups = [_plain(group) for each in self._optimizers for group in each.param_groups]
        content = {"step": step, "values": values, "groups": groups}
        try:
            json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"save_checkpoint(values=...) cannot be written as JSON: {error}. A checkpoint "
                "holds tensors and JSON, as anything else could run code when it is read. Give "
                "numbers, texts, lists and dicts."
            ) from error
        blocked_s = self._saver.save(step, _tensors(self._model, self._optimizers), content)
        if self._recorder is not None:
            self._recorder.save_started(step, blocked_s)

    def report(self) -> None:
        """Say what became of a save; call it after each step.

        Raises:
            CheckpointError: It could not be written. At the same call on every rank.
            NotFiniteError: Parameters or optimizer held NaN or infinity, or a buffer NaN.
        """
        for save in self._saver.poll():
            self._record(save)
            if isinstance(save, Abandoned):
                raise NotFiniteError(
                    f"{self._folder / step_name(save.step)} was not saved: {save.reason}. Training "
                    "could not continue from it. Earlier checkpoints are intact: load the newest "
                    "one, and skip an update whose gradient norm is not finite."
                )

    def finish(self) -> None:
        """Wait until all is durable; raises as ``report``."""
        self._saver.wait()
        self.report()

    def finish_writing(self) -> None:
        """Wait until no save is being written, and begin no other."""
        self._saver.close()

    def close_early(self) -> None:
        """Wait for what is being written, and record it: the loop was left in the middle."""
        self._saver.close()
        with suppress(CheckpointError):
            self._saver.wait()
            for save in self._saver.poll():
                self._record(save)

    def _record(self, save: Durable | Abandoned) -> None:
        if self._recorder is None:
            return
        facts = {name: value for name, value in asdict(save).items() if value is not None}
        if isinstance(save, Durable):
            self._recorder.save_ended(**facts)
        else:
            self._recorder.event("checkpoint_abandoned", **facts)

    def close(self) -> None:
        """Wait until all is durable, and warn if it is not. Begins no other save."""
        try:
            self.finish()
        except CheckpointError as error:
            warn(str(error))
        finally:
            self._saver.close()


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: Optimizers = None
) -> Loaded | None:
    """Load the newest sound checkpoint, written by any layout. All ranks call it.

    Damaged ones are passed over with a warning.

    Args:
        optimizer: Gets its state and its groups' settings (learning rate, ...) back; None: it
            starts from scratch.

    Returns:
        None if there is no checkpoint; the model is unchanged then.

    Raises:
        CheckpointError: There are checkpoints but none is sound, or it is of something else.
    """
    return load_into(folder, model, optimizer, recorder=recorder_of(folder))


def load_into(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizers,
    *,
    recorder: RunRecorder | None,
) -> Loaded | None:
    """Do the same as ``load_checkpoint``, and record it as what a run continues from."""
    began_s = time.monotonic()
    parts = sharded(model)
    if parts.finish_saves is not None:
        parts.finish_saves()
    chosen = select_sound_checkpoint(
        Path(folder),
        group=parts.control,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=_TIMEOUT_S,
    )
    if chosen is None:
        return None
    if chosen.note is not None:
        warnings.warn(f"{chosen.note}. {chosen.path} is the newest sound one.", stacklevel=2)
    for damaged in chosen.damaged:
        warnings.warn(f"{damaged}. An older one is loaded.", stacklevel=2)
    values = read_values(chosen.path)
    if {"step", "values", "groups"} - values.keys():  # written by a run
        values = {"step": chosen.step, "values": values, "groups": None}
    saved = read_shapes(chosen.path)
    has_state = any(name.startswith("optim.") for name in saved)
    optimizers = listed(optimizer)
    for each in optimizers if has_state else ():
        _make_state(each)
        _forget_unsaved(each, parts.params, saved)
    tensors = _tensors(model, optimizers if has_state else ())
    of_others = parts.names_on_all_ranks(tensors)
    # without an optimizer only the model is read
    lacked = load_tensors(chosen.path, tensors, of_others=of_others, allow_extra=not optimizers)
    if lacked:
        names = ", ".join(name.removeprefix("buffer.") for name in lacked)
        warnings.warn(
            f"{chosen.path} was written before buffers were saved; these keep the values they have "
            f"now: {names}. Save it once more after they have been made again.",
            stacklevel=2,
        )
    if optimizers and values["groups"] is not None:
        _set_groups(optimizers, values["groups"], chosen.path)
    parts.has_weights = True
    if recorder is not None:
        passed_over = [each._asdict() for each in chosen.damaged]
        seconds = time.monotonic() - began_s
        recorder.loaded(chosen.step, seconds=seconds, damaged=passed_over, note=chosen.note)
    return Loaded(step=values["step"], values=values["values"], path=chosen.path)


def _tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """``model.<parameter>``, ``buffer.<buffer>`` and ``optim.<state>.<parameter>``, as of runs."""
    parts = sharded(model)
    tensors: dict[str, Tensor] = {
        f"model.{name}": param.detach() for name, param in parts.params.items()
    }
    tensors |= buffers_of(model)
    names: dict[Tensor, str] = {param: name for name, param in parts.params.items()}
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            if param not in names:
                raise RequestError(
                    f"{type(optimizer).__name__} has parameters that are not the model's, as they "
                    "are now. Make the optimizer after parallelize(), of model.parameters()."
                )
            for key, value in state.items():
                tensors[f"optim.{key}.{names[param]}"] = _state(value, key, optimizer, param)
    return tensors


def _state(value: Any, key: str, optimizer: Optimizer, param: Tensor) -> Tensor:
    if isinstance(value, DTensor) or (isinstance(value, Tensor) and value.dim() == 0):
        return value
    if isinstance(value, Tensor) and not isinstance(param, DTensor):
        return value
    raise RequestError(
        f"{type(optimizer).__name__} keeps {key!r} as a {type(value).__name__} without a place in "
        "the whole, so that no other layout could load it. Use an optimizer whose state has the "
        "form of its parameters (AdamW, SGD, Adagrad, ...), or save without the optimizer."
    )


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group, without its parameters and what is no JSON."""
    settings = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key != "params"
    }
    plain = (bool, int, float, str, list, tuple, type(None))
    return {key: value for key, value in settings.items() if isinstance(value, plain)}


def _forget_unsaved(
    optimizer: Optimizer, params: dict[str, nn.Parameter], saved: Collection[str]
) -> None:
    """Leave a parameter without state that had none: it had no gradient until then."""
    owners = {name.split(".", 2)[2] for name in saved if name.startswith("optim.")}
    for name, param in params.items():
        if name not in owners:
            optimizer.state.pop(param, None)


def _set_groups(optimizers: Sequence[Optimizer], saved: list[dict[str, Any]], path: Path) -> None:
    groups = [group for each in optimizers for group in each.param_groups]
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{path} was written with {len(saved)} groups of parameters in the optimizer, this one "
            f"has {len(groups)}. Their learning rates cannot be given back. Make "
            "the optimizer as it was made then."
        )
    for group, settings in zip(groups, saved, strict=True):
        for key, value in settings.items():
            was = group.get(key)
            if isinstance(was, Tensor):
                was.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(was, tuple) else value


@torch.no_grad()
def _make_state(optimizer: Optimizer) -> None:
    """Create the optimizer's state, by a step that changes no parameter; a load overwrites it."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in group["params"]:
            if param.requires_grad:
                param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
