"""Small real runs for tests: real text, real preparation, a real run folder."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardyard.config.model.growth import grow
from shardyard.config.model.source import shape_or_none, with_labels
from shardyard.config.model.vocabulary import vocabulary_in
from shardyard.config.resolve import resolve
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.layout import resolve_layout
from shardyard.config.schema.recipe import Recipe
from shardyard.data.prepare import prepare
from shardyard.hardware.machine import Machine
from shardyard.io.files import write_json
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.run import train

# fp8 products are emulated here: rounded as a device would, multiplied exactly
MACHINE = Machine(
    device="cpu", name="test", count=1, memory_bytes=2**34, cores=2, hostname="test", has_fp8=True
)


@dataclass(frozen=True)
class Corpus:
    """Prepared text, shared by the runs of a test file."""

    source: str
    prepared: str
    facts: DatasetMetadata


DOCUMENT_CHARACTERS = 1500
"""Short documents, so that few tokens are a fraction of them: evaluation takes all of these."""


def prepare_corpus(folder: Path, **data: Any) -> Corpus:
    """Write documents of real text (the interpreter's own modules) and prepare them.

    Args:
        data: Settings of the section ``data``.
    """
    source = folder / "text"
    source.mkdir()
    modules = Path(sysconfig.get_path("stdlib"))
    for file in sorted([*modules.glob("email/*.py"), *modules.glob("json/*.py")]):
        text = file.read_text(encoding="utf-8")
        for start in range(0, len(text), DOCUMENT_CHARACTERS):
            part = text[start : start + DOCUMENT_CHARACTERS]
            (source / f"{file.parent.name}-{file.stem}-{start:06d}.txt").write_text(part)
    prepared = folder / "prepared"
    recipe = Recipe.model_validate(
        {
            "model": {"preset": "llama-tiny"},
            "data": {
                "source": str(source),
                "dir": str(prepared),
                "tokenizer": "train",
                "vocab_size": 512,
                "eval_fraction": 0.005,
                "workers": 1,
                **data,
            },
        }
    )
    facts = prepare(recipe, model_dir=None, progress=lambda *_: None)
    return Corpus(str(source), str(prepared), facts)


def make_run(
    folder: Path,
    corpus: Corpus,
    sections: dict[str, Any],
    *,
    attempt: int = 0,
    previous: Resolved | None = None,
) -> RunDir:
    """Write a run folder, ready to train, for the given sections of a recipe."""
    base: dict[str, dict[str, Any]] = {
        "run": {"steps": 4},
        "model": {"preset": "llama-tiny"},
        "data": {
            "source": corpus.source,
            "dir": corpus.prepared,
            "seq_len": 32,
            "vocab_size": 512,
            "tokenizer": "train",
        },
        "optim": {"lr": 1e-2, "global_batch": 6, "micro_batch": 1, "warmup_steps": 2},
        "cluster": {"device": "cpu", "devices": 1},
    }
    sections, phases = dict(sections), sections.get("phases", [])
    sections.pop("phases", None)
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    recipe = Recipe.model_validate({**merged, "phases": phases})
    model_dir = None if recipe.model.path is None else Path(recipe.model.path)
    shape = grow(
        recipe,
        with_labels(shape_or_none(recipe, model_dir, corpus.facts.vocab_size), corpus.facts),
        given=vocabulary_in(Path(corpus.facts.dir)),
        size=corpus.facts.vocab_size,
        model_dir=model_dir,
    ).shape
    resolved = resolve(
        recipe, shape=shape, machine=MACHINE, data=corpus.facts, model_dir=model_dir,
        previous=previous,
    )  # fmt: skip
    run_dir = RunDir(folder)
    write_run(run_dir, resolved, attempt=attempt)
    return run_dir


def write_run(run_dir: RunDir, resolved: Resolved, *, attempt: int) -> None:
    """Write what a worker reads: resolved.json and the two keys it wants of plan.json."""
    write_resolved(run_dir.resolved(attempt), resolved)
    plan = {"flops_per_token": {"full": 1e6, "causal": 1e6}, "peak_flops_per_s": None}
    write_json(run_dir.plan(attempt), plan)


def train_here(run_dir: RunDir, attempt: int = 0) -> str:
    """Train this rank's part; call it through ``run_on_ranks``."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return train(run_dir, attempt, hooks)


__all__ = ["Corpus", "make_run", "prepare_corpus", "resolve_layout", "train_here", "write_run"]
