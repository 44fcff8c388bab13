"""BERT's own training: steps are those of transformers' BertForPreTraining in a plain loop, in
every layout; an evaluation, an export and an import keep both heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForPreTraining, BertForMaskedLM, BertForPreTraining

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.rules.custom_module import require_shape
from shardyard.data.loader import MicroBatch
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_evaluations, read_steps
from shardyard.rundir.layout import RunDir
from shardyard.tasks.bert_pretraining import BertPretraining
from shardyard.train.hooks import Hooks
from shardyard.train.loop import Loop
from shardyard.train.setup import set_up
from shardyard.train.training import Training
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here
from tests.train.lamb import Lamb

BATCH, STEPS, LR, DECAY, BETAS = 12, 5, 0.02, 0.01, (0.9, 0.95)
TOLD = ("loss", "masked_loss", "next_sentence_loss", "grad_norm")
COUNTED = ("masked_accuracy", "next_sentence_accuracy", "targets")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Documents with their sentences, in WordPiece."""
    data = {"format": "sentences", "tokenizer_kind": "wordpiece", "eval_fraction": 0.05}
    return prepare_corpus(tmp_path_factory.mktemp("pairs"), **data)


def _run(folder: Path, pairs: Corpus, processes: int = 1, **sections: Any) -> RunDir:
    given: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS},
        "model": {"preset": "bert-tiny"},
        "task": {"name": "bert_pretraining"},
        "data": {"seq_len": 64, "format": "sentences", "tokenizer_kind": "wordpiece"},
        "optim": {
            "name": "lamb", "betas": BETAS, "eps": 1e-4, "lr": LR, "weight_decay": DECAY,
            "grad_clip": None, "schedule": "constant", "warmup_steps": 0,
            "global_batch": BATCH, "micro_batch": 2,
        },
        "checkpoint": {"every": 1000},
        "cluster": {"devices": processes},
    }  # fmt: skip
    phases = {"phases": sections.pop("phases", [])}
    merged = {
        name: {**given.get(name, {}), **sections.get(name, {})} for name in {*given, *sections}
    }
    return make_run(folder, pairs, merged | phases)


def _open(run_dir: RunDir) -> Training:
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    return set_up(run_dir, 0, hooks, local_rank=0)


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _as_transformers_reads(batch: MicroBatch) -> dict[str, Tensor]:
    is_text = batch["positions"] > 0
    is_text[:, 0] = True
    return {
        "input_ids": batch["tokens"],
        "attention_mask": is_text.long(),
        "token_type_ids": batch["segments"],
        "labels": batch["targets"],
        "next_sentence_label": batch["next_sentence_labels"],
    }


