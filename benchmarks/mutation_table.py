"""The harmful changes of ``mutations.py``, by what they break."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One change of one file."""

    name: str
    file: str
    """Below ``src/shardyard``."""
    old: str
    """Stands there once."""
    new: str
    tests: tuple[str, ...]
    """Files with tests of `make test`."""


_PLAIN = ("tests/train/test_plain_loop.py",)
_DUE = ("tests/train/test_what_is_due.py",)
_SKIPPED = ("tests/train/test_skipped_steps.py",)
_OPTIM = ("tests/train/test_optim.py",)
_SCHEDULE = ("tests/train/test_schedule.py",)
_DROPOUT = ("tests/models/test_dropout.py",)
_DURABLE = ("tests/checkpoint/test_durability.py",)
_MASKED = ("tests/tasks/test_masked_lm.py",)
_MEMORY = ("tests/planner/test_memory.py",)
_FAILURES = ("tests/planner/test_failures.py", "tests/planner/test_failure_rates.py")
_ORDER = ("tests/data/test_order.py",)
_LOADER = ("tests/data/test_loader.py",)
_VERIFY = ("tests/checkpoint/test_verify.py",)
_COLLECTIVES = ("tests/planner/test_collectives.py",)
_LEDGER = ("tests/launchers/test_ledger.py",)
_LEGALITY = ("tests/config/rules/test_layout.py",)
_READINESS = ("tests/node/test_preflight.py",)
_RECEIVE = ("tests/transfer/test_receive.py",)
_SNAPSHOT = ("tests/checkpoint/snapshots/test_take.py",)
_TAKEN_UP = ("tests/train/test_resume.py",)

