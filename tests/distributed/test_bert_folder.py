"""A BERT of transformers': loaded from its folder, trained, saved, exported, and opened again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.model.source import read_shape
from shardyard.config.resolve import resolve
from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import RecipeError
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import MACHINE, Corpus, train_here, write_run

VOCABULARY = 525
"""More rows than the 512 tokens of the corpus, and not divisible by two."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With the dropout of every published BERT, and weights that are not as we draw them."""
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=80, max_position_embeddings=64, layer_norm_eps=1e-7,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForMaskedLM(config)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.05 * torch.randn_like(param)
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def _resolved(corpus: Corpus, folder: Path, processes: int = 1, **sections: Any) -> Resolved:
    recipe = Recipe.model_validate(
        {
            "run": {"steps": 1},
            "model": {"path": str(folder), "weights": "load", "dropout": 0.0},
            "task": {"name": "masked_lm"},
            "data": {"source": corpus.source, "dir": corpus.prepared, "seq_len": 32},
            # so small that weights stay what they are
            "optim": {"name": "sgd", "lr": 1e-30, "global_batch": 2, "micro_batch": 1},
            "cluster": {"device": "cpu", "devices": processes},
            **sections,
        }
    )
    shape = read_shape(recipe.model, folder, corpus.facts.vocab_size)
    return resolve(recipe, shape=shape, machine=MACHINE, data=corpus.facts, model_dir=folder)


def _logits(folder: Path) -> torch.Tensor:
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    assert isinstance(model, BertForMaskedLM)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(48).view(2, 24) * 10).logits
    return logits


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (1, {}),
        (2, {"pp": 2}),
        pytest.param(2, {"tp": 2}, marks=pytest.mark.system),
        pytest.param(2, {"dp_shard": 2}, marks=pytest.mark.system),
    ],
)
def test_a_bert_keeps_its_logits_from_folder_to_folder(
    corpus: Corpus, folder: Path, tmp_path: Path, processes: int, parallel: dict[str, Any]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    resolved = _resolved(corpus, folder, processes, parallel=parallel)
    assert (
        require_shape(resolved.shape).rms_norm_eps == 1e-7
        and not require_shape(resolved.shape).is_causal
    )
    write_run(run_dir, resolved, attempt=0)
    run_on_ranks(train_here, processes, run_dir)
    checkpoint = choose_checkpoint(run_dir, "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), tmp_path / "out")
    torch.testing.assert_close(_logits(tmp_path / "out"), _logits(folder))
    source, config = (
        json.loads((where / "config.json").read_text()) for where in (folder, tmp_path / "out")
    )
    # the run's tokenizer is not the folder's, which has none
    assert config == {**source, "eos_token_id": 0, "pad_token_id": None}


def test_norms_under_their_first_names_are_found(
    corpus: Corpus, folder: Path, tmp_path: Path
) -> None:
    """As in the files of bert-base-uncased."""
    expected = _logits(folder)
    file = folder / "model.safetensors"
    renamed = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = load_file(file)
    for now, older in renamed.items():
        weights = {name.replace(now, older): weight for name, weight in weights.items()}
    assert any(name.endswith("gamma") for name in weights)
    save_file(weights, file, metadata={"format": "pt"})
    run_dir = RunDir(tmp_path / "run")
    write_run(run_dir, _resolved(corpus, folder), attempt=0)
    run_on_ranks(train_here, 1, run_dir)
    checkpoint = choose_checkpoint(run_dir, "latest").path
    export(checkpoint, read_resolved(run_dir.resolved(0)), tmp_path / "out")
    torch.testing.assert_close(_logits(tmp_path / "out"), expected)


def test_a_folders_model_is_asked_for_what_it_can_learn(corpus: Corpus, folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"task\.name=causal_lm: .* Use task\.name=masked_lm"):
        _resolved(corpus, folder, task={"name": "causal_lm"})
