"""A causal model of transformers of no family here: split, resumed and exported as any other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardyard.checkpoint.export import export
from shardyard.config.rules.custom_module import MODULE
from shardyard.config.schema.recipe import Model, Recipe
from shardyard.data.tokenizer import train_bpe
from shardyard.errors import RecipeError, RequestError
from shardyard.models import folder_report
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.jsonl import read_steps
from shardyard.rundir.layout import RunDir
from shardyard.train.custom_model import blocks_of_transformer, open_causal_lm
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, prepare_corpus, train_here

pytestmark = pytest.mark.heavy

STEPS = 3
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]],
    },
    "olmo": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": None,
    },
}  # fmt: skip
TOKENS_BL = torch.arange(24).reshape(2, 12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(tmp_path_factory.mktemp("corpus"))


def saved(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=512, **CONFIGS[kind])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def logits_of(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder)(TOKENS_BL).logits
    return logits


def _train_all(run_dirs: list[RunDir]) -> None:
    for run_dir in run_dirs:
        assert train_here(run_dir) == "finished"


@pytest.mark.parametrize("kind", ["olmo", pytest.param("gpt_neo", marks=pytest.mark.system)])
def test_it_trains_alike_on_the_data_axes_and_its_export_opens(
    kind: str, corpus: Corpus, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    layouts: dict[str, dict[str, Any]] = {
        "whole": {},
        "zero 3": {"dp_shard": 2, "zero": 3},
        "zero 1": {"dp_shard": 2, "zero": 1},
        "DDP": {"dp_replicate": 2, "dp_shard": 1},
    }
    runs = {
        name: make_run(
            tmp_path / name,
            corpus,
            {
                "run": {"steps": STEPS},
                "model": {
                    "preset": None, "path": str(source), "module": MODULE, "weights": "load"
                },
                "optim": {"lr": 0.1, "global_batch": 4, "name": "sgd", "weight_decay": 0.0},
                "memory": {"recompute": "full" if parallel else "none"},
                "parallel": parallel,
                "cluster": {"devices": 2 if parallel else 1},
            },
        )
        for name, parallel in layouts.items()
    }  # fmt: skip
    run_on_ranks(_train_all, 1, [runs["whole"]])
    run_on_ranks(_train_all, 2, [run for name, run in runs.items() if name != "whole"])
    numbers = {
        name: [line[key] for line in read_steps(run.metrics) for key in ("loss", "grad_norm")]
        for name, run in runs.items()
    }
    for name, found in numbers.items():
        assert found == pytest.approx(numbers["whole"], rel=1e-5), name
    exported = {}
    for name in ("whole", "zero 3"):
        exported[name] = tmp_path / f"export of {name}"
        resolved = read_resolved(runs[name].resolved(0))
        export(runs[name].checkpoint(STEPS), resolved, exported[name])
    torch.testing.assert_close(
        logits_of(exported["whole"]), logits_of(exported["zero 3"]), rtol=1e-4, atol=1e-5
    )
    assert not torch.allclose(logits_of(exported["whole"]), logits_of(source), atol=1e-3)
    folders = (source, exported["whole"])
    configs = [json.loads((each / "config.json").read_text()) for each in folders]
    assert configs[0] == configs[1]


def test_its_blocks_are_those_that_transformers_keeps_together(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(path=str(tmp_path), weights="load"))
    model = open_causal_lm(recipe, saved("gpt_neo", tmp_path), vocab_size=512)
    assert list(blocks_of_transformer(model)) == ["transformer.h.0", "transformer.h.1"]
    assert next(model.parameters()).dtype == torch.float32


def test_a_tokenizer_that_is_larger_than_its_table_is_refused(tmp_path: Path) -> None:
    recipe = Recipe(model=Model(path=str(tmp_path), weights="random"))
    with pytest.raises(RecipeError, match="has 513 tokens, the model's embedding has 512 rows"):
        open_causal_lm(recipe, saved("gpt_neo", tmp_path), vocab_size=513)


@pytest.mark.parametrize("kind", CONFIGS)
def test_added_tokens_get_the_mean_row(kind: str, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    files = train_bpe(iter(["to be or not to be"]), vocab_size=300)
    added = [
        {"id": number, "content": f"<{number}>", "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True}
        for number in (512, 513)
    ]  # fmt: skip
    content = json.loads(files["tokenizer.json"])
    content["added_tokens"] += added
    (folder / "tokenizer.json").write_text(json.dumps(content))
    recipe = Recipe(model=Model(path=str(folder), weights="load"))
    plain = open_causal_lm(recipe, folder, vocab_size=512, tokenizer_dir=folder)
    grown = open_causal_lm(recipe, folder, vocab_size=514, tokenizer_dir=folder)
    for before, after in (
        (plain.get_input_embeddings(), grown.get_input_embeddings()),
        (plain.get_output_embeddings(), grown.get_output_embeddings()),
    ):
        assert torch.equal(after.weight[:512], before.weight)
        mean = before.weight.mean(dim=0).expand(2, -1)
        torch.testing.assert_close(after.weight[512:], mean, rtol=1e-5, atol=1e-6)


def test_code_of_the_folder_is_not_run(tmp_path: Path) -> None:
    config = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    with pytest.raises(RequestError, match=r"cannot open .* Code of the folder's own is not run"):
        open_causal_lm(Recipe(), tmp_path, vocab_size=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("model.layers.0.mlp.up_proj.weight"), "lacks 1 tensors"),
        (lambda state: state.update(v_head=torch.ones(3)), "no place for: v_head"),
        (lambda state: state.update({"lm_head.weight": torch.ones(4, 32)}), "of another shape"),
    ],
)
def test_a_folder_that_lacks_or_has_more_is_rejected(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, tmp_path: Path
) -> None:
    """transformers itself only warns."""
    folder = saved("olmo", tmp_path)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    assert said in " ".join(folder_report.main(folder, "causal_lm"))
    recipe = Recipe(model=Model(path=str(folder)))
    with pytest.raises(RequestError, match=said):
        open_causal_lm(recipe, folder, vocab_size=512)


def test_the_export_of_a_head_that_differs_from_its_table_has_it(
    corpus: Corpus, tmp_path: Path
) -> None:
    source = saved("olmo", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    sections = {
        "run": {"steps": 1},
        "model": {"preset": None, "path": str(source), "module": MODULE, "weights": "load"},
        "optim": {"lr": 1e-9, "warmup_steps": 0},
    }
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(train_here, 1, run_dir)
    export(run_dir.checkpoint(1), read_resolved(run_dir.resolved(0)), tmp_path / "export")
    torch.testing.assert_close(logits_of(tmp_path / "export"), logits_of(source))
