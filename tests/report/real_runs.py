"""Five small runs that are made for real, and what of them is recorded for the fast tests.

``python -m tests.report.real_runs`` makes them (minutes) and writes ``tests/report/recorded``.
"""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.conftest import NUM_DOCUMENTS, RECIPE
from tests.e2e.shardyard import Place, events, make_place, wait_for_step

NAMES = ("plain", "resumed", "lost", "images", "chat")
RECORDED = Path(__file__).with_name("recorded")
ROOT = Path(__file__).parents[2]

_FILES = ("events.jsonl", "metrics.jsonl", "sample.txt")
_ATTEMPT_FILES = ("resolved.json", "plan.json", "manifest.json")


def make(place: Place) -> None:
    """Train all five in the runs folder of a place."""
    (place.folder / "tiny.yaml").write_text(RECIPE)
    (place.folder / "text").mkdir()
    for number, module in enumerate(sorted((ROOT / "src").rglob("*.py"))[:NUM_DOCUMENTS]):
        (place.folder / "text" / f"{number}.txt").write_text(module.read_text() or "# empty\n")
    _run(place, "train", "tiny.yaml", "run.id=plain", "task.generate_tokens=24")
    _resumed(place)
    _lost(place)
    every = ("task.eval_every_epochs=null", "task.eval_every_steps=15", "run.epochs=null")
    digits = ("train", str(ROOT / "examples" / "digits.yaml"), "run.id=images", "run.steps=30")
    _run(place, *digits, *every, "optim.warmup_steps=4", "data.workers=1")
    chat = ("train", str(ROOT / "examples" / "chat-small.yaml"), "run.id=chat", "run.steps=12")
    source = f"data.source={ROOT / 'examples' / 'dialogues.jsonl'}"
    _run(place, *chat, source, "model.lora.rank=4")


def _run(place: Place, *words: str) -> None:
    answer = place.run(*words)
    assert answer.code == 0, answer.err


def _resumed(place: Place) -> None:
    """Two ranks, a drain, then one rank."""
    run_dir = place.run_dir("resumed")
    with place.start("train", "tiny.yaml", "run.id=resumed", "run.steps=400") as running:
        wait_for_step(run_dir, 30)
        running.send(signal.SIGTERM)
        assert running.wait().code == 143
    lines = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    steps = max(line["step"] for line in lines) + 8
    more = ("cluster.devices=1", f"run.steps={steps}", "task.generate_tokens=24")
    _run(place, "resume", "resumed", *more)


def _lost(place: Place) -> None:
    """A worker is killed, and all return to a snapshot or a checkpoint."""
    run_dir = place.run_dir("lost")
    with place.start("train", "tiny.yaml", "run.id=lost", "run.steps=40") as running:
        wait_for_step(run_dir, 12)
        (started,) = events(run_dir, "attempt_started")
        os.kill(started["workers"][1]["pid"], signal.SIGKILL)
        assert running.wait().code == 0


def record(place: Place) -> None:
    """Copy what the report reads, without the paths of this machine."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    for name in NAMES:
        run, to = place.run_dir(name), RECORDED / name
        found = [run.path / file for file in _FILES]
        found += [run.attempt(k) / file for k in run.attempts() for file in _ATTEMPT_FILES]
        for file in filter(Path.is_file, found):
            copy = to / file.relative_to(run.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text().replace(str(ROOT), "/source").replace(str(place.folder), "/w")
            copy.write_text(_compact(copy.name, text))


def _compact(name: str, text: str) -> str:
    """A JSON file on one line; of a manifest the machine and its start."""
    if not name.endswith(".json"):
        return text
    content: dict[str, Any] = json.loads(text)
    if name == "manifest.json":
        content = {key: content[key] for key in ("contract_version", "machine", "started_at")}
    return json.dumps(content) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, make_place(Path(folder)) as made:
        make(made)
        record(made)
