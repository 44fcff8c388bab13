"""The tutorial on Slurm, step by step on a real Slurm: each line works, and prints what is shown.

Numbers differ from machine to machine, so that only the words of an output are compared.
"""

import os
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from shardyard.rundir.jsonl import read_lines
from shardyard.rundir.layout import RunDir
from tests.e2e.shardyard import Place, make_place, wait_for, wait_for_step
from tests.launchers.slurm_cluster import SlurmCluster, slurm_cluster
from tests.test_docs import _FENCED, ROOT, files_of, is_printed

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs/tutorials/train-on-slurm.md"
STEPS = 300
"""Fewer than in the page: a test types faster than a reader."""

_PATHS = os.pathsep.join(str(ROOT / name) for name in ("src", "."))


def steps_of(page: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Steps of the rehearsal and of the removal: heading, lines for a shell, output shown."""
    for step in page.read_text().split("\n## "):
        if re.match(r"([3-9]|10|12)\. ", step):
            blocks = _FENCED.findall(step)
            lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
            shown = [line for kind, text in blocks if kind == "text" for line in text.splitlines()]
            yield step.splitlines()[0], lines, shown


def words(text: str) -> str:
    """An output without its numbers, names of runs and widths of columns."""
    text = re.sub(r"rehearsal-(?:prepare-)?\d{8}-\d{6}-[0-9a-f]{4}(?:-prepare-\w+)?", "ID", text)
    text = re.sub(r"rehearsal-(?:prepare-)?\.\.\.", "ID", text)
    text = re.sub(r"[\d.,]*\d( K)? tokens/s .*", "speed", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"\d[\d.,]*", "#", text))


class Reader:
    """A user who follows the page: types its lines, with the run and the job of the moment."""

    def __init__(self, place: Place, cluster: SlurmCluster) -> None:
        self.place = place
        self.cluster = cluster
        self.job = ""
        self.run_id = ""
        self.last = ""
        """Output of the line before."""

    @property
    def run_dir(self) -> RunDir:
        return self.place.run_dir(self.run_id)

    def type(self, line: str) -> str:
        """Run a line as it is in the page, and return all that it prints."""
        argv = shlex.split(line, comments=True)
        if argv[0] != "shardyard":
            return self.cluster.client(*(self.job if word == "JOB" else word for word in argv))
        argv = [self.run_id if word == "RUN" else word for word in argv[1:]]
        answer = self.place.run(*argv, SLURM_CONF=self.cluster.env["SLURM_CONF"])
        is_cancelled = argv[0] == "watch" and "was asked to save" in self.last
        assert answer.code == (143 if is_cancelled else 0), f"{line}\n{answer.out}{answer.err}"
        self.last = answer.out + answer.err
        if argv[0] in ("launch", "resume") and "--dry-run" not in argv:
            (self.run_id,) = re.findall(r"^run: +(\S+)$", self.last, re.MULTILINE)
            (self.job,) = re.findall(r"^job: (\d+) ", self.last, re.MULTILINE)
        return self.last

    def has_drained(self) -> bool:
        """Whether the run saved its step and its job waits to start again."""
        is_waiting = self.cluster.state(self.job) == "PENDING"
        return is_waiting and self.place.state(self.run_id) == "drained"

    def last_step(self) -> int:
        return max(int(line["step"]) for line in read_lines(self.run_dir.metrics))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A shared folder with the recipe, of which the reader has changed the partition."""
    folder = tmp_path_factory.mktemp("shared")
    recipe = files_of(PAGE)["rehearsal.yaml"].replace("partition: cpu", "partition: main")
    recipe = recipe.replace("steps: 2000}", f"steps: {STEPS}}}")
    recipe = recipe.replace("eval_every_steps: 1000}", "eval_every_steps: 100}")
    env = f"  env: {{PYTHONPATH: '{_PATHS}', OMP_NUM_THREADS: '1'}}\n"
    (folder / "rehearsal.yaml").write_text(recipe + env)
    with make_place(folder) as made:
        yield made


def test_the_steps_of_the_tutorial_work_one_after_the_other(
    place: Place, cluster: SlurmCluster
) -> None:
    reader = Reader(place, cluster)
    numbers = []
    for heading, lines, shown in steps_of(PAGE):
        number = heading.partition(".")[0]
        printed = ""
        for line in takewhile(lambda line: not line.startswith("rm "), lines):
            if (number, line) == ("6", "shardyard watch RUN"):  # that would last to the run's end
                wait_for_step(reader.run_dir, 50)
                printed += reader.type("shardyard logs RUN")
            else:
                printed += reader.type(line)
            if line.startswith("scontrol requeue"):
                wait_for(reader.has_drained)
        if number == "7":
            saved = reader.last_step()
            cluster.start_now(reader.job)
            wait_for_step(reader.run_dir, saved + 12)
            printed += reader.type("shardyard logs RUN --all")
        printed = words(printed.replace("main", "cpu"))
        assert [line for line in shown if not is_printed(words(line), printed)] == [], printed
        numbers.append(number)
    assert numbers == ["3", "4", "5", "6", "7", "8", "9", "10", "12"]
    assert (place.folder / "my-model" / "model.safetensors").is_file()
    steps = [line["step"] for line in read_lines(reader.run_dir.metrics) if "loss" in line]
    assert steps == list(range(1, STEPS + 1)), "none lost, none twice"
