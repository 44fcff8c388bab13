"""Time of the pass that computes a reference's log-probabilities before the first step.

Preference tuning runs its model forward, once, over each pair that the run reads
(``train/reference.py``). A pipeline takes these micro-batches one at a time through all stages.
"""

from dataclasses import dataclass

from shardyard.config.resolved import DatasetMetadata
from shardyard.config.schema.recipe import Recipe
from shardyard.config.tasks import task_row
from shardyard.hardware.cluster import ClusterHardware
from shardyard.planner.calibration import Calibration
from shardyard.planner.dispatch import Work
from shardyard.planner.step_time import StepModel
from shardyard.planner.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """Samples that the pass reads."""

    train: int
    eval: int | None
    """None: not known before the data is prepared."""

    @property
    def words(self) -> str:
        """Say what is read: ``forward passes over 1,200 samples before the first step``."""
        more = "" if self.eval is not None else ", without those of validation, not known yet"
        known = self.train + (self.eval or 0)
        return f"forward passes over {known:,} samples before the first step{more}"

    def seconds(
        self, work: Work, cluster: ClusterHardware, calibration: Calibration | None = None
    ) -> float:
        """Return the time of the pass on a cluster."""
        assert isinstance(work, Workload), "answers are text"
        model = StepModel(
            work.shape, cluster, seq_len=work.seq_len, formats=work.formats,
            techniques=work.techniques, trained=work.trained, calibration=calibration,
        )  # fmt: skip
        at_once = work.micro_batch * work.layout.data_ranks
        passes = sum(-(-samples // at_once) for samples in (self.train, self.eval or 0))
        return passes * model.forward_s(work.layout, micro_batch=work.micro_batch)


def reference_of(
    recipe: Recipe, work: Work, *, steps: int | None, data: DatasetMetadata | None
) -> ReferencePass | None:
    """Return the pass of a run; None: it has none, or its length is not known yet.

    Args:
        data: Prepared data; None: not prepared yet.
    """
    row, loss_type = task_row(recipe.task.name), recipe.task.loss_type
    if not row.compares_answers or row.gives_reward or loss_type == "orpo" or steps is None:
        return None
    read = steps * work.global_batch
    if data is None:
        return ReferencePass(train=read, eval=None)
    train, held_out = (data.num_samples(split, work.seq_len) for split in ("train", "eval"))
    return ReferencePass(train=min(read, train), eval=held_out)


def predicted_pass(
    recipe: Recipe, work: Work, cluster: ClusterHardware | None, calibration: Calibration | None,
    *, steps: int | None, data: DatasetMetadata | None,
) -> tuple[float, str]:  # fmt: skip
    """Return the seconds of the pass, and what it reads; 0 where there is none, or no speed."""
    found = reference_of(recipe, work, steps=steps, data=data)
    if found is None or cluster is None:
        return 0.0, ""
    return found.seconds(work, cluster, calibration), found.words
