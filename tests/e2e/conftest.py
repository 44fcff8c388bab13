"""One small corpus, and the runs that several tests look at; each start of a run takes seconds."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.shardyard import Answer, Place, make_place

NUM_DOCUMENTS = 40
_CHARACTERS = 8000
"""Most of a document."""

RECIPE = """\
model: {preset: llama-tiny}
data: {source: ./text, vocab_size: 512, seq_len: 32, workers: 1, eval_fraction: 0.1}
run: {steps: 24}
task: {eval_every_steps: 12}
optim: {lr: 1e-2, global_batch: 6, micro_batch: 1}
parallel: {strategy: FULL_SHARD}
cluster: {device: cpu, devices: 2}
checkpoint: {every: 8}
observe: {log_every: 1}
"""


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A folder with a recipe and some text: the beginnings of Python modules."""
    folder = tmp_path_factory.mktemp("e2e")
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "text").mkdir()
    # Python's own modules: a text of ours changes with each commit, and with it how far rounding
    # drives two layouts apart.
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number, module in enumerate(modules[:NUM_DOCUMENTS]):
        text = module.read_text(encoding="utf-8")[:_CHARACTERS]
        (folder / "text" / f"{number:03d}.txt").write_text(text)
    with make_place(folder) as made:
        yield made


@pytest.fixture(scope="session")
def prepared(place: Place) -> Answer:
    """The answer of the `prepare` that all runs find done."""
    return place.run("prepare", "tiny.yaml", "--json")


@pytest.fixture(scope="session")
def base(place: Place, prepared: Answer) -> Answer:  # noqa: ARG001
    """The answer of an undisturbed run: `base`, 24 steps, two processes, FULL_SHARD."""
    return place.run("train", "tiny.yaml", "run.id=base", "task.generate_tokens=4", "--json")


@pytest.fixture(autouse=True)
def _nothing_left(place: Place) -> Iterator[None]:
    """Whatever a test does: no process and no file of ours outlives it."""
    yield
    place.assert_nothing_left()
