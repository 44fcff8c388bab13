"""Table of tasks to train, ours and those of packages: one row for each, without torch.

The file in ``tasks/`` that a row names does the work. All code that needs a property of a
task asks its row, and never compares its name.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from shardyard.config.schema.base import Section

from shardyard.errors import RequestError
from shardyard.families.dimensions import Labelled
from shardyard.plugins import PlugIn, load_entry_point, load_object, plug_in_named

EVAL_TASK_METRICS = {
    **dict.fromkeys(("acc", "acc_norm", "acc_bytes"), True),
    **dict.fromkeys(("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"), False),
}
"""Metrics of tasks in the format of lm-evaluation-harness, which have some of them -> whether
higher is better."""
BITS_PER_BYTE = "bits_per_byte"
"""Metric that evaluations report in addition to those of their task."""
OF_TOKEN_LOSS = ("perplexity", BITS_PER_BYTE)
"""Metrics that are the mean cross-entropy of a token in another unit."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number that an evaluation comes to."""

    is_better_higher: bool = False
    is_of_logits: bool = False
    """Whether it needs logits: a module of one's own returns only a loss, which is not enough."""

    def is_reached(self, value: float, target: float) -> bool:
        """Whether a value is at a target or beyond it; one that is no number never is."""
        return value >= target if self.is_better_higher else value <= target

    def is_better(self, value: float, than: float) -> bool:
        """Whether a value is better than another, and not just as good."""
        return value > than if self.is_better_higher else value < than


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """Facts about a task for a recipe's check, the planner and the programs."""

    code: str
    """module:class of its ``tasks.base.Task``."""
    prepare: str
    """module:function that writes its data set, as ``data.prepare.prepare``."""
    metrics: Mapping[str, Metric]
    """Metrics that its code scores an evaluation by, by name; the loss first."""
    is_causal: bool | None
    """Whether its models see only earlier tokens; None: it trains either kind."""
    labelled: Labelled | None = None
    """Unit of its data that has a label, which the head predicts; None: the head predicts tokens.
    """
    auto_class: str | None = None
    """Class of transformers that opens a model of no family here with the task's head; None: only
    known families learn the task.
    """
    reads: Literal["text", "images"] = "text"
    """Kind of data in its samples."""
    judges_pairs: bool = False
    """Whether a sample is two texts, of which its models say if one follows the other."""
    data_formats: tuple[str, ...] = ()
    """``data.format``s that prepare its data, the usual one first; none: any does."""
    continues_text: bool = False
    """Whether a model that has learnt it can write on from a prompt."""
    predicts_every_token: bool = False
    """Whether a mean loss of tokens is one of the whole text, so that it can be reported per
    byte.
    """
    reads_learnt: bool = False
    """Whether it learns only what data of dialogues mark."""
    sums_exactly: bool = False
    """Whether ``precision.reduce=exact`` has been held to it."""
    accepts_own_loss: bool = False
    """Whether ``task.loss`` and ``task.metrics`` get the outputs of its models."""
    compares_answers: bool = False
    """Whether its data has pairs of answers, of which one is preferred."""
    gives_reward: bool = False
    """Whether its head gives a text one number, its reward."""
    reads_items: bool = False
    """Whether training reads items of ``data.module`` by number; else the module gives text."""
    reads_eval_sets: bool = False
    """Whether it scores each set of ``data.eval_sets``."""
    settings: "type[Section] | None" = None
    """Section ``task.<name>`` of a task that a package adds."""

    @property
    def targets(self) -> Mapping[str, Metric]:
        """Metrics that ``run.target`` accepts, with bits a byte if every token is predicted."""
        return {**self.metrics, **({BITS_PER_BYTE: Metric()} if self.predicts_every_token else {})}

    def bits_per_byte(self, loss: float, *, targets: int, nbytes: int | None) -> float | None:
        """A held-out loss in nats a token as bits a byte of the text: it compares tokenizers, too.

        The tokens that end documents count, their bytes do not. None: not every token is predicted,
        or the bytes are not known.

        Args:
            targets: Tokens that were predicted: the first of a text is not, nor of each document
                where documents are kept apart.
            nbytes: Of the same text, as UTF-8; None or 0: not known.
        """
        if not self.predicts_every_token or not nbytes:
            return None
        return loss / math.log(2) * targets / nbytes


