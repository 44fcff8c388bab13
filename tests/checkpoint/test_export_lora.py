"""Adapters of a run opened by PEFT, and merged into their base: the logits of the run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from shardyard.checkpoint.export import export, main, plan_export
from shardyard.checkpoint.export_formats import adapter_shapes, planned
from shardyard.checkpoint.load import read_shapes
from shardyard.config.adapter_files import WEIGHTS
from shardyard.config.resolved import Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.weight_files import ADAPTER
from shardyard.control.export import export_options
from shardyard.errors import CheckpointError, RequestError
from shardyard.families.presets import PRESETS
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import read_resolved
from shardyard.rundir.contracts import sentence
from shardyard.rundir.layout import RunDir
from shardyard.train.hooks import Hooks
from shardyard.train.setup import set_up
from tests.distributed.ranks import run_on_ranks
from tests.distributed.runs import Corpus, make_run, train_here
from tests.families.random_models import theirs

pytestmark = pytest.mark.heavy

TOKENS = torch.arange(48).reshape(2, 24) * 7 % 512


def _sections(model: dict[str, Any], *, lr: float = 0.05, steps: int = 3) -> dict[str, Any]:
    return {
        "run": {"steps": steps},
        "model": {"lora": {"rank": 4, "alpha": 8, "targets": ["self_attn", "down_proj"]}, **model},
        "optim": {"lr": lr, "global_batch": 4, "warmup_steps": 1},
        "cluster": {"devices": 2},
        "parallel": {"tp": 2},
    }


def _logits_of_run(run_dir: RunDir, attempt: int = 0) -> Tensor:
    """With the adapter on, of the newest checkpoint."""
    hooks = Hooks(generation=0, drain_requested=lambda: False, events=None)
    training = set_up(run_dir, attempt, hooks, local_rank=0)
    model = training.task.model.eval()
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        logits: Tensor = model(TOKENS, positions, torch.arange(len(TOKENS))).clone()
    training.close()
    return logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Path:
    """A Hugging Face folder of a tiny Llama, as somebody else wrote it."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    shape = read_resolved(make_run(folder.parent / "shape", corpus, {}).resolved(0)).shape
    torch.manual_seed(1)
    LlamaForCausalLM(hf_config(require_shape(shape))).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, base: Path) -> RunDir:
    """Two processes, tp 2."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    run_dir = make_run(folder, corpus, _sections({"path": str(base), "preset": None}))
    run_on_ranks(train_here, 2, run_dir)
    return run_dir


def _resolved(run_dir: RunDir) -> Resolved:
    return read_resolved(run_dir.resolved(0))


def test_a_checkpoint_holds_adapters_alone(trained: RunDir) -> None:
    names = set(read_shapes(trained.checkpoint(3)))
    weights = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    assert weights == set(adapter_shapes(_resolved(trained)))
    assert {name.split(".", 2)[2] for name in names if name.startswith("optim.")} == weights


def test_peft_opens_the_adapter_and_computes_the_logits_of_the_run(
    trained: RunDir, corpus: Corpus, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    from peft import LoraConfig, PeftModel

    run_on_one = make_run(
        trained.path,
        corpus,
        {
            **_sections({"path": _resolved(trained).model_dir, "preset": None}),
            "parallel": {},
            "cluster": {"devices": 1},
        },
        attempt=1,
    )
    expected = run_on_ranks(_logits_of_run, 1, run_on_one, 1)[0]
    export(trained.checkpoint(3), _resolved(trained), tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {ADAPTER, WEIGHTS}
    assert not (tmp_path / "adapter" / "config.json").exists()
    config = LoraConfig.from_pretrained(tmp_path / "adapter")
    assert isinstance(config, LoraConfig)
    assert (config.r, config.lora_alpha, config.bias) == (4, 8, "none")
    model = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path)
    off = _logits(model)
    adapted = PeftModel.from_pretrained(model, tmp_path / "adapter")
    on = _logits(adapted)
    assert (on - off).norm() > 1e-3 * off.norm()
    torch.testing.assert_close(on, expected, rtol=1e-5, atol=1e-5)

    export(trained.checkpoint(3), _resolved(trained), tmp_path / "merged", merged=True)
    merged = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, on, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged.argmax(-1), on.argmax(-1))
    torch.testing.assert_close(_logits(adapted.merge_and_unload()), merged, rtol=1e-5, atol=1e-5)


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(input_ids=TOKENS).logits.clone()
    return logits


def test_adapters_beside_matrices_that_files_transpose_open_in_peft(
    corpus: Corpus, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the dev extra has it")
    from peft import PeftModel

    folder = tmp_path / "base"
    theirs(replace(PRESETS["gpt2-tiny"].shape, vocab_size=512)).save_pretrained(folder)
    sections = _sections({"path": str(folder), "preset": None})
    sections["model"]["lora"] = {"rank": 4, "targets": ["c_proj", "c_fc"]}
    sections |= {"parallel": {}, "cluster": {"devices": 1}}
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(train_here, 1, run_dir)
    found = {}
    for merged in (False, True):
        to = tmp_path / f"merged {merged}"
        export(run_dir.checkpoint(3), _resolved(run_dir), to, merged=merged)
        model = AutoModelForCausalLM.from_pretrained(to if merged else folder)
        found[merged] = _logits(model if merged else PeftModel.from_pretrained(model, to))
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[True], _logits(AutoModelForCausalLM.from_pretrained(folder)))


def test_merged_weights_are_rounded_once(trained: RunDir, tmp_path: Path) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        export(trained.checkpoint(3), _resolved(trained), folder, dtype=dtype, merged=True)
        found.append(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())
    for name, whole in found[0].items():
        assert torch.equal(whole.to(torch.bfloat16), found[1][name]), name


def test_a_base_from_a_seed_is_drawn_again(corpus: Corpus, tmp_path: Path) -> None:
    preset = {"preset": "llama-pocket"}  # its head is the table
    run_dir = make_run(tmp_path / "run", corpus, _sections(preset))
    run_on_ranks(train_here, 2, run_dir)
    one = {**_sections(preset), "parallel": {}, "cluster": {"devices": 1}}
    expected = run_on_ranks(_logits_of_run, 1, make_run(run_dir.path, corpus, one, attempt=1), 1)[0]
    export(run_dir.checkpoint(3), _resolved(run_dir), tmp_path / "merged", merged=True)
    found = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_program_writes_the_form_asked_for(
    trained: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for merged, form, words in (
        (False, "adapter", "parameters of adapters in PEFT's format"),
        (True, "merged", "parameters with adapters merged"),
    ):
        options = export_options({"step": "latest", "dtype": None, "merged": merged})
        assert main([str(trained.path), "--into", str(tmp_path), *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["form"] == form and told["to"].endswith(f"-{form}")
        assert words in sentence(told)


def test_another_base_is_refused(
    trained: RunDir, base: Path, corpus: Corpus, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base, moved)
    run_dir = make_run(tmp_path / "run", corpus, _sections({"path": str(moved), "preset": None}))
    shutil.copytree(trained.checkpoints, run_dir.checkpoints)
    file = moved / "model.safetensors"
    content = bytearray(file.read_bytes())
    for place in range(len(content) // 2, len(content)):
        content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(RequestError, match=r"holds other weights than those .* without --merged"):
        export(run_dir.checkpoint(3), _resolved(run_dir), tmp_path / "to", merged=True)
    assert plan_export(run_dir.checkpoint(3), _resolved(run_dir), tmp_path / "to").form == "adapter"
    again = {**_sections({"path": str(moved), "preset": None}), "run": {"steps": 4}}
    make_run(run_dir.path, corpus, again, attempt=1)
    with pytest.raises(RuntimeError, match=r"model\.base: '\w+' -> '\w+'"):
        run_on_ranks(train_here, 2, run_dir, 1)


def test_an_adapter_without_effect_is_told(corpus: Corpus, base: Path, tmp_path: Path) -> None:
    sections = _sections({"path": str(base), "preset": None}, lr=1e-60, steps=1)
    run_dir = make_run(tmp_path / "run", corpus, sections)
    run_on_ranks(train_here, 2, run_dir)
    for merged in (False, True):
        with pytest.raises(CheckpointError, match=r"no effect: lora_B of all 10 .* optim\.lr"):
            plan_export(run_dir.checkpoint(1), _resolved(run_dir), tmp_path / "to", merged=merged)


def test_a_run_without_adapters_has_none_to_merge(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, {})
    with pytest.raises(RequestError, match=r"--merged: this run trained no adapters"):
        plan_export(Path("step"), _resolved(run_dir), tmp_path / "to", merged=True)


def test_parts_of_a_fused_matrix_are_no_adapters_of_peft(corpus: Corpus, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", corpus, _sections({"lora": {"rank": 4}}))
    fused = replace(_resolved(run_dir), shape=PRESETS["phi3-mini-4k"].shape)
    with pytest.raises(
        RequestError, match=r"q_proj .* is a part of self_attn\.qkv_proj .*--merged"
    ):
        planned(fused, {})


def test_the_config_says_what_was_trained(trained: RunDir, tmp_path: Path) -> None:
    export(trained.checkpoint(3), _resolved(trained), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / ADAPTER).read_text())
    assert config["target_modules"] == ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    assert config["task_type"] == "CAUSAL_LM"
    assert Path(config["base_model_name_or_path"]) == Path(str(_resolved(trained).model_dir))
