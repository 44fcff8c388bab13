"""One process's part of a run, as the loop is handed it: built by ``train/setup.py``."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.save_interval import Interval
from shardyard.checkpoint.staging_protocol import PersistentStaging
from shardyard.checkpoint.upload_protocol import UploadQueue
from shardyard.config.resolved import Resolved
from shardyard.config.tasks import TaskRow
from shardyard.data.loader import Loader, Samples
from shardyard.observe.callbacks import Callbacks
from shardyard.observe.metrics import MetricLines, Sink
from shardyard.parallel.mesh import Mesh
from shardyard.rundir.layout import RunDir
from shardyard.tasks.base import Task, TaskData
from shardyard.tasks.token_losses import LanguageModel
from shardyard.train.ema import WeightEma
from shardyard.train.eval_tasks import EvalTasks, score_tasks
from shardyard.train.hooks import Hooks
from shardyard.train.state import Progress
from shardyard.train.step import Stepper


@dataclass(kw_only=True)
class Training:
    """One process's part of a run, ready to step."""

    run_dir: RunDir
    resolved: Resolved
    """Resolved recipe of the phase that is trained, where the run has several."""
    is_last: bool
    """Whether the run is over when this is trained."""
    hooks: Hooks
    rank: int
    world_size: int
    device: torch.device
    mesh: Mesh
    task: Task
    task_row: TaskRow
    stepper: Stepper
    ema: WeightEma | None
    """Averages of the weights; None: the recipe asks for none."""
    data: TaskData
    eval_tasks: EvalTasks | None
    """Tasks to score at validations; None: the recipe names none."""
    loader: Loader
    saver: Saver
    uploads: UploadQueue | None
    """Uploads to checkpoint.to, of all phases; None: the recipe asks for none."""
    save_interval: Interval
    """Says when a checkpoint is due."""
    snapshots: PersistentStaging | None
    """None: the recipe asks for none."""
    tensors: dict[str, Tensor]
    """Tensors of a checkpoint, named once: FSDP shows other parameters while they are gathered."""
    control: dist.ProcessGroup
    """A gloo group for what is not training: meeting before a load, gathering facts."""
    progress: Progress
    durable_step: int
    """Step of the newest checkpoint when this process began; 0: there was none."""
    metric_lines: MetricLines
    sinks: list[Sink]
    """Empty except on rank 0."""
    callbacks: Callbacks | None
    """Functions of the user's own; None: none, or another rank."""
    check_bits: "Callable[[Training, int], None]"
    """Asks, after a step, whether all ranks compute the same bits."""

    @property
    def train_source(self) -> Samples:
        """Samples that are trained on."""
        return self.data.train

    @property
    def eval_source(self) -> Samples | None:
        """Samples of the validation split; None: there is none."""
        return self.data.eval

    def report(self, kind: str, **fields: Any) -> None:
        """Write an event, on the one rank that does."""
        if self.hooks.events is not None:
            self.hooks.events.write(kind, **fields)

    def gather(self, fact: Any) -> list[Any]:
        """One small fact of every rank, in order of rank, on every rank."""
        by_rank: list[Any] = [None] * self.world_size
        # On gloo and the host: on a device it would wait behind the step that is under way.
        dist.all_gather_object(by_rank, fact, group=self.control)
        return by_rank

    def score_tasks(self) -> dict[str, dict[str, float]]:
        """Score the tasks of ``data.eval_tasks``, by name. All ranks call it together."""
        if self.eval_tasks is None:
            return {}
        assert isinstance(self.task.computation, LanguageModel)  # checked: others have no logits
        return score_tasks(
            self.eval_tasks,
            self.task.computation,
            self.resolved,
            mesh=self.mesh,
            device=self.device,
            heartbeat=self.hooks.heartbeat,
        )

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """While it is open, the model is what evaluations and exports take of it."""
        ema = self.ema
        return self.stepper.evaluation_weights() if ema is None else ema.swapped_in()

    def close(self) -> None:
        """Let go of files and threads, so that the process group can end."""
        self.loader.close()
        # Its thread may be in a collective, and must be out of it before the group ends.
        self.saver.close()
        if self.snapshots is not None:
            self.snapshots.close()
        for sink in self.sinks:
            sink.close()
        if self.callbacks is not None:
            self.callbacks.close()

    def write_texts(self, step: int, texts: Sequence[Mapping[str, str]]) -> None:
        """Give generated texts to the sinks of this rank."""
        for sink in self.sinks:
            sink.write_texts(step, texts)

    def write_line(self, line: dict[str, Any]) -> None:
        """Give a line of metrics to the sinks and callbacks of this rank."""
        for sink in self.sinks:
            sink.write(line)
        if self.callbacks is not None:
            self.callbacks.write(line)