_BETTER_HIGHER = Metric(is_better_higher=True, is_of_logits=True)
_TEXT = "shardyard.data.text_datasets:prepare_text"
_OF_TOKENS = {"loss": Metric(), "perplexity": Metric()}
_OF_PAIRS = {
    "loss": Metric(),
    "accuracy": _BETTER_HIGHER,
    "margin": _BETTER_HIGHER,
    "chosen_reward": _BETTER_HIGHER,
    "rejected_reward": Metric(is_of_logits=True),
}

TASKS: dict[str, TaskRow] = {
    "causal_lm": TaskRow(
        code="shardyard.tasks.causal_lm:CausalLM",
        prepare=_TEXT,
        metrics=_OF_TOKENS,
        is_causal=True,
        auto_class="AutoModelForCausalLM",
        continues_text=True,
        predicts_every_token=True,
        reads_learnt=True,
        sums_exactly=True,
        accepts_own_loss=True,
        reads_items=True,
        reads_eval_sets=True,
    ),
    "masked_lm": TaskRow(
        code="shardyard.tasks.masked_lm:MaskedLM",
        prepare=_TEXT,
        metrics={
            **_OF_TOKENS,
            "masked_accuracy": Metric(is_better_higher=True, is_of_logits=True),
        },
        is_causal=False,
        auto_class="AutoModelForMaskedLM",
        accepts_own_loss=True,
        reads_items=True,
        reads_eval_sets=True,
    ),
    "bert_pretraining": TaskRow(
        code="shardyard.tasks.bert_pretraining:BertPretraining",
        prepare=_TEXT,
        metrics={
            **_OF_TOKENS,
            "masked_accuracy": Metric(is_better_higher=True, is_of_logits=True),
            "next_sentence_accuracy": Metric(is_better_higher=True, is_of_logits=True),
        },
        is_causal=False,
        judges_pairs=True,
        data_formats=("sentences", "documents", "bert_h5"),
    ),
    "sequence_classification": TaskRow(
        code="shardyard.tasks.labels:SequenceClassification",
        prepare="shardyard.data.labels.prepare:prepare_labelled",
        metrics={
            "loss": Metric(),
            **dict.fromkeys(("accuracy", "f1", "f1_macro", "matthews"), _BETTER_HIGHER),
            "mse": Metric(is_of_logits=True),
            **dict.fromkeys(("pearson", "spearman"), _BETTER_HIGHER),
        },
        is_causal=None,
        labelled="samples",
        auto_class="AutoModelForSequenceClassification",
        data_formats=("by_suffix",),
    ),
    "token_classification": TaskRow(
        code="shardyard.tasks.labels:TokenClassification",
        prepare="shardyard.data.labels.prepare:prepare_labelled",
        metrics={
            "loss": Metric(),
            **dict.fromkeys(("accuracy", "precision", "recall", "f1"), _BETTER_HIGHER),
        },
        is_causal=None,
        labelled="tokens",
        auto_class="AutoModelForTokenClassification",
        data_formats=("by_suffix",),
    ),
    "preference": TaskRow(
        code="shardyard.tasks.preference:Preference",
        prepare=_TEXT,
        metrics=_OF_PAIRS,
        is_causal=True,
        data_formats=("preference_pairs",),
        continues_text=True,
        reads_learnt=True,
        compares_answers=True,
    ),
    "reward": TaskRow(
        code="shardyard.tasks.reward:Reward",
        prepare=_TEXT,
        metrics=_OF_PAIRS,
        is_causal=True,
        data_formats=("preference_pairs",),
        compares_answers=True,
        gives_reward=True,
    ),
    "image_classification": TaskRow(
        code="shardyard.tasks.images:ImageClassification",
        prepare="shardyard.data.images.prepare:prepare_images",
        metrics={
            "loss": Metric(),
            "top1": Metric(is_better_higher=True, is_of_logits=True),
            "top5": Metric(is_better_higher=True, is_of_logits=True),
        },
        is_causal=False,
        auto_class="AutoModelForImageClassification",
        reads="images",
        sums_exactly=True,
        accepts_own_loss=True,
        reads_items=True,
    ),
}
"""``task.name`` -> its row."""


class ObjectiveSettings(Protocol):
    """The part of the ``task`` section that names the user's own loss and metrics."""

    @property
    def name(self) -> str:
        """Name of the task."""

    @property
    def loss(self) -> str | None:
        """Import path of the loss; None: the task's."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Import paths of the metrics."""

    @property
    def lower_is_better(self) -> tuple[str, ...]:
        """Names of those that are better when lower."""


def own_metric_name(import_path: str) -> str:
    """Name of a metric of the user's own in evaluations: that of its function."""
    return import_path.rpartition(":")[2]


