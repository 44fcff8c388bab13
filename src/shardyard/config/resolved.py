"""Recipe without any ``auto``, and what belongs to it: all that the training half needs.

The command line makes this value, and every worker reads it. It is all that passes between the
halves.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardyard.config.data_choices import SLOTS
from shardyard.config.fingerprint import fingerprint_of
from shardyard.config.formulas import first_batch
from shardyard.config.origins import origin_of
from shardyard.config.schema.base import Section
from shardyard.config.schema.launch import OF_QUEUES
from shardyard.config.schema.recipe import Recipe
from shardyard.families.images.network import ImageNetwork
from shardyard.families.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class DatasetMetadata:
    """Result of `prepare`; read from the data folder's manifest.json."""

    dir: str
    """Folder of the prepared data set."""
    fingerprint: str
    """Changes whenever any token or the tokenizer changes."""
    vocab_size: int
    train_tokens: int
    eval_tokens: int
    train_documents: int
    eval_documents: int
    unigram_entropy: float
    """Nats per token of the training split's unigram distribution: what a model that ignores
    context can reach at best."""
    bos_token: str | None = None
    """The token that begins each document; None: documents begin with none."""
    train_bytes: int | None = None
    """Bytes of the text, as UTF-8; None: the set was prepared before they were counted."""
    eval_bytes: int | None = None
    readers: tuple[dict[str, str], ...] = ()
    """Readers of source files that packages added, by suffix: as manifest.json has it."""
    train_samples: int | None = None
    """Samples that were made when the set was prepared; None: windows of running text."""
    eval_samples: int | None = None

    item_kind: str | None = None
    """Items of data.module that training reads by number: tokens, image or fields.

    None: samples come from prepared files.
    """
    num_classes: int | None = None
    """Number of image classes; None: for text."""
    num_labels: int | None = None
    """Number of labels of texts or tokens; 1: a number is predicted. None: no labels."""
    label_names: tuple[str, ...] = ()
    """Names of these labels, by number."""
    parts: tuple["SourceMetadata", ...] = ()
    """Sources of a mixture, which have datasets of their own."""
    eval_tasks: tuple[tuple[str, str], ...] = ()
    """Name of each task of data.eval_tasks, and of the file in ``dir`` with its questions."""
    eval_sets: tuple["EvalSetMetadata", ...] = ()
    """Sets of data.eval_sets, which have datasets of their own."""
    too_long: int | None = None
    """Number of whole documents (data.pack) that were cut or left out."""
    train_places: int | None = None
    """Tokens of all training samples of whole documents, without padding."""
    train_learnt: int | None = None
    """Tokens that carry loss; None: all of them, or as many as the task chooses."""
    eval_learnt: int | None = None
    rejected: int | None = None
    """Dialogues that the chat template rejects, which are left out (data.max_rejected)."""
    rejected_of: int | None = None
    """Dialogues that there were, with those left out."""
    chat_rows: str | None = None
    """Kinds of chat rows of the first files; None: no dialogues, or prepared before."""
    validation_files: str | None = None
    """Files that are validated on, in words; None: a hash of each document decides."""
    left_out_files: str | None = None
    """Files that are neither trained nor validated on, as their names say, in words."""
    true_pairs: float | None = None
    """Share of training pairs whose second text follows the first; None: the task has no pairs."""
    empty_classes: str | None = None
    """Class folders without a picture, which are no classes of the model, in words."""
    broken_images: int = 0
    """Pictures left out by data.images.broken; left-out.txt in ``dir`` names them."""
    unvalidated_classes: str | None = None
    """Classes without validation pictures, in words."""
    asked_files: str | None = None
    """Files that are trained on although they are named validation or test: data.source names
    each of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "readers", tuple(self.readers))  # JSON has lists
        object.__setattr__(self, "label_names", tuple(self.label_names))
        parts = (
            each if isinstance(each, SourceMetadata) else SourceMetadata(**each)
            for each in self.parts
        )
        object.__setattr__(self, "parts", tuple(parts))
        sets = (
            each if isinstance(each, EvalSetMetadata) else EvalSetMetadata(**each)
            for each in self.eval_sets
        )
        object.__setattr__(self, "eval_sets", tuple(sets))
        object.__setattr__(self, "eval_tasks", tuple(map(tuple, self.eval_tasks)))

    @property
    def fingerprints(self) -> dict[str, str]:
        """Folder -> fingerprint of this dataset and of each set of data.eval_sets."""
        sets = {each.data.dir: each.data.fingerprint for each in self.eval_sets}
        return {self.dir: self.fingerprint, **sets}

    @property
    def by_name(self) -> dict[str, "DatasetMetadata"]:
        """Datasets that are scored by themselves: sources of a mixture, and data.eval_sets."""
        parts = {part.name: part.data for part in self.parts}
        return parts | {each.name: each.data for each in self.eval_sets}

    def num_samples(self, split: str, seq_len: int) -> int:
        """Samples of a split; the last one may be partly padding. T tokens make T - 1 targets."""
        if self.parts:
            return sum(part.data.num_samples(split, seq_len) for part in self.parts)
        made = self.train_samples if split == "train" else self.eval_samples
        if made is not None:
            return made
        tokens = self.train_tokens if split == "train" else self.eval_tokens
        return max(0, -(-(tokens - 1) // seq_len))


@dataclass(frozen=True, kw_only=True)
class SourceMetadata:
    """One source of a mixture."""

    name: str
    slots: int
    """Samples of it in each cycle of ``mixture.SLOTS``."""
    data: DatasetMetadata

    def __post_init__(self) -> None:
        if isinstance(self.data, dict):  # of JSON
            object.__setattr__(self, "data", DatasetMetadata(**self.data))

    def passes(self, samples: int, seq_len: int) -> float:
        """Times that each of its samples is read, once so many samples of the mixture were."""
        return samples * self.slots / SLOTS / self.data.num_samples("train", seq_len)


@dataclass(frozen=True, kw_only=True)
class EvalSetMetadata:
    """One set of data.eval_sets: a dataset whose training split is empty."""

    name: str
    data: DatasetMetadata

    def __post_init__(self) -> None:
        if isinstance(self.data, dict):  # of JSON
            object.__setattr__(self, "data", DatasetMetadata(**self.data))


@dataclass(frozen=True, kw_only=True)
class RollbackTarget:
    """An earlier step from which a run was asked to continue (``resume --step``)."""

    step: int
    skip_steps: int = 0
    """Steps whose samples are passed over from there on."""
    is_requested: bool = False
    """Whether this resume asks for it; an earlier one did otherwise."""
    submission: int = 0
    """Number of the launched job that asked, which goes back once, requeued or not; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A recipe without any ``auto``, with what was derived from it."""

    recipe: Recipe
    reasons: dict[str, str]
    """Dotted setting -> why it has its value; only for settings that were not given."""
    shape: ModelShape | None
    """Sizes of the model; None: it is a module of the user's own, or a network for images."""
    data: DatasetMetadata
    steps: int
    """Optimizer steps of the whole run, each of optim.global_batch samples."""
    model_dir: str | None = None
    """Hugging Face folder that weights are loaded from; None: they are drawn from the seed."""
    model_commit: str | None = None
    """Commit of a model of the hub: what model.revision was when the run began."""
    model_digest: str | None = None
    """Digest of the files of a model that is kept in model.dir: the same on every node."""
    base_digest: str | None = None
    """Digest of the weights under adapters, which no checkpoint holds.

    None: there are no adapters, or the base is drawn from the seed.
    """
    network: ImageNetwork | None = None
    """Network that classifies images; None: the model reads text."""
    phases: tuple["Resolved", ...] = ()
    """Phases of a run, each by itself.

    The recipe above is then that of the first, ``steps`` those of all.
    """

    back_to: RollbackTarget | None = None
    """Step that the newest ``resume --step`` went back to; None: there was none."""

    @property
    def of_phases(self) -> tuple["Resolved", ...]:
        """Phases to train, one after the other; a run without phases is its only one."""
        return self.phases or (self,)

    @property
    def samples(self) -> int:
        """Samples of the whole run: its length, with any later batch size."""
        return self.steps * first_batch(self.recipe.optim)

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` gives the same object back."""
        settings = settings_in(self.recipe.model_dump(mode="json"))
        return {
            "settings": {
                name: {"value": value, "reason": self._reason(name)}
                for name, value in settings.items()
            },
            "shape": None if self.shape is None else self.shape.to_dict(),
            "network": None if self.network is None else self.network.to_dict(),
            "data": asdict(self.data),
            "steps": self.steps,
            "model_dir": self.model_dir,
            "model_commit": self.model_commit,
            "model_digest": self.model_digest,
            "base_digest": self.base_digest,
            "fingerprint": fingerprint(self),
            "phases": [phase.to_json() for phase in self.phases],
            **({} if self.back_to is None else {"back_to": _plain(self.back_to)}),
        }

    def _reason(self, setting: str) -> str:
        return self.reasons.get(setting) or origin_of(self.recipe, setting) or "given"

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Resolved":
        settings = _with_current_names({**_UNTIL_THERE_WAS_A_CHOICE, **content["settings"]})
        recipe = Recipe.model_validate(
            unflatten({name: entry["value"] for name, entry in settings.items()})
        )
        return Resolved(
            recipe=recipe,
            reasons={
                name: entry["reason"]
                for name, entry in settings.items()
                if entry["reason"] not in ("given", origin_of(recipe, name))
            },
            shape=None if content["shape"] is None else ModelShape(**content["shape"]),
            data=DatasetMetadata(**content["data"]),
            steps=content["steps"],
            model_dir=content["model_dir"],
            model_commit=content.get("model_commit"),  # before there was one
            model_digest=content.get("model_digest"),
            base_digest=content.get("base_digest"),
            network=ImageNetwork(**content["network"]) if content.get("network") else None,
            phases=tuple(Resolved.from_json(phase) for phase in content.get("phases", ())),
            back_to=RollbackTarget(**content["back_to"]) if content.get("back_to") else None,
        )


def _plain(back_to: RollbackTarget) -> dict[str, int]:
    submission = {"submission": back_to.submission} if back_to.submission else {}
    return {"step": back_to.step, "skip_steps": back_to.skip_steps, **submission}


_UNTIL_THERE_WAS_A_CHOICE = {"data.bos": {"value": False, "reason": "as the run began"}}
"""Values for runs that were resolved before the setting existed; they keep them."""


def _with_current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace settings of earlier versions by today's, and drop those that belong to a queue."""
    gone = {f"launch.aws_batch.{name}" for name in OF_QUEUES}
    now = {name: entry for name, entry in settings.items() if name not in gone}
    if "elastic.straggler" in now:
        straggler = now.pop("elastic.straggler")
        rules = ["slow_rank"] if straggler["value"] == "leave_out" else []
        now["elastic.leave_out_for"] = {**straggler, "value": rules}
    if "run.target_loss" not in now:
        return now
    loss = now.pop("run.target_loss")
    target = None if loss["value"] is None else {"loss": loss["value"]}
    return {"run.target": {**loss, "value": target}, **now}


def fingerprint(
    resolved: Resolved, pinned: Collection[str] = (), code: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The values that two attempts of one run must share, by dotted name.

    Args:
        pinned: Settings that the model learns by, where others do not.
        code: Digest of the user's own code, by setting; None: it was not imported.
    """
    return fingerprint_of(
        settings_in(resolved.recipe.model_dump(mode="json")),
        pinned=pinned,
        code=code or {},
        shape=_sizes(resolved),
        data=resolved.data.fingerprint,
        commit=resolved.model_commit,
        base=resolved.base_digest,
    )


def _sizes(resolved: Resolved) -> dict[str, Any]:
    described = resolved.shape or resolved.network
    return {} if described is None else described.to_dict()


def settings_in(
    tree: dict[str, Any], kind: type[Section] = Recipe, prefix: str = ""
) -> dict[str, Any]:
    """Dotted setting -> value, of a dumped recipe; a setting that is a mapping stays whole."""
    settings: dict[str, Any] = {}
    fields = {field.alias or key: field for key, field in kind.model_fields.items()}
    for key, value in tree.items():
        field = fields.get(key)
        inner = None if field is None else field.annotation
        if field is None:  # the section of a plug-in
            settings |= {f"{prefix}{key}.{name}": item for name, item in value.items()}
        elif isinstance(inner, type) and issubclass(inner, Section):
            settings.update(settings_in(value, inner, f"{prefix}{key}."))
        else:
            settings[f"{prefix}{key}"] = value
    return settings


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"run": {"seed": 0}}`` -> ``{"run.seed": 0}``; empty dicts stay as values."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def unflatten(flat: dict[str, Any]) -> dict[str, Any]:
    """The opposite of ``settings_in``."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
