"""A transformers model in every layout computes what transformers computes, and trains alike."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardyard
from shardyard.config.layout import Layout
from shardyard.errors import RecipeError, RequestError
from shardyard.families.presets import PRESETS
from shardyard.library.supported import request
from tests.distributed.ranks import run_on_ranks
from tests.library.runs import SEQ_LEN, batches, build, samples, take_steps

Numbers = list[tuple[float, float]]


def _transformers(preset: str, steps: int, *, tied: bool, pairs: bool = False) -> Numbers:
    """transformers' own forward pass and loss, torch's own clipping, in one process."""
    model = build(preset, tied=tied)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        loss = model(**samples(step, pairs=pairs)).loss
        loss.backward()
        loss = loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((float(loss), float(norm)))
    found.append((float(model(**samples(0, pairs=pairs)).loss.detach()), 0.0))
    return found


def _sharded(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Numbers]:
    """The same through the library on this rank, for each (preset, degrees, settings)."""
    found = []
    for preset, degrees, given in cases:
        settings = dict(given)
        pairs = settings.pop("pairs", False)
        model = build(preset, tied=settings.pop("tied", False))
        mesh = shardyard.build_mesh(**degrees)
        model = shardyard.parallelize(model, mesh, seq_len=SEQ_LEN, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        numbers = take_steps(model, mesh, optimizer, range(3), pairs=pairs)
        numbers.append((float(shardyard.evaluate(model, batches(mesh, 0, pairs=pairs))), 0.0))
        found.append(numbers)
    return found


CASES: dict[int, list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: [
        ("llama-tiny", {}, {}),
        ("qwen3-moe-tiny", {}, {}),
        ("bert-tiny", {}, {}),
        ("bert-tiny", {}, {"pairs": True}),
    ],
    2: [
        ("llama-tiny", {"dp_shard": 2}, {"recompute": "full"}),
        ("llama-tiny", {"dp_replicate": 2, "dp_shard": 1}, {"tied": True}),
        ("llama-tiny", {"tp": 2}, {"tied": True}),
        ("llama-tiny", {"pp": 2}, {"tied": True}),
        ("llama-tiny", {"cp": 2, "zero": 2}, {"cp_exchange": "heads"}),
        ("llama-tiny", {"pp": 2}, {"schedule": "gpipe"}),
        ("mixtral-tiny", {"ep": 2}, {}),
        ("bert-tiny", {"tp": 2}, {}),
        ("bert-tiny", {"tp": 2}, {"pairs": True}),
        ("bert-tiny", {"cp": 2}, {"pairs": True, "recompute": "full"}),
        ("bert-tiny", {"cp": 2}, {"pairs": True, "cp_exchange": "heads"}),
        ("bert-tiny", {"pp": 2}, {"pairs": True}),
    ],
    4: [("llama-tiny", {"dp_shard": 2, "tp": 2, "zero": 1}, {"recompute": "selective"})],
}


@pytest.mark.heavy
@pytest.mark.parametrize("processes", [1, 2, pytest.param(4, marks=pytest.mark.system)])
def test_every_layout_is_transformers_own_training(processes: int) -> None:
    for case, found in zip(
        CASES[processes], run_on_ranks(_sharded, processes, CASES[processes])[-1], strict=True
    ):
        preset, _, settings = case
        tied, pairs = settings.get("tied", False), settings.get("pairs", False)
        expected = _transformers(preset, 3, tied=tied, pairs=pairs)
        assert len(found) == 4
        for pair, wanted in zip(found, expected, strict=True):
            assert pair == pytest.approx(wanted, rel=1e-5), case


def _from_meta(folder: str, degrees: dict[str, Any]) -> tuple[str, float]:
    """Built without storage: refused before it has weights, then filled from files."""
    with torch.device("meta"):
        model = build("mixtral-tiny")
    mesh = shardyard.build_mesh(**degrees)
    model = shardyard.parallelize(model, mesh, seq_len=SEQ_LEN)
    refusal = ""
    try:
        shardyard.accumulate(model, batches(mesh, 0))
    except RequestError as error:
        refusal = str(error)
    shardyard.fill_weights(model, folder)
    return refusal, float(shardyard.accumulate(model, batches(mesh, 0)))


@pytest.mark.heavy
def test_a_model_on_the_meta_device_gets_its_weights_from_a_folder(tmp_path: Path) -> None:
    theirs = build("mixtral-tiny")
    theirs.save_pretrained(tmp_path)
    for refusal, loss in run_on_ranks(_from_meta, 2, str(tmp_path), {"tp": 2}):
        assert "has no weights yet" in refusal and "fill_weights" in refusal
        assert loss == pytest.approx(theirs(**samples(0)).loss.item(), rel=1e-5)


def _documents(degrees: dict[str, Any], joined: bool) -> float:
    model = build("llama-tiny")
    mesh = shardyard.build_mesh(**degrees)
    model = shardyard.parallelize(model, mesh, seq_len=SEQ_LEN, attend_across_documents=False)
    tokens = samples(0)["input_ids"][:2]
    positions = torch.arange(SEQ_LEN).expand(2, -1).clone()
    positions[:, 8:] -= 8
    labels = tokens.clone()
    labels[:, 8] = -100  # no document predicts the next one's first token
    batch = {"input_ids": tokens, "labels": labels, "position_ids": positions}
    if not joined:
        halves = tokens.view(4, 8)
        batch = {"input_ids": halves, "labels": halves.clone()}
        model = shardyard.parallelize(build("llama-tiny"), mesh)
    return float(shardyard.evaluate(model, [batch]))


@pytest.mark.heavy
def test_documents_of_one_sample_do_not_see_each_other() -> None:
    joined, apart = (run_on_ranks(_documents, 1, {}, joined)[0] for joined in (True, False))
    assert joined == pytest.approx(apart, rel=1e-6)


def _refusals(_: None = None) -> dict[str, str]:
    """Messages of wrong uses, on one of two ranks."""
    model, mesh = build("llama-tiny"), shardyard.build_mesh(tp=2)
    good = batches(mesh, 0)
    found = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except RequestError as error:
            found[name] = str(error)

    build_mesh, parallelize = shardyard.build_mesh, shardyard.parallelize
    refused("not split", lambda: shardyard.accumulate(model, good))
    refused("degrees", lambda: build_mesh(tp=3))
    refused("ep on dense", lambda: parallelize(model, build_mesh(ep=2)))
    refused("no seq_len", lambda: parallelize(model, mesh))
    refused("values", lambda: parallelize(model, mesh, recompute="all", compute="fp9"))
    refused("length", lambda: parallelize(model, mesh, seq_len=15, compute="fp16"))
    wrong: dict[str, Any] = {"recomput": "full"}
    by_plan: dict[str, Any] = {"compile": "auto", "recompute": "auto"}
    refused("by plan", lambda: parallelize(model, mesh, seq_len=16, **by_plan))
    refused("unknown", lambda: parallelize(model, mesh, seq_len=16, **wrong))
    refused("headless", lambda: parallelize(model.model, mesh))
    refused("other kind", lambda: parallelize(torch.nn.Linear(2, 2), mesh))
    torch.manual_seed(mesh.tensor_rank)
    refused("differing", lambda: parallelize(torch.nn.Linear(2, 2), mesh, blocks=()))

    parallelize(model, mesh, seq_len=SEQ_LEN)
    refused("twice", lambda: parallelize(model, mesh, seq_len=SEQ_LEN))
    refused("no gradients", lambda: shardyard.clip_gradients(model, 1.0))
    refused("no batches", lambda: shardyard.accumulate(model, []))
    refused("uneven", lambda: shardyard.accumulate(model, good[: 1 + mesh.tensor_rank]))
    mine = [{key: value + mesh.tensor_rank for key, value in good[0].items()}]
    refused("other samples", lambda: shardyard.accumulate(model, mine))
    masked = {**good[0], "attention_mask": torch.zeros_like(good[0]["labels"])}
    refused("mask", lambda: shardyard.accumulate(model, [masked]))
    short = {key: value[:, :8] for key, value in good[0].items()}
    refused("short", lambda: shardyard.accumulate(model, [short]))
    positioned = {**good[0], "position_ids": good[0]["labels"]}
    refused("positions", lambda: shardyard.accumulate(model, [positioned]))
    flat = {key: value[0] for key, value in good[0].items()}
    refused("flat", lambda: shardyard.accumulate(model, [flat]))
    refused("loss", lambda: shardyard.accumulate(model, good, loss=lambda _m, _b: (None, 1)))  # type: ignore[arg-type,return-value]
    shardyard.accumulate(model, good)
    refused("left over", lambda: shardyard.accumulate(model, good))
    return found


@pytest.mark.heavy
def test_wrong_uses_say_what_is_wrong_and_what_to_do() -> None:
    for found in run_on_ranks(_refusals, 2):
        expected = {
            "not split": ("is in no mesh yet", "shardyard.parallelize(model, mesh"),
            "degrees": ("build_mesh()", "parallel.tp=3 does not divide the 2 devices", "1 or 2"),
            "ep on dense": ("parallel.ep=2 but the model has no experts to split. Use 1.",),
            "no seq_len": ("seq_len: is not given, and tp=2", "Give seq_len"),
            "values": ("2 problems", "memory.recompute='all' is", "precision.compute='fp9' is"),
            "by plan": ("2 problems", "model.compile=auto: a recipe's", "memory.recompute=auto"),
            "length": ("2 problems", "parallel.tp=2 needs samples of a multiple of 2", "fp16"),
            "unknown": ("no setting recomput", "recompute"),
            "headless": ("LlamaModel", "...ForCausalLM", "blocks="),
            "other kind": ("Linear is of none of the families", "llama", "plan="),
            "differing": ("rank 1 has built the model with other weights", "torch.manual_seed"),
            "twice": ("has been through parallelize() or wrap() already", "Call it once"),
            "no gradients": ("no gradients to clip", "accumulate"),
            "no batches": ("no batches",),
            "uneven": ("rank 1 has 2 micro-batches and rank 0 has 1", "-100"),
            "other samples": ("different samples", "mesh.data_rank"),
            "mask": ("labels where its attention_mask is 0", "label -100"),
            "short": ("samples of 8 tokens", "seq_len=16"),
            "positions": ("attend_across_documents=False",),
            "flat": ("input_ids (16,)", "(samples, tokens)"),
            "loss": ("loss= is for modules of your own",),
            "left over": ("has a gradient from before", "zero_grad()"),
        }  # fmt: skip
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            assert [part for part in parts if part not in found[name]] == [], found[name]


@pytest.mark.heavy
def test_a_config_that_is_not_built_is_refused() -> None:
    assert run_on_ranks(_dropping_bert, 1)[0].count("hidden_dropout_prob=0.1") == 1


def _dropping_bert() -> str:
    model = build("bert-tiny")
    model.config.hidden_dropout_prob = 0.1
    with pytest.raises(RequestError) as refusal:
        shardyard.parallelize(model, shardyard.build_mesh())
    return str(refusal.value)


@pytest.mark.heavy
def test_padding_before_text_and_what_else_a_bert_is_not_fed_are_refused() -> None:
    gap, other = run_on_ranks(_wrong_batches, 1)[0]
    assert "a 1 behind a 0" in gap and "Pad there" in gap
    assert "the keys input_ids, labels, next_sentence_label" in other
    assert "attention_mask where there is padding, and token_type_ids" in other


def _wrong_batches() -> list[str]:
    mesh = shardyard.build_mesh()
    model = shardyard.parallelize(build("bert-tiny"), mesh)
    batch = samples(0, pairs=True)
    left = {**batch, "attention_mask": batch["attention_mask"].flip(1)}
    found = []
    for wrong in (left, {**samples(0), "next_sentence_label": batch["labels"]}):
        with pytest.raises(RequestError) as refusal:
            shardyard.accumulate(model, [wrong])
        found.append(str(refusal.value))
    return found


def test_a_process_alone_is_told_to_start_several(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"(?s)tp=2 .*torchrun --nproc-per-node N"):
        shardyard.build_mesh(tp=2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RequestError, match="RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        shardyard.build_mesh()


def test_a_pipeline_is_not_held_against_the_batch_that_a_recipe_would_have() -> None:
    """By auto such a model has 4 samples a step: one for each rank, and 4 stages wait."""
    shape = replace(PRESETS["llama-tiny"].shape, num_hidden_layers=4, max_position_embeddings=4096)
    layout = Layout(dp_replicate=1, dp_shard=4, pp=4, zero=1)
    mesh: Any = SimpleNamespace(layout=layout, dense=SimpleNamespace(device_type="cpu"))
    recipe = request(mesh, {}, shape=shape, seq_len=4096)
    assert (recipe.parallel.pp, recipe.precision.compute, recipe.model.dropout) == (4, "fp32", 0.0)
