"""`shardyard prepare`, and how answers of our own programs are read."""

import json
import shutil
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.config.resolved import DatasetMetadata, Resolved
from shardyard.control.attempt import eval_set_words, prepare_data
from shardyard.control.request import Request
from shardyard.control.subprocesses import run_program
from shardyard.errors import AccessError, RequestError, ShardyardError
from shardyard.hardware.machine import Machine
from tests.data.images.made import class_folders
from tests.data.test_bos import as_llama_2

MACHINE = Machine(device="cpu", name="a CPU", count=1, memory_bytes=2**33, cores=2, hostname="a")


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    text = "\n\n".join(f"def f{n}():\n    return {n} * {n}" for n in range(400))
    for n in range(6):
        (tmp_path / f"{n}.txt").write_text(text + str(n))
    return [
        "model.preset=llama-tiny",
        f"data.source={tmp_path}/*.txt",
        f"data.dir={tmp_path}/prepared",
        "data.vocab_size=300",
        "data.eval_fraction=0.3",
        "data.workers=1",
    ]


@pytest.mark.heavy
def test_prepared_data_is_described_and_found_again(
    recipe: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["prepare", *recipe, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert Path(facts["dir"]).is_dir()
    assert facts["vocab_size"] <= 300
    assert facts["train_documents"] + facts["eval_documents"] == 6
    assert main(["prepare", *recipe]) == 0
    assert facts["dir"] in capfd.readouterr().out


@pytest.mark.heavy
def test_sets_to_validate_on_are_described_and_found_under_the_names_of_another_node(
    recipe: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    hard = tmp_path / "hard" / "a.txt"
    hard.parent.mkdir()
    hard.write_text("a hard question")
    recipe = [*recipe, f"data.eval_sets.hard={hard}"]
    assert main(["prepare", *recipe, "--dry-run"]) == 0
    shown = capfd.readouterr().out
    assert f"{hard}" in shown and "30% of the documents; each by itself: hard" in shown
    assert main(["prepare", *recipe, "--verify", "--json"]) == 0
    ours = DatasetMetadata(**json.loads(capfd.readouterr().out))
    assert "tokens of 1 documents (a.txt)" in eval_set_words(ours.eval_sets[0])
    folders = [Path(folder) for folder in ours.fingerprints]
    assert len(folders) == 2 and all(folder.is_dir() for folder in folders)
    for folder in folders:
        shutil.rmtree(folder)
    hard.touch()  # folders are named by the times of files, which differ between nodes
    theirs = prepare_data(Request.read(recipe), like=ours)
    assert theirs.fingerprints == ours.fingerprints


@pytest.mark.heavy
def test_a_run_of_before_whose_data_is_gone_gets_it_again_as_it_was(
    recipe: list[str], tmp_path: Path
) -> None:
    folder = as_llama_2(tmp_path / "tokenizer")
    request = Request.read([*recipe, f"data.tokenizer={folder}"])
    today = prepare_data(request)
    content = request.resolve(MACHINE, today).to_json()
    del content["settings"]["data.bos"], content["data"]["bos_token"]
    again = prepare_data(request, previous=Resolved.from_json(content))
    assert (today.bos_token, again.bos_token) == ("<s>", None)
    documents = today.train_documents + today.eval_documents
    assert again.train_tokens + again.eval_tokens + documents == (
        today.train_tokens + today.eval_tokens
    )


@pytest.mark.heavy
def test_a_flipped_bit_is_found_when_asked_for(
    recipe: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    main(["prepare", *recipe, "--json"])
    folder = Path(json.loads(capfd.readouterr().out)["dir"])
    shard = next(folder.glob("train-*.bin"))
    data = bytearray(shard.read_bytes())
    data[100] ^= 1  # still a token of the vocabulary: training could not tell
    shard.write_bytes(data)
    assert main(["prepare", *recipe]) == 0
    assert main(["prepare", *recipe, "--verify"]) == 1
    err = capfd.readouterr().err
    assert f"{shard} is damaged: its SHA-256 is" in err
    assert "Delete the folder" in err


def test_a_dry_run_says_what_it_would_do_and_does_nothing(
    recipe: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["prepare", *recipe, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"{tmp_path}/*.txt" in out
    assert "train a byte-level BPE of 300 tokens" in out
    assert not (tmp_path / "prepared").exists()
    assert main(["prepare", *recipe, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["validation"] == (
        "what is named validation; without it 30% of the documents"
    )


def test_a_dry_run_of_images_speaks_of_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["task.name=image_classification", "model.preset=resnet18", "optim.lr=0.1"]
    assert main(["prepare", *words, f"data.source={tmp_path}", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "what is named val, else test; without it 5% of the pictures" in said
    assert "tokenizer" not in said and "documents" not in said


@pytest.mark.heavy
def test_class_folders_are_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class_folders(tmp_path / "pictures", {"ant": range(8), "bee": range(8)})
    words = ["task.name=image_classification", "model.preset=resnet18", "optim.lr=0.1"]
    places = [f"data.source={tmp_path / 'pictures'}", f"data.dir={tmp_path / 'prepared'}"]
    assert main(["prepare", *words, *places, "data.eval_fraction=0.25", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_classes"] == 2
    assert facts["train_samples"] + facts["eval_samples"] == 16


@pytest.mark.heavy
def test_an_error_of_the_data_program_is_ours(
    recipe: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["prepare", *recipe, "data.source=/nowhere/*.txt"])
    captured = capfd.readouterr()
    assert code == 2
    assert captured.err.startswith("error: ")
    assert "/nowhere" in captured.err
    assert "Traceback" not in captured.err


def program(folder: Path, code: str) -> str:
    """A module that can be started by name."""
    (folder / "fake_program.py").write_text(code)
    return "fake_program"


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("exit_code", "error"), [(1, ShardyardError), (2, RequestError), (4, AccessError)]
)
def test_an_exit_code_says_which_error_it_was(
    exit_code: int,
    error: type[ShardyardError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the current folder is not looked in
    answer = {"error": "no way", "exit_code": exit_code}
    module = program(tmp_path, f"print('''{json.dumps(answer)}'''); raise SystemExit({exit_code})")
    with pytest.raises(error, match="no way") as raised:
        run_program(module, [])
    assert type(raised.value) is error


@pytest.mark.heavy
def test_a_program_that_dies_without_an_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the current folder is not looked in
    module = program(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ShardyardError, match=r"signal SIGKILL \(out of memory\?\)"):
        run_program(module, [])


@pytest.mark.heavy
def test_an_interrupted_program_interrupts_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # the current folder is not looked in
    with pytest.raises(KeyboardInterrupt):
        run_program(program(tmp_path, "raise SystemExit(130)"), [])


@pytest.mark.heavy
def test_samples_are_shown_as_training_reads_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        "model.preset=llama-tiny",
        f"data.source={tmp_path}/rows.jsonl",
        f"data.dir={tmp_path}/prepared",
        "data.format=chat",
        "data.chat_template=chatml",
        "data.tokenizer=train",
        "data.vocab_size=300",
        "data.pack=whole",
        "data.seq_len=256",
        "data.workers=1",
    ]
    assert main(["prepare", *settings, "--show", "1", "--json"]) == 0
    (sample,) = json.loads(capfd.readouterr().out)["samples"]
    question, answer = sample["parts"][:2]
    number = question["text"].partition("What is ")[2].partition("?")[0]
    assert not question["loss"] and question["text"].endswith("<|im_start|>assistant\n")
    assert answer["loss"] and answer["text"].startswith(f"It is {number}.<|im_end|>")
    answers = [part["text"] for part in sample["parts"] if part["loss"]]
    assert all(text.endswith("<|im_end|><|endoftext|>") for text in answers) and len(answers) > 1
    assert 0 < sample["loss_tokens"] < sample["tokens"] <= 256
    assert main(["prepare", *settings, "--show", "2"]) == 0
    printed = capfd.readouterr().out
    assert "sample 2: " in printed and f'loss  "{answer["text"]}' in printed