def metrics_of(
    task: ObjectiveSettings, eval_sets: Iterable[str] = (), eval_tasks: Iterable[str] = ()
) -> dict[str, Metric]:
    """Metrics that ``run.target`` accepts: the task's, those of the user's own, and of each set.

    Args:
        eval_sets: Names in ``data.eval_sets``; the loss of the set ``code`` is ``code/loss``.
        eval_tasks: Names in ``data.eval_tasks``; each has some of ``EVAL_TASK_METRICS``.

    Raises:
        RequestError: There is no such task, or a package's cannot be used.
    """
    known = dict(task_row(task.name).targets)
    if task.loss is not None:
        # The exp of any other loss is no perplexity, and its size says nothing about bytes.
        known = {name: each for name, each in known.items() if name not in OF_TOKEN_LOSS}
    names = [own_metric_name(path) for path in task.metrics]
    known |= {name: Metric(is_better_higher=name not in task.lower_is_better) for name in names}
    # Bits per byte are left out for sets: of dialogues and cut documents there are none.
    of_sets = {name: each for name, each in known.items() if name != BITS_PER_BYTE}
    known |= {f"{part}/{name}": each for part in eval_sets for name, each in of_sets.items()}
    return known | {
        f"{part}/{name}": Metric(is_better_higher=is_higher, is_of_logits=True)
        for part in eval_tasks
        for name, is_higher in EVAL_TASK_METRICS.items()
    }


def target_metric(target: Mapping[str, float] | None) -> str:
    """The metric by which evaluations of a run are compared: the first of ``run.target``."""
    return next(iter(target or ("loss",)))


def unit_of(task: str) -> Literal["token", "image"]:
    """Return the unit of a task's speeds; a task without a row reads text."""
    row = TASKS.get(task)
    return "image" if row is not None and row.reads == "images" else "token"


def loss_unit_of(task: str) -> str:
    """Return the unit of a task's losses, in words."""
    row = TASKS.get(task)
    if row is not None and row.compares_answers:
        return "mean over pairs"
    is_of_labels = row is not None and row.labelled is not None
    return "mean over labels" if is_of_labels else f"nats per {unit_of(task)}"


def tasks_of(*, is_causal: bool) -> list[str]:
    """Names of the tasks that a kind of model can learn, the usual one first."""
    return [
        name for name, row in TASKS.items() if row.reads == "text" and row.is_causal == is_causal
    ]


def imported(import_path: str) -> Any:
    """Import what ``module:name`` names, and return it."""
    module, _, name = import_path.partition(":")
    return getattr(import_module(module), name)


PREFERENCE_LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "orpo": "orpo"}
"""Other trainers' names for losses of preferences -> ``task.loss_type``."""
NOT_BUILT = ("kto", "simpo", "cpo", "ppo", "grpo", "rlhf")
"""Other trainers' names for tasks that are not built here."""


def task_row(name: str) -> TaskRow:
    """The row of a task, ours or a package's.

    Raises:
        RequestError: There is none, or a package's cannot be used.
    """
    ours = TASKS.get(name)
    if ours is not None:
        return ours
    if name in PREFERENCE_LOSSES and plug_in_named("tasks", name) is None:
        raise RequestError(
            f"that is a loss of pairs of answers. Use task.name=preference task.loss_type="
            f"{PREFERENCE_LOSSES[name]} (docs/chat.md)."
        )
    if name in NOT_BUILT and plug_in_named("tasks", name) is None:
        raise RequestError(
            "tuning by rewards, or by other preferences than pairs, is not built. With pairs of "
            "answers use task.name=preference, or reward for a reward model (docs/chat.md); else "
            "give what `shardyard export` writes to a tool for it, such as TRL."
        )
    row: TaskRow = load_entry_point("tasks", name, builtin=TASKS, validate=_validate_row)
    return row


def task_code(name: str) -> Any:
    """Return the code that a task's row names; imports torch.

    Raises:
        RequestError: As ``task_row``, or a package's code cannot be imported.
    """
    return load_object(_package(name), task_row(name).code)


def task_prepare(name: str) -> Any:
    """Return the function that writes a task's dataset; raises as ``task_code``."""
    return load_object(_package(name), task_row(name).prepare)


def _package(name: str) -> PlugIn | None:
    return None if name in TASKS else plug_in_named("tasks", name)


def _validate_row(content: Any) -> str:
    if not isinstance(content, TaskRow):
        return f"is {type(content).__name__}, not a shardyard.config.tasks.TaskRow"
    return "" if next(iter(content.metrics), "") == "loss" else "has no loss as its first metric"
