"""A model of transformers' trains split, and its export opens as the same model again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.model.source import read_shape
from shardyard.config.schema.recipe import Model
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.layout import RunDir
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.families.random_models import TOKENS_BL, our_logits, small_shape, theirs

ROWS = 512
"""Of the table of tokens: as many as the corpus has."""


@pytest.mark.parametrize(
    "model_type",
    ["qwen2", *(pytest.param(name, marks=pytest.mark.system) for name in ("llama", "qwen3"))],
)
def test_a_model_trains_over_tp_and_its_export_opens_with_equal_logits(
    corpus: Corpus, tmp_path: Path, model_type: str
) -> None:
    source = tmp_path / "source"
    theirs(replace(small_shape(model_type), vocab_size=ROWS)).save_pretrained(source)
    exported = {}
    for tp in (1, 2):
        run_dir = make_run(
            tmp_path / f"tp-{tp}",
            corpus,
            {
                "run": {"steps": 3},
                "model": {"preset": None, "path": str(source), "weights": "load"},
                "optim": {"lr": 1e-3, "global_batch": 2},
                "parallel": {"tp": tp},
                "cluster": {"devices": tp},
            },
        )
        run_on_ranks(train_here, tp, run_dir)
        exported[tp] = tmp_path / f"export-{tp}"
        checkpoint = choose_checkpoint(RunDir(run_dir.path), "latest").path
        export(checkpoint, read_resolved(run_dir.resolved(0)), exported[tp])

    def opened(folder: Path) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(TOKENS_BL).logits
        return logits

    logits_BLV = opened(exported[2])
    shape = read_shape(Model(path=str(exported[2])), exported[2], 0)
    assert shape == read_shape(Model(path=str(source)), source, 0)
    torch.testing.assert_close(logits_BLV, our_logits(shape, exported[2]))
    torch.testing.assert_close(logits_BLV, opened(exported[1]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits_BLV, opened(source), atol=1e-2)
