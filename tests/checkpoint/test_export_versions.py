"""Each family's export opens in the oldest and the newest transformers that are accepted."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForPreTraining,
)

from shardyard.checkpoint.buffers import buffers_of
from shardyard.checkpoint.export import export
from shardyard.checkpoint.export_files import ExportFiles
from shardyard.checkpoint.export_formats import InferenceTensors, write_generic, write_network
from shardyard.checkpoint.retention import step_name
from shardyard.checkpoint.save import Saver
from shardyard.config.schema.recipe import Optim
from shardyard.config.versions import ENGINES
from shardyard.families.images.registry import KINDS
from shardyard.families.presets import PRESETS
from shardyard.families.registry import FAMILIES
from shardyard.models.build import hf_config
from shardyard.models.images import build_network, load_network
from shardyard.rundir.attempt_files import read_resolved
from tests.checkpoint.test_export_images import resolved_of as resolved_of_network
from tests.distributed.image_runs import SIZE, TINY
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.families.random_models import TOKENS_BL, small_shape, theirs
from tests.families.test_against_transformers import resolved_of, save_untrained

pytestmark = pytest.mark.slow

OPENED = """
import sys, torch, transformers
from pathlib import Path
from safetensors.torch import load_file
for folder in map(Path, sys.argv[2:]):
    inputs = load_file(folder.parent / "inputs.safetensors")
    wanted = {name: inputs.pop(name) for name in [*inputs] if name.endswith("logits")}
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    model, told = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not told["missing_keys"] and not told["unexpected_keys"], (folder, told)
    with torch.no_grad():
        out = model.eval()(**inputs)
    for name, each in wanted.items():
        torch.testing.assert_close(out[name], each)
assert transformers.__version__ == sys.argv[1], transformers.__version__
"""

ENGINE = next(engine for engine in ENGINES if engine.package == "transformers")


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the oldest transformers that is accepted, and the client of the hub for it."""
    to = tmp_path_factory.mktemp("oldest")
    _fetch(to, f"transformers=={ENGINE.tested[0]}")
    needed = next(to.glob("transformers-*.dist-info/METADATA")).read_text()
    (hub,) = re.findall(r"^Requires-Dist: (huggingface[-_]hub\S*?)(?:;.*)?$", needed, re.MULTILINE)
    _fetch(to, hub)
    return to


def _fetch(to: Path, package: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(to)]
    done = subprocess.run([*command, package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} cannot be fetched here: {done.stderr.strip()[-200:]}")


def test_exports_of_all_families_open_in_the_oldest_and_the_newest_transformers(
    oldest: Path, tmp_path: Path, alone: dist.ProcessGroup, corpus: Corpus
) -> None:
    folders = [_text(tmp_path / each, each, alone) for each in FAMILIES]
    folders += [_network(tmp_path / each, each, alone) for each in KINDS]
    folders.append(_generic(tmp_path / "generic", alone))
    folders.append(_of_pairs(tmp_path / "pairs", alone))
    folders.append(_merged(tmp_path / "merged", corpus))
    for path, version in (("", _installed()), (str(oldest), ENGINE.tested[0])):
        environ = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", OPENED, version, *map(str, folders)]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"transformers {version}: {done.stderr[-3000:]}"


def _installed() -> str:
    import transformers

    return str(transformers.__version__)


def _keep(folder: Path, model: Any, **inputs: torch.Tensor) -> None:
    with torch.no_grad():
        out = model.eval()(**inputs)
    logits = {name: each.contiguous() for name, each in out.items() if name.endswith("logits")}
    assert logits
    save_file({**inputs, **logits}, folder / "inputs.safetensors")


def _text(folder: Path, model_type: str, group: dist.ProcessGroup) -> Path:
    source, exported = folder / "source", folder / "exported"
    model = theirs(small_shape(model_type))
    model.save_pretrained(source)
    _keep(folder, model, input_ids=TOKENS_BL)
    resolved = resolved_of(source)
    export(save_untrained(resolved, folder / "checkpoints", group), resolved, exported)
    return exported


def _of_pairs(folder: Path, group: dist.ProcessGroup) -> Path:
    """BERT with both of its heads."""
    source, exported = folder / "source", folder / "exported"
    torch.manual_seed(0)
    shape = replace(small_shape("bert"), judges_pairs=True)
    model = AutoModelForPreTraining.from_config(hf_config(shape), attn_implementation="eager")
    model.save_pretrained(source)
    _keep(folder, model, input_ids=TOKENS_BL)
    resolved = replace(resolved_of(source), shape=shape)
    export(save_untrained(resolved, folder / "checkpoints", group), resolved, exported)
    return exported


def _merged(folder: Path, corpus: Corpus) -> Path:
    """A Llama with trained adapters merged, and what PEFT computes with them beside its base."""
    from peft import PeftModel

    base, exported = folder / "source", folder / "exported"
    theirs(replace(PRESETS["llama-tiny"].shape, vocab_size=512)).save_pretrained(base)
    lora = {"rank": 4, "targets": ["self_attn", "down_proj"]}
    model = {"path": str(base), "preset": None, "lora": lora}
    run_dir = make_run(folder / "run", corpus, {"model": model, "optim": {"lr": 0.05}})
    run_on_ranks(train_here, 1, run_dir)
    checkpoint, resolved = run_dir.checkpoint(4), read_resolved(run_dir.resolved(0))
    export(checkpoint, resolved, folder / "adapter")
    export(checkpoint, resolved, exported, merged=True)
    beside = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    adapted = PeftModel.from_pretrained(beside, folder / "adapter")
    _keep(folder, adapted, input_ids=TOKENS_BL)
    return exported


def _saved(folder: Path, model: torch.nn.Module, group: dist.ProcessGroup) -> Path:
    held = {f"model.{name}": each.detach() for name, each in model.named_parameters()}
    saver = Saver(folder, group=group, rank=0, world_size=1, keep_last=1)
    saver.save(1, {**held, **buffers_of(model)}, {})
    saver.wait()
    saver.close()
    return folder / step_name(1)


def _network(folder: Path, kind: str, group: dist.ProcessGroup) -> Path:
    source, exported = folder / "source", folder / "exported"
    exported.mkdir(parents=True)
    torch.manual_seed(0)
    theirs = AutoModelForImageClassification.from_config(
        AutoConfig.for_model(kind, **TINY[kind], num_labels=4)
    )
    theirs.save_pretrained(source)
    _keep(folder, theirs, pixel_values=torch.randn(2, 3, SIZE, SIZE))
    content = json.loads((source / "config.json").read_text())
    network = KINDS[kind].of_config(content, "config.json").with_classes(4)
    model = build_network(network)
    load_network(model, network, source, seed=0, rows=range(4))
    checkpoint = _saved(folder / "checkpoints", model, group)
    write_network(checkpoint, resolved_of_network(network, folder), exported, dtype=torch.float32)
    return exported


def _generic(folder: Path, group: dist.ProcessGroup) -> Path:
    """OPT, which no family here describes."""
    exported = folder / "exported"
    exported.mkdir(parents=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "opt", vocab_size=300, hidden_size=32, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _keep(folder, model, input_ids=TOKENS_BL)
    content = json.loads(config.to_json_string(use_diff=False))
    beside = ExportFiles(copied={}, config=content, has_own_tokenizer=False, warnings=())
    checkpoint = _saved(folder / "checkpoints", model, group)
    weights = InferenceTensors(checkpoint, Optim())
    write_generic(
        checkpoint, beside, exported,
        task="causal_lm", label_fields={}, dtype=torch.float32, weights=weights,
    )  # fmt: skip
    return exported
