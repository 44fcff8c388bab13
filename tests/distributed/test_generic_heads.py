"""Models of no family here with a task's head: steps are those of transformers' own models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import MODULE
from shardyard.config.tasks import task_row
from shardyard.data.loader import MicroBatch
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.loop import Loop
from tests.distributed.label_runs import (
    BATCH,
    LR,
    SEQ_LEN,
    STEPS,
    distances,
    labelled_run,
    open_run,
    prepare_rows,
    saved_weights,
    sections_of,
    train_until_killed,
    whole_of,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here

CONFIGS: dict[str, dict[str, Any]] = {
    "roberta": {"max_position_embeddings": SEQ_LEN + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "electra": {"embedding_size": 24, "max_position_embeddings": SEQ_LEN},
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48,
        "max_position_embeddings": SEQ_LEN, "seq_classif_dropout": 0.0,
    },
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"],
        "max_position_embeddings": SEQ_LEN, "type_vocab_size": 0,
    },
}  # fmt: skip
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "initializer_range": 0.1,
}  # fmt: skip
CASES = {
    "pairs": ("pairs", "electra"),
    "numbers": ("numbers", "distilbert"),
    "single": ("single", "roberta"),
    "tokens": ("tokens", "deberta-v2"),
    "hidden": ("hidden", "roberta"),
}
"""Kind of rows and model."""
_BIASES = ("key.bias", "k_lin.bias", "key_proj.bias")
TEXT = {"seq_len": SEQ_LEN, "vocab_size": 400, "tokenizer": "train"}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Corpus]:
    """Rows of each kind, prepared, and text for hidden words."""
    found = {
        kind: prepare_rows(tmp_path_factory.mktemp(kind) / "data", kind, "bert-tiny")
        for kind in ("pairs", "numbers", "single", "tokens")
    }
    return {**found, "hidden": prepare_corpus(tmp_path_factory.mktemp("hidden"), vocab_size=400)}


def saved_model(kind: str, folder: Path, *, dropout: float, vocab_size: int = 402) -> Path:
    """Write a small masked model with random weights."""
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    config = AutoConfig.for_model(
        kind, vocab_size=vocab_size, **{**SIZES, **CONFIGS[kind]}, **dict.fromkeys(drops, dropout)
    )
    torch.manual_seed(0)
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    return folder


def run_of(
    folder: Path, corpus: Corpus, name: str, processes: int = 1, *, dropout: float = 0.0,
    **sections: Any,
) -> RunDir:  # fmt: skip
    """Write a run folder of a case, ready to train."""
    kind, model = CASES[name]
    path = folder.with_name(f"{model}-{dropout}")
    if not path.exists():
        saved_model(model, path, dropout=dropout)
    of_model = {"preset": None, "path": str(path), "module": MODULE, "weights": "load"}
    if kind != "hidden":
        return labelled_run(
            folder, corpus, kind, "bert-tiny", processes, model=of_model, **sections
        )
    given = sections_of("single", "bert-tiny")
    given["cluster"]["devices"] = processes
    return make_run(
        folder, corpus,
        {**given, **sections, "model": of_model, "task": {"name": "masked_lm"}, "data": TEXT},
    )  # fmt: skip


def plain_model(run_dir: RunDir, weights: dict[str, Tensor]) -> PreTrainedModel:
    """transformers' model of the run's folder and task with these weights."""
    resolved = read_resolved(run_dir.resolved(0))
    auto_class = getattr(transformers, str(task_row(resolved.recipe.task.name).auto_class))
    labels = {} if resolved.data.num_labels is None else {"num_labels": resolved.data.num_labels}
    config = AutoConfig.from_pretrained(str(resolved.model_dir), **labels)
    model: PreTrainedModel = auto_class.from_config(config, attn_implementation="eager")
    own = {name: weights[f"model.{name}"] for name, _ in model.named_parameters()}
    report = model.load_state_dict(own, strict=False)
    assert not report.unexpected_keys
    return model


def as_transformers_reads(batch: MicroBatch, model: PreTrainedModel) -> dict[str, Tensor]:
    """Arguments of transformers' model; padding is masked and has its token."""
    mask_BL = torch.ones_like(batch["tokens"])
    if batch.lengths_B is not None:
        mask_BL = (torch.arange(batch["tokens"].shape[1]) < batch.lengths_B[:, None]).long()
    pad = torch.tensor(model.config.pad_token_id)
    labels = batch["targets"] if "targets" in batch.fields else batch["label"]
    given = {
        "input_ids": torch.where(mask_BL == 1, batch["tokens"], pad),
        "attention_mask": mask_BL,
        "labels": labels.float() if labels.is_floating_point() else labels,
    }
    if getattr(model.config, "type_vocab_size", 0) > 1 and "segments" in batch.fields:
        given["token_type_ids"] = batch["segments"]
    return given


