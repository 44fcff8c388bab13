"""The training loop, from the first step of a process to its last.

It is handed what ``train/setup.py`` has built, and knows it by what it does: a task computes
losses, a stepper changes weights, a saver writes. How models are made and split it need not know.

On an accelerator, results are read one step late: while the device works on a step, the host reads
the one before. So every decision that depends on a result (drain, too many skipped steps) takes
effect one step after it, on all ranks alike, and the device never waits for the host.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from shardyard.checkpoint.save import Abandoned, Durable
from shardyard.config.formulas import Batch
from shardyard.config.resolved import DatasetMetadata, fingerprint
from shardyard.config.tasks import BITS_PER_BYTE, OF_TOKEN_LOSS, Metric, metrics_of, target_metric
from shardyard.log import warn
from shardyard.observe.metrics import StepTimes, log_samples
from shardyard.observe.trace import DATA
from shardyard.parallel.device import peak_memory_bytes
from shardyard.rundir.confusion import write_confusion
from shardyard.rundir.jsonl import EXPERT_LOAD, scores_of
from shardyard.tasks.base import GeneratedText
from shardyard.tasks.confusion import matrix_of, summarize_confusion
from shardyard.torch_private import compile_seconds
from shardyard.train.errors import RouterWatch, not_saved, scale_too_small, too_many_skipped
from shardyard.train.evaluate import Evaluation, evaluate, evaluation_due
from shardyard.train.generated_texts import generate_texts, generation_due, write_texts
from shardyard.train.hooks import WorkerPhase
from shardyard.train.loss_scaling import LEAST
from shardyard.train.optim import flip_bit, inject_nan
from shardyard.train.pauses import RunningClock
from shardyard.train.profile import NO_PROFILES, Profiling
from shardyard.train.schedule import OwnSchedule, lr_at
from shardyard.train.state import checkpoint_values
from shardyard.train.step import PendingResult, StepResult
from shardyard.train.training import Training
from shardyard.train.uploads import report_uploads

FINISHED = "finished"
DRAINED = "drained"


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A step that was given to the device and whose result has not been read."""

    pending: PendingResult
    step: int
    position: int
    """Samples read when it is done."""
    lr: float
    data_wait_s: float


