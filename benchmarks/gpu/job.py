"""What one process of a contender is told, as a file between the command and the contender."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.cells import Cell, Load


@dataclass(frozen=True, kw_only=True)
class Job:
    """One try of one cell."""

    cell: Cell
    run_dir: str
    """A run folder with resolved.json and plan.json; the model's shape and the data are in it."""
    device: str
    steps: int
    warm_up: int
    stop_at: float
    """Unix seconds at which the measurement should be over."""
    compiled: str | None = None
    """A folder of compiled code: what is in it is used, and what is compiled is added."""
    profile: bool = False
    """Whether one more step is taken apart; our own contender alone."""

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of one rank in one step."""
        return self.cell.load.sequences // self.cell.micro_batch

    def answer_file(self, rank: int) -> Path:
        """Where a rank writes what it found."""
        return Path(self.run_dir) / f"answer-{rank}.json"

    def write(self) -> Path:
        """Returns the file, in its run folder."""
        path = Path(self.run_dir) / "job.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @staticmethod
    def read(path: Path) -> "Job":
        content = json.loads(path.read_text())
        cell = content.pop("cell")
        return Job(cell=Cell(load=Load(**cell.pop("load")), **cell), **content)
