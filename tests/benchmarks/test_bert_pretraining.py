"""The benchmark of BERT's own training runs, small, and says whether its bars are met."""

import importlib.util
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_trains_and_judges_a_small_model(tmp_path: Path) -> None:
    text = tmp_path / "documents.jsonl"
    modules = sorted((Path(sysconfig.get_path("stdlib")) / "email").glob("*.py"))
    documents = [file.read_text() for file in modules]
    text.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    out = tmp_path / "result.json"
    words = [str(text), "--steps", "20", "--every", "10", "--accuracy", "1e-9", "--width", "32"]
    words += ["--layers", "1", "--vocabulary", "512", "--out", str(out)]
    if importlib.util.find_spec("accelerate") is None:
        words.append("--without-trainer")
    command = [sys.executable, "-m", "benchmarks.bert_pretraining", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    found = json.loads(out.read_text())
    learnt = found["learnt"]
    assert done.returncode == (0 if learnt["passed"] else 1), done.stderr
    assert [each["step"] for each in learnt["evaluations"]] == [10, 20]
    last = learnt["evaluations"][-1]
    expected = last["masked_accuracy"] / last["most_frequent_token"]
    assert learnt["times_the_most_frequent"] == pytest.approx(expected)
    assert learnt["samples_per_s_apart"] < 1e-3
    for race in found["race"] or []:
        assert race["shardyard"]["steps"] == race["trainer"]["steps"] == 10
        assert race["cpu_ratio"] > 0