MUTATIONS = (
    # --- what earlier tests did not notice ---------------------------------------------------
    Mutation("clip turned round", "train/step.py", "self._grad_clip).clamp(min=1.0)",
             "self._grad_clip).clamp(max=1.0)", _PLAIN),
    Mutation("learning rate one step late", "train/loop.py", "position / self._batch.first,",
             "max(1, step - 1),", _PLAIN),
    Mutation("dropout without its scale", "models/random.py",
             "* (1.0 / (1.0 - self._drop))", "* 1.0", _DROPOUT),
    Mutation("one mask for all layers", "models/random.py",
             'key_of(seed, "dropout", module_name)', 'key_of(seed, "dropout", "")', _DROPOUT),
    Mutation("dropout while evaluating", "models/random.py", "if not module.training:",
             "if False:", _DROPOUT),
    Mutation("evaluation in training mode", "train/evaluate.py", "task.model.eval()",
             "task.model.train()", (*_DROPOUT, *_PLAIN, *_DUE)),
    Mutation("best is the worst", "train/state.py", "not metric.is_better(score, before)",
             "metric.is_better(score, before)", _DUE),
    Mutation("saves one step late", "checkpoint/save_interval.py",
             "return latest < step - step % self.every",
             "return latest < step - 1 - (step - 1) % self.every", _DUE),
    Mutation("eval_every_epochs ignored", "train/evaluate.py",
             "every = task.eval_every_epochs * samples", "every = 1.0 * samples",
             ("tests/train/test_evaluation_due.py",)),
    Mutation("latest before the name", "checkpoint/writer.py",
             "        order.scratch.rename(order.folder)\n"
             "        flush_folder(order.checkpoints_dir)\n"
             "        mark_latest(order.checkpoints_dir, order.step)\n",
             "        mark_latest(order.checkpoints_dir, order.step)\n"
             "        order.scratch.rename(order.folder)\n"
             "        flush_folder(order.checkpoints_dir)\n", _DURABLE),
    Mutation("shards not flushed", "checkpoint/verify.py",
             "        file.flush()\n        os.fsync(file.fileno())\n", "        file.flush()\n",
             _DURABLE),
    Mutation("folder of checkpoints not flushed", "checkpoint/writer.py",
             "        order.scratch.rename(order.folder)\n"
             "        flush_folder(order.checkpoints_dir)\n",
             "        order.scratch.rename(order.folder)\n", _DURABLE),
    Mutation("new folder not flushed", "checkpoint/writer.py",
             "        flush_folder(order.scratch)\n", "", _DURABLE),
    Mutation("ledger not flushed", "launchers/ledger.py",
             "                file.flush()\n                os.fsync(file.fileno())\n",
             "                file.flush()\n", (*_LEDGER, *_DURABLE)),
    Mutation("masking ignores the seed", "tasks/masked_lm.py",
             'key_of(self.seed, "masking", self.split)', 'key_of(0, "masking", self.split)',
             _MASKED),
    Mutation("masking ignores the split", "tasks/masked_lm.py",
             'key_of(self.seed, "masking", self.split)', 'key_of(self.seed, "masking", "")',
             _MASKED),
    Mutation("micro-batches in flight not counted", "planner/memory.py",
             "    flying = in_flight(w, stage)\n    if w.techniques.offload",
             "    flying = 1.0\n    if w.techniques.offload", _MEMORY),
    Mutation("states not split over cp", "planner/state_memory.py",
             "return w.layout.dp_shard * w.layout.cp", "return w.layout.dp_shard", _MEMORY),
    Mutation("Batch: exit code of the first attempt", "launchers/aws_batch/status.py",
             "(attempts[-1], job)", "(attempts[0], job)",
             ("tests/launchers/test_aws_batch_status.py",)),
    Mutation("failures that last too short", "planner/failures.py",
             "replacement_s=REPLACEMENT_HOURS * HOUR_S", "replacement_s=REPLACEMENT_HOURS",
             _FAILURES),
    Mutation("warm-up counts in the speed", "report/against_plan.py", "return rest or warm",
             "return warm + rest", ("tests/report/test_against_plan.py",)),
    Mutation("Slurm's time rounded down", "launchers/slurm/script.py",
             "if is_of_block else math.ceil(minutes)", "if is_of_block else math.floor(minutes)",
             ("tests/launchers/test_slurm_script.py",)),
    Mutation("HYBRID_SHARD forgets tp and cp", "config/rules/layout.py",
             "devices_per_node // (parallel.cp * parallel.tp)", "devices_per_node", _LEGALITY),
    Mutation("prefetch in the wrong order", "parallel/fsdp.py", "list(reversed(before)) or",
             "list(before) or", ("tests/parallel/test_order.py",)),
    # --- a step, and what is due after it ----------------------------------------------------
    Mutation("loss divided by this rank's targets twice", "train/step.py",
             "loss = totals.loss_sum / divisor",
             "loss = totals.loss_sum / divisor / 2", _PLAIN),
    Mutation("norm not divided", "train/step.py", "square_sum.sqrt() / divisor",
             "square_sum.sqrt()", _PLAIN),
    Mutation("a step that is not finite is taken", "train/step.py",
             "not_finite = ~(torch.isfinite(loss) & torch.isfinite(norm))",
             "not_finite = torch.zeros_like(loss, dtype=torch.bool)", _SKIPPED),
    Mutation("skipped steps are not counted in a row", "train/step.py",
             "(self.skipped_in_row + 1.0) * (is_fault | overflowed)",
             "1.0 * (is_fault | overflowed)", _SKIPPED),
    Mutation("a target of one of two metrics is enough", "train/loop.py",
             "return target is not None and all(", "return target is not None and any(",
             _DUE),
    Mutation("the last step is not saved", "train/loop.py",
             "        self._save()\n        self.heartbeat.enter(WorkerPhase.WRITE)\n",
             "        self.heartbeat.enter(WorkerPhase.WRITE)\n", _DUE),
    Mutation("warm-up begins at nothing", "train/schedule.py", "return peak * step / warmup",
             "return peak * (step - 1) / warmup", (*_SCHEDULE, *_PLAIN)),
    Mutation("cosine ends at nothing", "train/schedule.py",
             "return peak * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)",
             "return peak * share", _SCHEDULE),
    # --- data ------------------------------------------------------------------------------------
    Mutation("one order for all epochs", "data/order.py", "mix(mix(seed + GOLDEN) + epoch)",
             "mix(seed + GOLDEN)", _ORDER),
    Mutation("the order ignores the seed", "data/order.py", "mix(mix(seed + GOLDEN) + epoch)",
             "mix(mix(GOLDEN) + epoch)", _ORDER),
    Mutation("fewer rounds than two", "data/order.py", "_NUM_ROUNDS = 8", "_NUM_ROUNDS = 1",
             _ORDER),
    Mutation("the last sample is lost", "data/samples.py",
             "-(-(shards.num_tokens - 1) // seq_len)", "(shards.num_tokens - 1) // seq_len",
             _LOADER),
    # --- checkpoints, exports, what is fetched -------------------------------------------------
    Mutation("a list of files lists itself", "io/digests.py",
             "        if path.is_file() and path != folder / COMPLETE\n",
             "        if path.is_file()\n", ("tests/io/test_complete.py",)),
    Mutation("a name may lead out of its folder", "io/digests.py",
             'if any(part in ("", ".", "..") for part in name.split("/")):',
             "if False:", ("tests/io/test_complete.py", *_RECEIVE)),
    Mutation("a wrong file is kept", "transfer/download.py", "        if found == expected:",
             "        if found.bytes == expected.bytes:", _RECEIVE),
    Mutation("a half file begins anew", "transfer/download.py", 'with part.open("a+b") as file:',
             'with part.open("w+b") as file:', _RECEIVE),
    Mutation("pruning takes the best", "checkpoint/retention.py",
             '_mark(checkpoints_dir / "best", step)', '_mark(checkpoints_dir / "latest", step)',
             ("tests/checkpoint/test_retention.py",)),
    Mutation("two trainings hold one lease", "io/files.py",
             "fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX", "fcntl.LOCK_SH",
             ("tests/rundir/test_state.py",)),
    # --- averages and snapshots ----------------------------------------------------------------
    Mutation("averages follow skipped steps", "train/ema.py",
             "is_taken = (~skip.bool()).double()", "is_taken = torch.ones_like(skip).double()",
             ("tests/train/test_ema.py",)),
    Mutation("averages hear of no skipped step", "train/step.py",
             "follow(skip=not_finite | is_empty)", "follow(skip=torch.zeros_like(not_finite))",
             _SKIPPED),
    Mutation("a snapshot while steps are skipped", "train/loop.py",
             "if self.snapshot_step == step or self.skipped_in_row:",
             "if self.snapshot_step == step:", _SKIPPED),
    Mutation("an older snapshot before a newer checkpoint", "train/resume.py",
             "if snapshot is not None and snapshot.snapshot_id.step >= durable_step:",
             "if snapshot is not None:", _TAKEN_UP),
    Mutation("an older snapshot before the checkpoint that is sound", "train/resume.py",
             "(chosen is None or chosen.step <= snapshot.snapshot_id.step)", "True", _TAKEN_UP),
    Mutation("the newest snapshot may be overwritten", "checkpoint/snapshots/take.py",
             "not in (self._of_save, self._latest)]", "is not self._of_save]", _SNAPSHOT),
    Mutation("what is not finite is the newest snapshot", "checkpoint/snapshots/take.py",
             "        found = not_finite(slot.shards)\n",
             "        found = not_finite(slot.shards)\n        self._latest = slot\n", _SNAPSHOT),
    Mutation("a lost best is remembered", "train/resume.py",
             "if saved is not None and recipe.checkpoint.keep_best:", "if False:", _DUE),
    Mutation("a lost best is not saved again", "train/loop.py",
             "return is_due or (step > newest and self._is_best(step))", "return is_due", _DUE),
    Mutation("the mark before the lengths", "checkpoint/snapshots/slot.py",
             "    memory[len(_MARK) : HEAD_BYTES] = packed[len(_MARK) :]\n"
             "    memory[: len(_MARK)] = _MARK\n",
             "    memory[: len(_MARK)] = _MARK\n"
             "    memory[len(_MARK) : HEAD_BYTES] = packed[len(_MARK) :]\n", _SNAPSHOT),
    Mutation("a new generation counts old copies", "checkpoint/snapshots/protocol.py",
             "            self._fields[place] = -1\n", "            pass\n", _SNAPSHOT),
    # --- losses and gradients -----------------------------------------------------------------
    Mutation("ignored targets count", "parallel/loss.py", "counts_N = targets_N != IGNORED",
             "counts_N = targets_N == targets_N", ("tests/parallel/test_vocab_loss.py",)),
    Mutation("the gradient forgets the target", "parallel/loss.py",
             "-weight_N[:, None])", "0.0 * weight_N[:, None])",
             ("tests/parallel/test_vocab_loss.py",)),
    Mutation("padding routes tokens", "models/moe.py",
             "lengths_B = lengths_B * (samples_B >= 0)",
             "lengths_B = lengths_B * (samples_B >= -1)", ("tests/models/test_moe.py",)),
    Mutation("replicas are counted once each", "parallel/gradients.py",
             "_squares(found) / number for", "_squares(found) for",
             ("tests/parallel/test_gradients.py", "tests/distributed/test_layouts.py")),
    # --- the planner ----------------------------------------------------------------------------
    Mutation("1F1B holds one micro-batch less", "planner/stages.py",
             "return min(passes, pp - stage)", "return min(passes, pp - stage - 1)",
             ("tests/planner/test_stages.py", *_MEMORY)),
    Mutation("attention counted once", "planner/kernels.py", "matmul + 12 * pairs",
             "matmul + 4 * pairs", ("tests/planner/test_flops.py",)),
    Mutation("Young without its two", "config/formulas.py", "math.sqrt(2 * blocking_s * mtbf_s)",
             "math.sqrt(blocking_s * mtbf_s)", _FAILURES),
    Mutation("an all-to-all sends to itself", "planner/collectives.py",
             "neighbours = min(size, group.per_node) - 1", "neighbours = min(size, group.per_node)",
             _COLLECTIVES),
    Mutation("a tree of as many hops as nodes", "planner/collectives.py",
             "doublings = (group.nodes - 1).bit_length()", "doublings = group.nodes - 1",
             _COLLECTIVES),
    Mutation("one spare too few", "planner/failure_rates.py", "    return spares\n\n\ndef require",
             "    return max(0, spares - 1)\n\n\ndef require", _FAILURES),
    # --- launching --------------------------------------------------------------------------------
    Mutation("a torn line swallows the next", "launchers/ledger.py",
             '("\\n" if torn else "")', '""', _LEDGER),
    Mutation("a terminal is acted upon", "io/sanitize.py",
             "return _ACTING.sub(lambda match: ascii(match[0])[1:-1], text)", "return text",
             ("tests/io/test_sanitize.py",)),
    Mutation("a node of another attempt is believed", "node/preflight.py",
             "return replace(report, asks=tuple(report.asks)) if is_whole else None",
             "return replace(report, asks=tuple(report.asks), attempt=0) if is_whole else None",
             _READINESS),
    Mutation("a drained run has failed", "errors.py", "EXIT_DRAINED = 143", "EXIT_DRAINED = 1",
             ("tests/node/test_node.py", "tests/launchers/test_slurm_states.py",
              "tests/launchers/test_aws_batch_status.py")),
    Mutation("a lost node is no reason to start again", "errors.py", "exit_code = 75",
             "exit_code = 1", ("tests/test_errors.py",)),
)  # fmt: skip