def next_to_a_plain_loop(run_dir: RunDir) -> tuple[list[float], dict[str, float]]:
    """Return losses of a plain loop, and how far apart the weights of the run end."""
    training = open_run(run_dir)
    model = plain_model(run_dir, {name: whole_of(each) for name, each in training.tensors.items()})
    begun = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0
    )
    expected = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        loss = model(**as_transformers_reads(batch, model)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    apart = distances(model, training, begun)
    training.close()
    return expected, apart


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_transformers_own_model(
    corpora: dict[str, Corpus], tmp_path: Path, name: str
) -> None:
    run_dir = run_of(tmp_path / "run", corpora[CASES[name][0]], name)
    expected, apart = run_on_ranks(next_to_a_plain_loop, 1, run_dir)[0]
    losses = [line["loss"] for line in read_steps(run_dir.metrics)]
    assert losses == pytest.approx(expected, rel=1e-5)
    # No softmax sees a bias of keys.
    seen = {key: far for key, far in apart.items() if not key.endswith(_BIASES)}
    assert max(seen.values()) < 1e-4, seen


def test_hidden_words_need_a_token_that_hides_them(
    corpora: dict[str, Corpus], tmp_path: Path
) -> None:
    """The tokenizer has no mask token, and uses all rows of the model."""
    saved_model("roberta", tmp_path / "roberta-0.0", dropout=0.0, vocab_size=400)
    run_dir = run_of(tmp_path / "run", corpora["hidden"], "hidden")
    with pytest.raises(Exception, match="its 400 tokens use every row of the model's embedding"):
        run_on_ranks(train_here, 1, run_dir)


LAYOUTS: dict[str, dict[str, Any]] = {
    "copies": {"dp_replicate": 2},
    "zero-1": {"dp_shard": 2, "zero": 1},
    "zero-3": {"dp_shard": 2, "zero": 3},
}


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("single", ["zero-3"]),
        *(pytest.param(name, list(LAYOUTS), marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(
    corpora: dict[str, Corpus], tmp_path: Path, name: str, layouts: list[str]
) -> None:
    """With dropout, and micro-batches that do not divide evenly over the ranks."""
    corpus = corpora[CASES[name][0]]
    one = run_of(tmp_path / "one", corpus, name, dropout=0.1)
    run_on_ranks(train_here, 1, one)
    losses = [line["loss"] for line in read_steps(one.metrics)]
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    for layout in layouts:
        other = run_of(
            tmp_path / layout, corpus, name, 2, dropout=0.1, parallel=LAYOUTS[layout],
            memory={"recompute": "full"},
        )  # fmt: skip
        run_on_ranks(train_here, 2, other)
        found = [line["loss"] for line in read_steps(other.metrics)]
        assert found == pytest.approx(losses, rel=1e-5), layout
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        assert again[0] == pytest.approx(evaluated[0], rel=1e-5, abs=2e-3), layout


def test_an_interrupted_run_ends_with_the_same_bits(
    corpora: dict[str, Corpus], tmp_path: Path
) -> None:
    sections: dict[str, Any] = {
        "checkpoint": {"every": 2},
        "parallel": {"dp_shard": 2, "zero": 3},
    }
    whole, cut = (
        run_of(tmp_path / name, corpora["pairs"], "pairs", 2, dropout=0.1, **sections)
        for name in ("whole", "cut")
    )
    run_on_ranks(train_here, 2, whole)
    with pytest.raises(Exception, match="rank"):
        run_on_ranks(train_until_killed, 2, cut)
    assert cut.checkpoint_steps() == [2]
    run_on_ranks(train_here, 2, cut)
    weights = [saved_weights(run_dir) for run_dir in (whole, cut)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())


def loss_of_transformers_on_export(run_dir: RunDir, to: Path) -> float:
    """Train, export, and return the loss of transformers' model on the validation split."""
    train_here(run_dir)
    resolved = read_resolved(run_dir.resolved(0))
    export(choose_checkpoint(run_dir, "latest").path, resolved, to)
    training = open_run(run_dir)
    source = training.eval_source
    assert source is not None
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    auto_class = getattr(transformers, str(task_row(resolved.recipe.task.name).auto_class))
    model, report = auto_class.from_pretrained(
        to, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        loss = float(model.eval()(**as_transformers_reads(batch, model)).loss)
    training.close()
    return loss


@pytest.mark.parametrize("name", CASES)
def test_an_export_opens_in_transformers_with_equal_logits(
    corpora: dict[str, Corpus], tmp_path: Path, name: str
) -> None:
    corpus = corpora[CASES[name][0]]
    run_dir = run_of(tmp_path / "run", corpus, name)
    loss = run_on_ranks(loss_of_transformers_on_export, 1, run_dir, tmp_path / "out")[0]
    evaluated = next(iter(read_evaluations(run_dir.metrics)))["eval"]
    assert loss == pytest.approx(evaluated["loss"], rel=1e-5)
    content = json.loads((tmp_path / "out" / "config.json").read_text())
    assert len(content["architectures"]) == 1
    if name != "hidden":
        names = corpus.facts.label_names or ("LABEL_0",)
        assert content["id2label"] == {str(number): each for number, each in enumerate(names)}
