"""An exported folder opens with transformers and computes what the run computed."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from shardyard.checkpoint.export import export, main, plan_export
from shardyard.checkpoint.retention import mark_best
from shardyard.checkpoint.save import Saver
from shardyard.checkpoint.select import choose_checkpoint
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.config.rules.custom_module import require_shape
from shardyard.config.schema.recipe import Recipe
from shardyard.errors import CheckpointError, RequestError, StorageError
from shardyard.families.presets import PRESETS
from shardyard.families.shape import ModelShape
from shardyard.io.digests import COMPLETE
from shardyard.models.build import hf_config
from shardyard.rundir.attempt_files import write_resolved
from shardyard.rundir.layout import RunDir

TOKENS = torch.arange(24).reshape(2, 12) % 96  # those of scenes.train_and_save

# hidden 64, inner 172, 4 heads of 16 on 2 KV heads, 2 blocks, vocabulary 96
PARAMETERS = 2 * 96 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172 + 2 * 64) + 64
assert PARAMETERS == 103_232


def resolve(data_dir: Path, *, tied: bool = False) -> Resolved:
    fields = {**PRESETS["llama-tiny"].shape.to_dict(), "vocab_size": 96}
    return Resolved(
        recipe=Recipe(),
        reasons={},
        shape=ModelShape(**{**fields, "tie_word_embeddings": tied}),
        data=DatasetMetadata(
            dir=str(data_dir), fingerprint="0", vocab_size=96, train_tokens=1, eval_tokens=1,
            train_documents=1, eval_documents=1, unigram_entropy=1.0,
        ),
        steps=2,
    )  # fmt: skip


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A prepared data set, as far as export looks at it."""
    folder = tmp_path / "prepared"
    folder.mkdir()
    vocabulary = {**{f"t{number}": number for number in range(95)}, "<|end|>": 95}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def run_dir(trained: Path, data_dir: Path) -> RunDir:
    """A run whose checkpoints two ranks wrote."""
    run = RunDir(data_dir.parent / "tiny-run")
    run.path.mkdir()
    run.checkpoints.mkdir()
    for folder in (trained / "checkpoints").iterdir():
        target = run.checkpoints / folder.name
        if folder.is_dir():
            target.mkdir()
            for file in folder.iterdir():
                (target / file.name).write_bytes(file.read_bytes())
        else:
            target.write_bytes(folder.read_bytes())
    write_resolved(run.resolved(1), resolve(data_dir))
    return run


def logits_of(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=TOKENS).logits
    return logits