class Loop:
    """The state of the loop that no checkpoint needs."""

    def __init__(self, training: Training, profiles: Profiling = NO_PROFILES) -> None:
        self.training = training
        self.profiles = profiles
        self.recipe = training.resolved.recipe
        self.progress = training.progress
        self.heartbeat = training.hooks.heartbeat
        self.saved_step = self.durable_step = training.durable_step
        self.snapshot_step = training.progress.step
        self.skipped_in_row = round(training.stepper.skipped_in_row.item())
        self.save_deferred = self._has_missed_save()
        self.abandoned: Abandoned | None = None
        self.clock = RunningClock()
        self.step_ended_at = self.clock.now()
        self.first_step = training.progress.step + 1
        self.in_flight: _Launched | None = None
        self.drain = False
        self.target_met = self._is_target(training.progress.scores)
        self.blocked_s = 0.0
        self.texts: tuple[int, list[GeneratedText]] = (-1, [])
        """Step of the last generated texts, and these."""
        self.limit_reported = False
        shape = training.resolved.shape
        self.router_watch = RouterWatch(
            experts=0 if shape is None else shape.num_experts,
            experts_per_token=0 if shape is None else shape.num_experts_per_tok,
            router_aux_loss=self.recipe.model.router_aux_loss,
        )
        self._profile_requested = False
        optim = self.recipe.optim
        self._batch = Batch.of(optim, devices=training.world_size)
        self._schedule = None if optim.schedule_module is None else OwnSchedule(optim)

    def run(self) -> str:
        """Step until the run is complete or a rank is to drain."""
        with self.profiles.polling(), self.clock.watching():
            # A loss cut this save off. It is made up before the next step can be lost as well.
            if self.save_deferred:
                self._save()
            while not self._should_stop():
                self.step()
            return self._end()

    @property
    def steps_done(self) -> int:
        """By this process, in this phase."""
        return self.progress.step + 1 - self.first_step

    def step(self) -> None:
        """One optimizer step, and what is due after it."""
        next_step = self.progress.step + 1
        began = self.clock.now()
        still_s = self.profiles.before_step(next_step, is_requested=self._profile_requested)
        self._exclude_from_step_time(still_s, began)
        is_unlike_others = self.steps_done == 0 or self.profiles.is_open
        self.heartbeat.begin_step(next_step, is_first=is_unlike_others)
        # The device gets the next step before the host reads the last one, so it never runs dry.
        launched = self._launch()
        self._read_result()
        self.in_flight = launched
        step = self.progress.step
        evaluation_due = self._evaluation_due(step)
        text_due = generation_due(
            step, every=self.recipe.task.generate_every, is_evaluated=evaluation_due
        )
        save_due = self.training.save_interval.is_due(step) or self.save_deferred
        kept = self.training.snapshots
        snapshot_due = kept is not None and kept.is_due(step)
        # Saves and evaluations depend on whether this very step was skipped, so it is read now.
        if launched.pending.is_ready or evaluation_due or text_due or save_due or snapshot_due:
            self._read_result()
        self.heartbeat.end_step()
        with self.profiles.outside_steps():
            # The evaluation first: it saves a best step, which the save below then finds saved.
            # A save is a snapshot too, so the snapshot comes last.
            if evaluation_due:
                self._evaluate()
            if text_due:
                self._generate()
            if save_due:
                self._save()
            if snapshot_due:
                self._take_snapshot()
            self._check_determinism(step)
            self._report_saves()
        began = self.clock.now()
        self._exclude_from_step_time(self.profiles.after_step(), began)
        # A run that drains ends anyway, and the checkpoint before is sound.
        if self.abandoned is not None and not self.drain:
            raise not_saved(self.abandoned, latest=self.durable_step)

    def _should_stop(self) -> bool:
        """Whether the run is complete, or is to drain and no better state is to be hoped for."""
        if not (self._is_complete() or self.drain):
            return False
        self._read_result()
        # While steps are skipped the state may be why, so a drain waits for a step that is taken.
        return self._is_complete() or not self.skipped_in_row or self.abandoned is not None

    def _is_complete(self) -> bool:
        is_read = self.progress.position >= self.training.resolved.samples
        return is_read or self.target_met or self.is_out_of_patience

    @property
    def is_out_of_patience(self) -> bool:
        """Whether ``run.patience`` evaluations in a row were no new best one."""
        patience = self.recipe.run.patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    def _launch(self) -> _Launched:
        """Give the next step to the device."""
        began = self.clock.now()
        with self.heartbeat.during(WorkerPhase.DATA), record_function(DATA):
            batches = next(self.training.loader)
        # The loader's seconds have pauses of the process in them, which this clock leaves out.
        wait_s = min(self.training.loader.wait_s, self.clock.now() - began)
        step = self.progress.step + 1
        self._report_data_limit(step)
        if self.recipe.observe.sample_ids:
            log_samples(step, batches, self.training.train_source)
        position = self.progress.position + self._batch.samples
        epoch = self.progress.position / self.training.train_source.num_samples
        # In steps of the first batch: the schedule follows the samples read on any devices.
        lr = self._batch.lr_factor * lr_at(
            position / self._batch.first, self.recipe.optim, epoch=epoch, own=self._schedule
        )
        # Asked once a step: the answer travels in its all-reduce, and all ranks act on one answer.
        drain = self.training.hooks.drain_requested()
        faults = self.training.hooks.faults
        faults.before_step(step)
        pending = self.training.stepper.run(
            batches,
            lr=lr,
            drain=drain,
            profile=self.profiles.is_requested,
            poisoned=step in faults.gradient_steps,
        )
        if step in faults.weight_steps:
            inject_nan(self.training.tensors.values())
        if step in faults.bit_steps:
            flip_bit(self.training.tensors.values())
        self.progress.step, self.progress.scores = step, {}
        self.progress.position = position
        return _Launched(pending=pending, step=step, position=position, lr=lr, data_wait_s=wait_s)

    def _report_data_limit(self, step: int) -> None:
        """Say once that steps wait for samples that cannot come any quicker."""
        limit = None if self.limit_reported else self.training.train_source.limit
        if limit is not None:
            self.limit_reported = True
            warn(limit)
            self.training.report("data_limit", step=step, reason=limit)

    def _read_result(self) -> None:
        """Read the result of the launched step, if any, write its line and act on it."""
        launched, self.in_flight = self.in_flight, None
        if launched is None:
            return
        result = launched.pending.read()
        now = self.clock.now()
        step_time_s, self.step_ended_at = now - self.step_ended_at, now
        self._report_pauses(launched.step)
        self.progress.tokens += result.tokens
        if launched.step == self.first_step:
            compiled = {}
            if self.training.resolved.recipe.model.compile is True:
                compiled = {"compile_s": compile_seconds()}
            self.training.report("first_step", step=launched.step, seconds=step_time_s, **compiled)
        else:
            # Without the first step: it compiles and allocates, and is no usual step.
            self.profiles.record_step_time(step_time_s)
        self._profile_requested = result.profile_requested
        self._write_line(launched, result, step_time_s)
        self.drain = self.drain or result.drain_requested
        self.skipped_in_row = result.skipped_in_row
        self._check_recoverable(launched.step, result)

    def _check_recoverable(self, step: int, result: StepResult) -> None:
        """End a run whose steps are skipped for a reason that does not go away."""
        is_too_small = self._has_least_scale(result)
        if result.skipped_in_row <= self.recipe.optim.max_skipped_steps and not is_too_small:
            return
        # A save that is under way may still become durable, and the error names the newest one.
        with self.heartbeat.during(WorkerPhase.WRITE):
            self.training.saver.wait()
        self._report_saves()
        if self.abandoned is not None:
            raise not_saved(self.abandoned, latest=self.durable_step)
        if is_too_small:
            assert result.loss_scale is not None
            raise scale_too_small(step, result.loss_scale, latest=self.durable_step)
        raise too_many_skipped(step, result, latest=self.durable_step)

    def _has_least_scale(self, result: StepResult) -> bool:
        """Whether gradients overflow though no smaller loss scale is worth trying."""
        scaling = self.training.stepper.scaling
        if scaling is None or not scaling.moves or result.loss_scale is None:
            return False
        return result.loss_scale <= LEAST and not math.isfinite(result.grad_norm)

    def _write_line(self, launched: _Launched, result: StepResult, step_time_s: float) -> None:
        line = self.training.metric_lines.step(
            step=launched.step,
            epoch=launched.position / self.training.train_source.num_samples,
            loss=result.loss,
            grad_norm=result.grad_norm,
            loss_scale=result.loss_scale,
            lr=launched.lr,
            tokens=self.progress.tokens,
            targets=result.targets,
            samples=self.progress.samples_before + launched.position,
            step_tokens=result.tokens,
            step_samples=self._batch.samples,
            times=StepTimes(
                step_time_s=step_time_s,
                data_wait_s=launched.data_wait_s,
                checkpoint_blocked_s=self.blocked_s,
            ),
            peak_memory_bytes=peak_memory_bytes(self.training.device),
            counted=result.counted,
        )
        self.blocked_s = 0.0
        self.training.write_line(line)
        load = result.counted.get(EXPERT_LOAD)
        reason = self.router_watch.after_step(launched.step, load)
        if reason is not None:
            self.training.report(
                "router_collapsed", step=launched.step, expert_load=load, reason=reason
            )

    def _evaluation_due(self, step: int) -> bool:
        read = range(self.progress.position - self._batch.samples, self.progress.position)
        return self.training.eval_source is not None and evaluation_due(
            step,
            task=self.recipe.task,
            is_last=self.progress.position >= self.training.resolved.samples,
            read=read,
            samples=self.training.train_source.num_samples,
        )

    def _evaluate(self) -> None:
        training, progress = self.training, self.progress
        assert training.eval_source is not None and isinstance(self.recipe.optim.micro_batch, int)
        started = self.clock.now()
        with self.heartbeat.during(WorkerPhase.EVALUATE), training.evaluation_weights():
            result = evaluate(
                training.task,
                training.eval_source,
                training.data.eval_parts,
                training.data.eval_sets,
                micro_batch=self.recipe.optim.micro_batch,
                mesh=training.mesh,
                device=training.device,
            )
            of_tasks = training.score_tasks()
        seconds = self.clock.now() - started
        prepared = training.resolved.data
        scores, facts = self._scores(result, prepared), prepared.by_name
        parts = {name: self._scores(each, facts[name]) for name, each in result.parts.items()}
        parts |= of_tasks
        epoch = progress.position / training.train_source.num_samples
        told = {"step": progress.step, "seconds": seconds, "targets": result.targets}
        training.report("evaluated", **told, **scores, **({"sources": parts} if parts else {}))
        line = {"step": progress.step, "epoch": round(epoch, 6), "eval": scores}
        line |= {"eval_sources": parts} if parts else {}
        training.write_line(line)
        if result.confusion is not None and training.rank == 0:
            self._write_confusion(result.confusion)
        all_scores: dict[str, float] = scores_of(line)
        # a best step is one that can be saved: finite, and not skipped
        by, metrics = target_metric(self.recipe.run.target), self._metrics
        is_finite = math.isfinite(result.loss) and math.isfinite(all_scores[by])
        is_counted = is_finite and not self.skipped_in_row
        is_best = is_counted and progress.is_best(all_scores[by], by=by, metric=metrics[by])
        progress.evaluations_since_best = 0 if is_best else progress.evaluations_since_best + 1
        progress.scores = {name: each for name, each in scores.items() if math.isfinite(each)}
        self.target_met = self._is_target(all_scores)
        if is_best and self.recipe.checkpoint.keep_best:
            self._save()
        self.step_ended_at += seconds  # the next step's time does not count it

    def _write_confusion(self, counts: Tensor) -> None:
        """Write down which classes the evaluation just done took for which others."""
        names = list(self.training.task.class_names(self.training.resolved))
        # a model from elsewhere may have more classes than the data
        names += [str(number) for number in range(len(names), len(matrix_of(counts)))]
        summary = summarize_confusion(counts, names, step=self.progress.step)
        write_confusion(self.training.run_dir, summary)

    def _generate(self) -> None:
        """Generate text from the weights of the step just done."""
        started = self.clock.now()
        self.texts = self.progress.step, generate_texts(self.training)
        seconds = self.clock.now() - started
        write_texts(self.training, self.texts[1], seconds=seconds)
        self.step_ended_at += seconds

    def _scores(self, result: Evaluation, data: DatasetMetadata) -> dict[str, float]:
        """Metrics to report of the validation split of a dataset."""
        per_byte = self.training.task_row.bits_per_byte(
            result.loss,
            targets=result.targets,
            nbytes=None if data.too_long else data.eval_bytes,  # some of them are not predicted
        )
        scores = result.scores | ({} if per_byte is None else {BITS_PER_BYTE: per_byte})
        if self.recipe.task.loss is not None:
            scores = {name: each for name, each in scores.items() if name not in OF_TOKEN_LOSS}
        return scores

    @property
    def _metrics(self) -> dict[str, Metric]:
        data = self.recipe.data
        return metrics_of(self.recipe.task, data.eval_sets, data.eval_tasks)

    def _is_target(self, scores: Mapping[str, float]) -> bool:
        """Whether an evaluation is all that run.target asks for."""
        target = self.recipe.run.target
        targets = self._metrics
        return target is not None and all(
            name in scores and targets[name].is_reached(scores[name], value)
            for name, value in target.items()
        )

    def _save(self) -> None:
        """Start a checkpoint of the step just done; training continues while it is written.

        While steps are skipped the state may be why, so the save waits for one that is taken. After
        the last step of a run there is none to wait for: then no older checkpoint is removed for
        it.
        """
        training, step = self.training, self.progress.step
        self.save_deferred = self.skipped_in_row > 0 and not self._is_complete()
        if self.saved_step == step or self.save_deferred:
            return
        started = self.clock.now()
        with self.heartbeat.during(WorkerPhase.SAVE):
            training.stepper.synchronize()
            blocked_s = training.saver.save(
                step,
                training.tensors,
                self._values(),
                is_best=self._is_best(step),
                keep_older=self.skipped_in_row > 0,
            )
        blocked_s = min(blocked_s, self.clock.now() - started)
        training.report("checkpoint_started", step=step, blocked_s=blocked_s)
        training.save_interval.taken(step)
        training.save_interval.blocked_s.append(blocked_s)
        self.saved_step = self.snapshot_step = step
        self._count_blocked(blocked_s)

    def _has_missed_save(self) -> bool:
        """Whether a save was due at or before the snapshot that the run went on from."""
        step, newest = self.progress.step, self.durable_step
        is_due = self.training.save_interval.was_due(step, latest=newest)
        return is_due or (step > newest and self._is_best(step))

    def _is_best(self, step: int) -> bool:
        return self.recipe.checkpoint.keep_best and self.progress.best_step == step

    def _check_determinism(self, step: int) -> None:
        """Compare what all ranks compute of one micro-batch, where that is due."""
        every = self.recipe.elastic.check_bits_every
        if every is None or step % every:
            return
        started = self.clock.now()
        with self.heartbeat.during(WorkerPhase.EVALUATE):
            self.training.check_bits(self.training, step)
        self.step_ended_at += self.clock.now() - started

    def _take_snapshot(self) -> None:
        """Copy the state into the agent's memory, unless a save has just done so."""
        training, step = self.training, self.progress.step
        # A restart would continue from this snapshot, and of a skipped step the state may be why.
        if self.snapshot_step == step or self.skipped_in_row:
            return
        assert training.snapshots is not None
        started = self.clock.now()
        with self.heartbeat.during(WorkerPhase.SAVE):
            training.stepper.synchronize()
            blocked_s = training.snapshots.take(step, training.tensors, self._values())
        self._count_blocked(min(blocked_s, self.clock.now() - started))
        self.snapshot_step = step

    def _values(self) -> dict[str, Any]:
        """Return the values that are saved with the tensors."""
        training, scaling = self.training, self.training.stepper.scaling
        exact = training.stepper.exact
        return checkpoint_values(
            self.progress,
            seed=self.recipe.run.seed,
            # This waits for the device, as the copy of the state does anyway.
            skipped_in_row=round(training.stepper.skipped_in_row.item()),
            loss_scale=None if scaling is None else scaling.values(),
            exponents=None if exact is None else exact.values(),
            fingerprint=fingerprint(
                training.resolved,
                training.task.computation.fixed_settings,
                training.task.computation.code_digests,
            ),
        )

    def _count_blocked(self, seconds: float) -> None:
        """Count a copy apart from the steps."""
        self.blocked_s += seconds
        self.step_ended_at += seconds

    def _exclude_from_step_time(self, seconds: float, started_at: float) -> None:
        """Count what a profile took apart from the steps, without a pause in it."""
        self.step_ended_at += min(seconds, self.clock.now() - started_at)

    def _report_pauses(self, step: int) -> None:
        for pause in self.clock.take_pauses():
            self.training.report("paused", step=step, what=pause.what, seconds=pause.seconds)

    def _report_saves(self) -> None:
        """Report what the background writer has finished; raises what went wrong there."""
        report_uploads(self.training)
        with self.heartbeat.during(WorkerPhase.WRITE):  # it may wait for the slowest rank's
            saves = self.training.saver.poll()
        for save in saves:
            if isinstance(save, Durable):
                self.durable_step = save.step
                told = {name: value for name, value in asdict(save).items() if value is not None}
                self.training.report("checkpoint_durable", **told)
                if self.training.callbacks is not None:
                    folder = self.training.run_dir.checkpoint(save.step)
                    self.training.callbacks.saved(save.step, folder)
                self.training.save_interval.counts_s.append(save.seconds)
                self.training.save_interval.learn(self.progress.step)
            else:
                self.training.report("checkpoint_abandoned", **asdict(save))
                self.abandoned = save

    def _end(self) -> str:
        """Make the last step durable; where a drain cannot, the checkpoint before it stays."""
        self.profiles.end(is_draining=not self._is_complete(), is_last=self.training.is_last)
        # FINISHED promises that the last step is durable, so the end waits for the writer.
        self._save()
        self.heartbeat.enter(WorkerPhase.WRITE)
        self.training.saver.wait()
        self._report_saves()
        self._report_pauses(self.progress.step)
        if not self._is_complete():
            return DRAINED
        if self.abandoned is not None:
            raise not_saved(self.abandoned, latest=self.durable_step)
        return FINISHED