def _beside_a_plain_loop(run_dir: RunDir) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Loss and gradient norm of each plain step, and how far each weight of ours is from its."""
    training = _open(run_dir)
    shape = require_shape(training.resolved.shape)
    model = BertForPreTraining._from_config(hf_config(shape), attn_implementation="eager")
    weights = {
        name.removeprefix("model."): _whole(tensor).clone()
        for name, tensor in training.tensors.items()
        if name.startswith("model.")
    }
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert {name.rpartition(".")[0] for name in missing} == {"cls.predictions.decoder"}, "tied"
    optimizer = Lamb(model.parameters(), lr=LR, decay=DECAY, betas=BETAS, eps=1e-4)
    found = []
    for step in range(STEPS):
        batch = training.train_source.micro_batch(range(step * BATCH, (step + 1) * BATCH), BATCH)
        assert int(batch["segments"].max()) == 1 and int(batch["next_sentence_labels"].max()) == 1
        loss = model(**_as_transformers_reads(batch)).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [param.grad for param in model.parameters() if param.grad is not None]
        )
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss.detach()), float(norm)))
    loop = Loop(training)
    for _ in range(STEPS):
        loop.step()
    apart = {}
    for name, param in model.named_parameters():
        moved = (param.detach() - weights[name]).norm()
        found_there = _whole(training.tensors[f"model.{name}"])
        apart[name] = float((found_there - param.detach()).norm() / moved)
    training.close()
    return found, apart


PHASES: list[dict[str, Any]] = [
    {"run": {"steps": 3}, "data": {"seq_len": 32}, "optim": {"lr": LR, "global_batch": BATCH}},
    {"run": {"steps": 2}, "data": {"seq_len": 64}, "optim": {"lr": LR / 2, "global_batch": 5}},
]


def _phases_of_a_plain_loop(run_dir: RunDir) -> tuple[list[float], dict[str, float]]:
    """Losses of transformers' model, with a new LAMB in each phase, and how far ours is from it."""
    training = _open(run_dir)
    model = BertForPreTraining._from_config(
        hf_config(require_shape(training.resolved.shape)), attn_implementation="eager"
    )
    first = {name: _whole(each).clone() for name, each in training.tensors.items()}
    weights = {n.removeprefix("model."): each for n, each in first.items() if n[:6] == "model."}
    model.load_state_dict(weights, strict=False)
    training.close()
    train_here(run_dir)
    losses = []
    for phase, resolved in zip(PHASES, read_resolved(run_dir.resolved(0)).of_phases, strict=True):
        lr = phase["optim"]["lr"]
        optimizer = Lamb(model.parameters(), lr=lr, decay=DECAY, betas=BETAS, eps=1e-4)
        source, number = BertPretraining.open_data(resolved).train, phase["optim"]["global_batch"]
        for step in range(phase["run"]["steps"]):
            batch = source.micro_batch(range(step * number, (step + 1) * number), number)
            assert batch["tokens"].shape == (number, phase["data"]["seq_len"])
            loss = model(**_as_transformers_reads(batch)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    export(run_dir.checkpoint(STEPS), read_resolved(run_dir.resolved(0)), run_dir.path / "export")
    ours = BertForPreTraining.from_pretrained(run_dir.path / "export")
    apart = {}
    for (name, mine), theirs in zip(ours.named_parameters(), model.parameters(), strict=True):
        moved = (theirs - weights[name]).norm()
        apart[name] = float((mine - theirs).norm() / moved)
    return losses, apart


def test_two_phases_are_those_of_transformers_own_model(pairs: Corpus, tmp_path: Path) -> None:
    given: dict[str, Any] = {"run": {"steps": None}, "data": {"seq_len": "auto"}, "phases": PHASES}
    optim = {"lr": "auto", "global_batch": "auto", "warmup_steps": 0}
    run_dir = _run(tmp_path / "run", pairs, **given, optim=optim)
    expected, apart = run_on_ranks(_phases_of_a_plain_loop, 1, run_dir)[0]
    assert [line["loss"] for line in read_steps(run_dir.metrics)] == pytest.approx(
        expected, rel=1e-5
    )
    seen = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
    assert max(seen.values()) < 1e-4, seen


def _lines(run_dir: RunDir, names: tuple[str, ...]) -> list[list[float]]:
    return [[line[name] for name in names] for line in read_steps(run_dir.metrics)]


def test_five_steps_are_those_of_transformers_own_model(pairs: Corpus, tmp_path: Path) -> None:
    run_dir = _run(tmp_path / "run", pairs)
    expected, apart = run_on_ranks(_beside_a_plain_loop, 1, run_dir)[0]
    lines = list(read_steps(run_dir.metrics))
    assert len(lines) == STEPS
    for line, pair in zip(lines, expected, strict=True):
        assert (line["loss"], line["grad_norm"]) == pytest.approx(pair, rel=1e-5)
        assert line["loss"] == pytest.approx(line["masked_loss"] + line["next_sentence_loss"])
        assert line["samples_per_s"] * line["step_time_s"] == pytest.approx(BATCH, rel=1e-3)
        assert 0 <= line["masked_accuracy"] < 1 and 0 < line["next_sentence_accuracy"] <= 1
    # no softmax sees a bias of keys: its gradient is rounding alone
    seen = {name: far for name, far in apart.items() if not name.endswith("key.bias")}
    assert len(seen) == len(apart) - 2 and max(seen.values()) < 1e-5, seen


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero-1": (2, {"parallel": {"dp_shard": 2, "zero": 1}}),
    "tp": (2, {"parallel": {"tp": 2}}),
    "cp": (2, {"parallel": {"cp": 2}, "memory": {"recompute": "full"}}),
    "heads": (2, {"parallel": {"cp": 2, "cp_exchange": "heads"}}),
    "pp": (2, {"parallel": {"pp": 2}}),
    "chunks, tp": (2, {"parallel": {"tp": 2}, "memory": {"loss_chunk": 16}}),
    "chunks, pp": (2, {"parallel": {"pp": 2}, "memory": {"loss_chunk": 16}}),
    "three": (3, {"parallel": {"dp_shard": 3, "zero": 1}}),
    "zero-1 of 4": (4, {"parallel": {"dp_shard": 4, "zero": 1}}),
    "tp and cp": (4, {"parallel": {"tp": 2, "cp": 2}}),
    "tp and pp": (4, {"parallel": {"tp": 2, "pp": 2}}),
    "hybrid": (4, {"parallel": {"dp_replicate": 2, "dp_shard": 2, "zero": 3}}),
}


@pytest.mark.parametrize(
    "names",
    [["zero-1"], pytest.param([name for name in LAYOUTS if name != "zero-1"], marks=[
        pytest.mark.slow])],
    ids=["one", "more"],
)  # fmt: skip
def test_every_layout_takes_the_steps_of_one_process(
    pairs: Corpus, tmp_path: Path, names: list[str]
) -> None:
    """With dropout, and micro-batches that do not divide evenly over the ranks."""
    sections: dict[str, Any] = {"model": {"preset": "bert-tiny", "dropout": 0.1}}
    one = _run(tmp_path / "one", pairs, **sections)
    run_on_ranks(train_here, 1, one)
    assert len(_lines(one, TOLD)) == STEPS
    evaluated = [line["eval"] for line in read_evaluations(one.metrics)]
    for name in names:
        processes, layout = LAYOUTS[name]
        other = _run(tmp_path / name, pairs, processes, **sections, **layout)
        run_on_ranks(train_here, processes, other)
        for found, expected in zip(_lines(other, TOLD), _lines(one, TOLD), strict=True):
            assert found == pytest.approx(expected, rel=1e-5), name
        assert _lines(other, COUNTED) == _lines(one, COUNTED), name
        again = [line["eval"] for line in read_evaluations(other.metrics)]
        assert len(again) == len(evaluated) == 1
        assert again[0] == pytest.approx(evaluated[0], rel=1e-5), name


