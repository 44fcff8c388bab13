"""Wrong commands as people type them: exit code, what is wrong, and the fix to paste.

Each message names all problems at once. None of these commands starts a process.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardyard.cli import main
from shardyard.control import attempt, submission
from shardyard.control.request import Request
from shardyard.control.train import first_attempt
from shardyard.errors import RequestError
from shardyard.hardware.machine import Machine
from shardyard.io.files import write_json

RECIPE = """\
model: {preset: llama-tiny}
data: {seq_len: 32}
optim: {global_batch: 8}
run: {steps: 2}
"""
MANY = """\
model: {preset: llama-tinny}
data: {sequence_length: 2k, source: no-such-text}
optim: {lr: "fast", batch_size: 8, betas: 0.9}
run: {steps: ten}
"""
LLAMA = """\
model: {preset: llama2-7b}
data: {source: /shared/my-text}
cluster: {nodes: 2, instance: p5.48xlarge}
secrets: {HF_TOKEN: env}
"""
FILES = {
    "recipe.yaml": RECIPE,
    "many.yaml": MANY,
    "llama.yaml": LLAMA,
    "tabs.yaml": "model:\n\tpreset: llama-tiny\n",
    "open.yaml": "model: {preset: llama-tiny\noptim:\n  lr: 1e-4\n",
    "nospace.yaml": "model:\n  preset:llama-tiny\n",
    "list.yaml": "- model\n- data\n",
    "twice.yaml": "model: {preset: llama-tiny}\nmodel: {preset: gpt2}\n",
    "other.yaml": "optim: {lr: 1e-4}\nmodel: {path: my-modle}\n",
    "text/a.txt": "hello\n",
    "my-model/config.json": "{}",
}


@dataclass(frozen=True)
class Wrong:
    """A wrong command, its exit code, and words of its message, in this order."""

    command: str
    words: tuple[str, ...]
    exit_code: int = 2

    def __str__(self) -> str:
        return self.command


def wrong(command: str, *words: str, exit_code: int = 2) -> Wrong:
    return Wrong(command, words, exit_code)


TABLE = (
    # verbs and options
    wrong("trian recipe.yaml", "unknown verb 'trian'", "`shardyard train recipe.yaml`"),
    wrong("start recipe.yaml", "unknown verb 'start'", "`shardyard train recipe.yaml`"),
    wrong("stop done", "unknown verb 'stop'", "`shardyard cancel done`"),
    wrong("merge done", "unknown verb 'merge'", "shardyard export RUN --to my-model --merged"),
    wrong("generate done", "unknown verb 'generate'", "`shardyard chat done`"),
    wrong("chat", "Missing argument", "For example: shardyard chat my-run"),
    wrong("chat done --top_k 5", "unknown option --top_k", "Did you mean --top-k?"),
    wrong("plan llama2-7b", "recipe llama2-7b does not exist", "model.preset=llama2-7b"),
    wrong("plan owner/name", "recipe owner/name does not exist", "model.hub=owner/name"),
    wrong("plan model.preset=llama-tiny cluster.device=A100", "'A100'", "instance=p4d.24xlarge"),
    wrong("config task.metrics=own:acc", "'own:acc'", "task.metrics=[own:acc]"),
    wrong("config data.eval_fraction=10%", "'10%'", "Did you mean 0.1?"),
    wrong("train", "Missing argument", "For example: shardyard train model.preset=llama-tiny"),
    wrong("train recipe.yaml --steps 10", "unknown option --steps", "run.steps=10"),
    wrong("train recipe.yaml --nodes 2", "unknown option --nodes", "cluster.nodes=2"),
    wrong("plan recipe.yaml --offer", "unknown option --offer", "--offers"),
    wrong("export done", "Missing option '--to'", "shardyard export my-run --to my-model"),
    wrong("export done --format gguf", "unknown option --format", "--to"),
    wrong("bench netwrok recipe.yaml", "'netwrok'", "Did you mean 'network'?"),
    wrong("study recipe.yaml --nodes two", "'two'", "1,2,4"),
    # settings
    wrong("train recipe.yaml gpus=8", "gpus", "Did you mean cluster.devices=8?"),
    wrong("train recipe.yaml lr=1e-4", "lr", "Did you mean optim.lr=1e-4?"),
    wrong("train recipe.yaml fp16=true", "Did you mean precision.compute=fp16?"),
    wrong("train recipe.yaml --bf16", "Did you mean precision.compute=bf16?"),
    wrong("train recipe.yaml gradient_accumulation_steps=4", "mean optim.micro_batch=...?"),
    wrong("train recipe.yaml unheard=1", "Write SECTION.unheard=VALUE."),
    wrong("train recipe.yaml batch_size=8", "batch_size", "Did you mean optim.global_batch=8?"),
    wrong("train recipe.yaml optim.lr = 1e-4", "one word without spaces", "optim.lr=VALUE"),
    wrong("train recipe.yaml optim.lerning_rate=1e-4", "Did you mean optim.lr?"),
    wrong("train recipe.yaml optim.lr=fast", "optim.lr='fast' is not a number above 0"),
    wrong("train recipe.yaml run.seed=99999999999999999999", "too large", "below 9,223,"),
    wrong("train recipe.yaml optim.milestone_factor=2", "a number above 0 and below 1"),
    wrong("train recipe.yaml precision.compute=fp61", "Did you mean fp16?"),
    wrong("launch recipe.yaml --on slurm launch.time_limit=90", "Did you mean 90min?"),
    wrong("train model.preset=lama-tiny", "Did you mean llama-tiny?"),
    wrong(
        "train model.preset=meta-llama/Llama-2-7b-hf",
        "Did you mean model.hub=meta-llama/Llama-2-7b-hf?",
    ),
    wrong("plan recipe.yaml cluster.instance=p5.48xlage", "Did you mean p5.48xlarge"),
    wrong("plan recipe.yaml cluster.instance=h100", "Did you mean p5.4xlarge, p5.48xlarge?"),
    wrong(
        "train many.yaml",
        "many.yaml has 7 problems",
        "data.sequence_length: unknown setting. Did you mean data.seq_len?",
        "optim.batch_size: unknown setting. Did you mean optim.global_batch?",
        "run.steps='ten'",
        "optim.lr='fast'",
        "optim.betas=0.9",
        "model.preset=llama-tinny is not a preset. Did you mean llama-tiny?",
        "data.source='no-such-text' does not exist",
    ),
    # files
    wrong("train recipee.yaml", "does not exist", "Did you mean recipe.yaml?"),
    wrong("train text", "recipe text is a folder", "data.source=text"),
    wrong("train tabs.yaml", "line 2", "spaces, not tabs", "sed -i"),
    wrong("train open.yaml", "line 2", "The { of line 1 is not closed: add }."),
    wrong("train nospace.yaml", "no space after its colon", "`preset: llama-tiny`"),
    wrong("train list.yaml", "a list at the top", "`model: {preset: llama-tiny}`"),
    wrong("train twice.yaml", "model is given twice, on lines 1 and 2"),
    wrong(
        "train recipe.yaml data.source=txet optim.warmup_steps=9 optim.decay_steps=5",
        "has 2 problems",
        "optim.warmup_steps=9",
        "data.source='txet' does not exist",
        "Did you mean data.source=text?",
    ),
    wrong("train recipe.yaml other.yaml", "has", "my-modle does not exist", "model.path=my-model?"),
    wrong(
        "train recipe.yaml secrets.HF_TOKEN=env data.source=gone",
        "has 2 problems",
        "data.source='gone' does not exist",
        "secrets.HF_TOKEN",
        "export HF_TOKEN=...",
    ),
    # launches
    wrong("launch recipe.yaml", "--on is missing", "shardyard launch recipe.yaml --on slurm"),
    wrong("launch recipe.yaml --on kubernets", "Did you mean kubernetes?"),
    wrong("launch recipe.yaml --on slurm --yes", "cluster.devices=auto", "cluster.devices=8"),
    wrong(
        "launch recipe.yaml --on local cluster.device=cpu",
        "this is not a terminal",
        "--yes",
    ),
    wrong(
        "launch llama.yaml --on kubernetes --yes",
        "has 5 problems",
        "launch.kubernetes.context: is not given",
        "data.source=/shared/my-text",
        "launch.volumes='[{path: /shared, claim: NAME}]'",
        "secrets.HF_TOKEN=env: jobs of kubernetes cannot read HF_TOKEN from your shell",
        "`kubectl create secret generic hf-token",
        "secrets.HF_TOKEN=k8s:hf-token/token",
        "launch.image: is not set",
        "launch.run_dir: is not set",
    ),
    wrong("launch llama.yaml --on slurm --yes", "data.source=/shared/my-text does not exist"),
    wrong(
        "train recipe.yaml model.preset=llama3-70b cluster.device=cpu",
        "the plan does not fit",
        "--force",
        "docs: troubleshooting#does-not-fit-or-cuda-out-of-memory",
    ),
    # runs
    wrong("status nope", "RUN 'nope'", "The newest there is done"),
    wrong("report nope", "RUN 'nope'", "--runs-dir"),
    wrong("compare done", "Name another run", "`shardyard report RUN`"),
    wrong("cancel done", "started by `shardyard train`", "not running", "`shardyard report done`"),
    wrong("scale done 4", "run done has no job"),
    wrong("train recipe.yaml run.id=done", "run.id='done' exists", "`shardyard resume done`"),
    wrong("status done", "", exit_code=0),
    wrong("logs done", "", exit_code=0),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes, text, and a run that `shardyard train` finished."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    run = tmp_path / "runs" / "done"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(RECIPE)
    events = [
        {"t": 1.0, "kind": "run_started", "attempt": 0, "generation": 0},
        {"t": 2.0, "kind": "attempt_started", "attempt": 0, "generation": 0},
        {"t": 3.0, "kind": "run_finished", "attempt": 0, "generation": 0, "step": 2},
    ]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in events))
    step = {"step": 2, "loss": 2.5, "attempt": 0, "generation": 0}
    (run / "metrics.jsonl").write_text(f"{json.dumps(step)}\n")
    write_json(run / "lease.json", {})
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for module in (attempt, submission):
        monkeypatch.setattr(module, "local_machine", lambda _device: machine(16))
    return tmp_path


def machine(gib: float) -> Machine:
    """A laptop without accelerator and with so much memory."""
    return Machine(
        device="cpu",
        name="CPU",
        count=1,
        memory_bytes=round(gib * 2**30),
        cores=2,
        hostname="laptop",
    )


class DataReached(Exception):  # noqa: N818  not an error
    """Checks have passed, and the data would be prepared now."""


def words_of(command: str) -> list[str]:
    return re.findall(r"\S+", command)


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_message_and_exit_code(case: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(words_of(case.command))
    said = capsys.readouterr().err
    assert code == case.exit_code, said
    for words in case.words:
        assert words in said


def test_the_table_has_at_least_forty_commands() -> None:
    assert len(TABLE) >= 40
    assert len({case.command for case in TABLE}) == len(TABLE)


@pytest.mark.parametrize("verb", ["status", "logs", "watch"])
def test_verbs_answer_for_a_run_that_train_started(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, "done"]) == 0
    out = capsys.readouterr().out
    assert ("finished" in out and "2.5000" in out) or verb != "status"


def test_status_in_json_has_the_keys_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "done", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["run_id"], content["launcher"], content["state"]) == ("done", None, "finished")
    assert content["run"]["step"] == 2


def fits(monkeypatch: pytest.MonkeyPatch, gib: float, *, is_forced: bool = False) -> bool:
    """Whether `train` begins to prepare data on a machine with so much memory."""

    def reached(*_arguments: object, **_options: object) -> None:
        raise DataReached

    monkeypatch.setattr(attempt, "local_machine", lambda _device: machine(gib))
    monkeypatch.setattr(attempt, "prepare_data", reached)
    words = ["recipe.yaml", "model.preset=llama-1b", "optim.global_batch=1", "cluster.device=cpu"]
    try:
        first_attempt(Request.read(words, runs_here=True), is_forced=is_forced)
    except DataReached:
        return True
    except RequestError as error:
        assert "the plan does not fit" in str(error)
        return False
    raise AssertionError


def test_train_rejects_a_model_that_does_not_fit_before_data_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "local_machine", lambda _device: machine(64))
    request = Request.read(
        ["recipe.yaml", "model.preset=llama-1b", "optim.global_batch=1", "cluster.device=cpu"]
    )

    def verdict(gib: float) -> str:
        preview = request.preview(machine(gib))
        plan, _ = submission.predict(request, preview, machine(gib), devices=1)
        assert plan is not None
        return plan.fits

    low, high = 1.0, 64.0
    while high / low > 1.005:
        middle = (low + high) / 2
        low, high = (middle, high) if verdict(middle) == "does not fit" else (low, middle)
    assert verdict(high) == "tight"  # within the error of the prediction, so it starts
    assert fits(monkeypatch, high)
    assert not fits(monkeypatch, low)
    assert fits(monkeypatch, low, is_forced=True)


@pytest.mark.parametrize(
    "words",
    [
        "train model.preset=llama-tiny tokenizer={}",
        "train model.preset=llama-tiny HF_TOKEN={}",
        "train model.preset=llama-tiny --tokenizer {}",
        "start model.preset=llama-tiny data.tokenizer={}",
        "launch model.preset=llama-tiny data.tokenizer={}",
    ],
)
def test_a_credential_in_the_wrong_place_is_not_printed(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    credential = "hf_" + "aB3dE6gH9jK2mN5pQ8sT" * 2
    assert main(words.format(credential).split()) == 2
    assert credential not in capsys.readouterr().err