@pytest.mark.heavy
def test_an_export_computes_the_logits_of_the_sharded_run(
    run_dir: RunDir, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf")]) == 0
    assert "exported step-00000002: 103,232 parameters, 403.2 KiB" in capsys.readouterr().out
    wanted = torch.from_numpy(np.load(trained / "logits.npy"))
    torch.testing.assert_close(logits_of(tmp_path / "hf"), wanted, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["eos_token_id"] == 95
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "<|end|>"


@pytest.mark.heavy
def test_many_small_files_and_one_large_file_hold_the_same(
    run_dir: RunDir, data_dir: Path, tmp_path: Path
) -> None:
    checkpoint = run_dir.checkpoint(2)
    whole = export(checkpoint, resolve(data_dir), tmp_path / "one")
    split = export(checkpoint, resolve(data_dir), tmp_path / "many", max_shard_bytes=100_000)
    assert list(whole.files) == ["model.safetensors"]
    assert len(split.files) > 3
    for name in split.files:
        assert (tmp_path / "many" / name).stat().st_size < 102_000  # the header comes on top
    assert torch.equal(logits_of(tmp_path / "one"), logits_of(tmp_path / "many"))


def test_tied_embeddings_stay_tied(
    tmp_path: Path, data_dir: Path, alone: dist.ProcessGroup
) -> None:
    resolved = resolve(data_dir, tied=True)
    torch.manual_seed(1)
    model = LlamaForCausalLM(hf_config(require_shape(resolved.shape))).eval()
    saver = Saver(tmp_path / "checkpoints", group=alone, rank=0, world_size=1, keep_last=1)
    saver.save(1, {f"model.{name}": each.detach() for name, each in model.named_parameters()}, {})
    saver.wait()
    saver.close()
    export(tmp_path / "checkpoints" / "step-00000001", resolved, tmp_path / "hf")
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (it is no dict)
    with torch.no_grad():
        wanted = model(input_ids=TOKENS).logits
    torch.testing.assert_close(logits_of(tmp_path / "hf"), wanted)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert opened.lm_head.weight is opened.model.embed_tokens.weight


@pytest.mark.heavy
def test_the_dtype_asked_for_is_the_one_written(run_dir: RunDir, tmp_path: Path) -> None:
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {param.dtype for param in opened.parameters()} == {torch.bfloat16}
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert PARAMETERS * 2 < size < PARAMETERS * 2 + 10_000


@pytest.mark.heavy
def test_a_dry_run_says_what_it_would_write_and_writes_nothing(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(run_dir.path), "--to", str(tmp_path / "hf"), "--dry-run", "--json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["parameters"], told["files"]) == (
        2,
        PARAMETERS,
        ["model.safetensors"],
    )
    assert not (tmp_path / "hf").exists()


@pytest.mark.heavy
def test_a_folder_that_is_not_empty_is_refused(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hf").mkdir()
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf"), "--dry-run"]) == 0
    (tmp_path / "hf" / "mine.txt").write_text("")
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf")]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine.txt"]


@pytest.mark.heavy
def test_a_damaged_checkpoint_is_passed_over_for_latest_and_refused_by_number(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir.checkpoint(2) / "rank-00001.safetensors").unlink()
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf"), "--step", "2"]) == 1
    told = capsys.readouterr().err
    assert "step-00000002 is damaged: rank-00001.safetensors: missing" in told
    assert "Use --step latest for the newest sound checkpoint" in told
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf")]) == 0
    told, answer = (lambda out: (out.err, out.out))(capsys.readouterr())
    assert "warning: step-00000002 is damaged: rank-00001.safetensors: missing" in told
    assert "exported step-00000001" in answer


@pytest.mark.heavy
def test_best_is_what_an_evaluation_named(run_dir: RunDir) -> None:
    with pytest.raises(RequestError, match=r"--step best: .* has no such checkpoint.*1, 2"):
        choose_checkpoint(run_dir, "best")
    mark_best(run_dir.checkpoints, 1)
    assert choose_checkpoint(run_dir, "best").step == 1
    run_dir.best.write_text("step-00000009\n")
    with pytest.raises(RequestError, match=r"best names .*step-00000009 is gone.* 1, 2"):
        choose_checkpoint(run_dir, "best")


@pytest.mark.heavy
@pytest.mark.parametrize("step", ["7", "newest", "-1"])
def test_a_step_that_does_not_exist_is_refused_with_those_that_do(
    run_dir: RunDir, step: str
) -> None:
    with pytest.raises(RequestError, match=r"has those of steps 1, 2"):
        choose_checkpoint(run_dir, step)


def test_no_run_and_no_checkpoint_are_wrong_requests(
    tmp_path: Path, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "nothing"), "--to", str(tmp_path / "hf")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    write_resolved(RunDir(tmp_path / "young").resolved(1), resolve(data_dir))
    assert main([str(tmp_path / "young"), "--to", str(tmp_path / "hf")]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.heavy
def test_a_checkpoint_of_another_model_is_refused(run_dir: RunDir, data_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 tensors differ.*lm_head\.weight"):
        plan_export(run_dir.checkpoint(2), resolve(data_dir, tied=True), Path("hf"))


@pytest.mark.heavy
def test_an_unwritable_target_is_told_and_leaves_nothing(
    run_dir: RunDir, data_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written.*the checkpoint is untouched"):
        export(run_dir.checkpoint(2), resolve(data_dir), tmp_path / "file" / "hf")


@pytest.mark.heavy
def test_without_its_tokenizer_the_export_says_so(
    run_dir: RunDir, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data_dir / "tokenizer.json").unlink()
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf")]) == 0
    assert "holds no tokenizer any more" in capsys.readouterr().err
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.heavy
def test_the_verb_finds_the_run_and_starts_the_export(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.recipe.write_text("")
    call = "import sys; from shardyard.cli.export import command; command(sys.argv[1:])"
    asked = ["tiny", "--runs-dir", str(run_dir.path.parent), "--to", str(tmp_path / "hf")]
    done = subprocess.run(
        [sys.executable, "-c", call, *asked, "--dry-run"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("would export step-00000002: 103,232 parameters")


@pytest.mark.heavy
def test_an_export_says_which_step_it_is_of_and_what_was_verified(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir.path), "--to", str(tmp_path / "hf")]) == 0
    told = capsys.readouterr().out
    assert "exported step-00000002" in told
    assert "verified: the checkpoint's 3 files, " in told and "against its manifest" in told
    listed = json.loads((tmp_path / "hf" / COMPLETE).read_text())
    wanted = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in (tmp_path / "hf").iterdir()
        if path.name != COMPLETE
    }
    assert listed["files"] == wanted and "model.safetensors" in wanted
    assert (listed["made_of"]["step"], listed["made_of"]["dtype"]) == (2, "float32")


@pytest.mark.heavy
def test_an_export_that_was_killed_and_is_repeated_has_equal_digests_and_leaves_no_scratch(
    run_dir: RunDir, data_dir: Path, tmp_path: Path
) -> None:
    left = tmp_path / ".hf.export.tmp"  # what SIGKILL leaves
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    (left / "another-file").write_bytes(b"half")
    export(run_dir.checkpoint(2), resolve(data_dir), tmp_path / "hf")
    export(run_dir.checkpoint(2), resolve(data_dir), tmp_path / "other")
    assert (tmp_path / "hf" / COMPLETE).read_bytes() == (tmp_path / "other" / COMPLETE).read_bytes()
    assert not (tmp_path / "hf" / "another-file").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.heavy
def test_the_same_export_again_finds_it_there_and_holds_every_file_to_its_digest(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [str(run_dir.path), "--to", str(tmp_path / "hf")]
    assert main(asked) == 0
    before = (tmp_path / "hf" / "model.safetensors").stat().st_mtime_ns
    assert main(asked) == 0
    assert "had exported already step-00000002" in capsys.readouterr().out
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mtime_ns == before
    assert main([*asked, "--dtype", "bfloat16"]) == 2  # another export
    assert "is not an empty folder" in capsys.readouterr().err
    (tmp_path / "hf" / "config.json").write_text("{}")
    assert main(asked) == 2
    told = capsys.readouterr().err
    assert "it was changed since: config.json: 2 bytes long instead of" in told


@pytest.mark.heavy
def test_what_an_export_says_of_itself_is_not_taken_into_the_next_export(
    run_dir: RunDir, data_dir: Path, tmp_path: Path
) -> None:
    first = export(run_dir.checkpoint(1), resolve(data_dir), tmp_path / "first")
    resolved = resolve(data_dir)
    model = resolved.recipe.model.model_copy(
        update={"preset": None, "path": str(tmp_path / "first")}
    )
    trained_on = replace(resolved, recipe=resolved.recipe.model_copy(update={"model": model}))
    second = export(run_dir.checkpoint(2), trained_on, tmp_path / "second")
    assert (
        "tokenizer.json" in second.extra_files.copied and COMPLETE not in second.extra_files.copied
    )
    assert (first.provenance["step"], second.provenance["step"]) == (1, 2)