def _scored(run_dir: RunDir) -> tuple[dict[str, float], dict[str, float]]:
    """What an evaluation says, and transformers' model of the same weights."""
    training = _open(run_dir)
    loop = Loop(training)
    for _ in range(2):
        loop.step()
    loop._evaluate()
    model = BertForPreTraining._from_config(
        hf_config(require_shape(training.resolved.shape))
    ).eval()
    weights = {name.removeprefix("model."): _whole(t) for name, t in training.tensors.items()}
    model.load_state_dict(
        {name: each for name, each in weights.items() if name in model.state_dict()}, strict=False
    )
    source = training.eval_source
    assert source is not None
    batch = source.micro_batch(range(source.num_samples), source.num_samples)
    with torch.no_grad():
        out: Any = model(**_as_transformers_reads(batch))
    training.close()
    is_hidden = batch["targets"] != -100
    right = (out.prediction_logits.argmax(-1) == batch["targets"])[is_hidden]
    labels = batch["next_sentence_labels"]
    loss = torch.nn.functional.cross_entropy
    masked = float(loss(out.prediction_logits[is_hidden], batch["targets"][is_hidden]))
    return next(iter(read_evaluations(run_dir.metrics)))["eval"], {
        "loss": float(out.loss),
        "perplexity": float(torch.tensor(masked).exp()),
        "masked_loss": masked,
        "next_sentence_loss": float(loss(out.seq_relationship_logits, labels)),
        "masked_accuracy": float(right.double().mean()),
        "most_frequent_token": int(batch["targets"][is_hidden].bincount().max()) / len(right),
        "next_sentence_accuracy": float(
            (out.seq_relationship_logits.argmax(-1) == labels).double().mean()
        ),
    }


def test_an_evaluation_is_that_of_transformers_own_model(pairs: Corpus, tmp_path: Path) -> None:
    scores, expected = run_on_ranks(_scored, 1, _run(tmp_path / "run", pairs))[0]
    assert scores.keys() == expected.keys()
    assert scores == pytest.approx(expected, rel=1e-5)


def _train_and_export(run_dir: RunDir, processes: int, to: Path) -> None:
    run_on_ranks(train_here, processes, run_dir)
    checkpoint = choose_checkpoint(run_dir, "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), to)


def _logits(folder: Path) -> tuple[Tensor, Tensor]:
    model = AutoModelForPreTraining.from_pretrained(folder).eval()
    assert isinstance(model, BertForPreTraining)
    with torch.no_grad():
        out = model(input_ids=torch.arange(48).view(2, 24) * 10)
    return out.prediction_logits, out.seq_relationship_logits


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (1, {}),
        pytest.param(2, {"pp": 2}, marks=pytest.mark.system),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.system),
    ],
)
def test_both_heads_go_from_folder_to_folder(
    pairs: Corpus, tmp_path: Path, processes: int, parallel: dict[str, Any]
) -> None:
    _train_and_export(_run(tmp_path / "first", pairs), 1, tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert config["architectures"] == ["BertForPreTraining"]
    still = {"optim": {"name": "sgd", "lr": 1e-30, "global_batch": 2, "micro_batch": 1,
                       "grad_clip": 1.0, "weight_decay": 0.0, "betas": BETAS}}  # fmt: skip
    model = {"preset": None, "path": str(tmp_path / "trained"), "weights": "load"}
    again = _run(
        tmp_path / "again", pairs, processes, model=model, parallel=parallel, **still,
        run={"steps": 1},
    )  # fmt: skip
    _train_and_export(again, processes, tmp_path / "again-out")
    torch.testing.assert_close(_logits(tmp_path / "again-out"), _logits(tmp_path / "trained"))


def test_a_model_without_a_head_for_pairs_is_given_one(pairs: Corpus, tmp_path: Path) -> None:
    """transformers' BertForMaskedLM, which has neither it nor what pools."""
    first = _run(tmp_path / "first", pairs, run={"steps": 1})
    _train_and_export(first, 1, tmp_path / "trained")
    BertForMaskedLM.from_pretrained(tmp_path / "trained").save_pretrained(tmp_path / "masked")
    model = {"preset": None, "path": str(tmp_path / "masked"), "weights": "load"}
    still = {"name": "sgd", "lr": 1e-30, "momentum": 0.0}
    again = _run(tmp_path / "again", pairs, model=model, run={"steps": 1}, optim=still)
    _train_and_export(again, 1, tmp_path / "out")
    (of_tokens, of_pairs), trained = _logits(tmp_path / "out"), _logits(tmp_path / "trained")
    torch.testing.assert_close(of_tokens, trained[0])
    assert not torch.allclose(of_pairs, trained[1], atol=1e-4)
    assert 0 < float(of_pairs.abs().max()) < 1, "drawn small, as of a fresh model"
