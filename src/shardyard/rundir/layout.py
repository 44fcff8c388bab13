"""Location of each file of a run's folder (run directory contract, version 1)."""

import difflib
import re
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from shardyard.errors import RequestError, StorageError
from shardyard.io.files import read_json, read_plain

VERSION = 1
"""Version of the run directory contract, written into every manifest."""

RUNS_DIR = "runs"
"""Default folder of runs, without run.dir or --runs-dir."""

_OF_A_RUN = ("ledger.jsonl", "submissions", "events.jsonl", "attempts")
_MOST_POINTER_BYTES = 4096
"""Most bytes of ``latest`` and ``best``, which hold a name."""
_STEP = re.compile(r"step-(\d{8})", re.ASCII)


@dataclass(frozen=True)
class RunDir:
    """Folder of one run; holds paths, and does no reading or writing by itself."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def handle(self) -> str:
        """What to type for RUN in this folder: the id, or the path where the id would not do."""
        is_found = self.path.parent == (Path.cwd() / RUNS_DIR).resolve()
        return self.run_id if is_found else shlex.quote(str(self.path))

    @property
    def recipe(self) -> Path:
        """The requested recipe, overrides applied."""
        return self.path / "recipe.yaml"

    @property
    def events(self) -> Path:
        """One JSON object a line: the life of the run."""
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: a step or an evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def lease(self) -> Path:
        """Locked by the agent that trains this run."""
        return self.path / "lease.json"

    @property
    def ledger(self) -> Path:
        """One JSON object a line: what was created outside this folder, and the jobs."""
        return self.path / "ledger.jsonl"

    @property
    def exists(self) -> bool:
        """Whether the folder is that of a run, by any file that one has from its beginning.

        A power cut can take any of them, and a run that is lost from sight may cost money.
        """
        return is_run(self.path)

    def submission(self, name: int | str) -> Path:
        """Return the file of one job's request: the recipe with a resume's overrides.

        Args:
            name: Number of the job, from 1; for a side job, its label.
        """
        return self.path / "submissions" / f"{name}.yaml"

    def submissions(self) -> list[Path]:
        """Return the request files of all jobs."""
        return sorted((self.path / "submissions").glob("*.yaml"))

    def answer(self, side_label: str) -> Path:
        """Return the file of a side job's answer, once it was forwarded."""
        return self.path / "side" / f"{side_label}.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def latest(self) -> Path:
        """Text file that holds the name of the newest durable checkpoint."""
        return self.checkpoints / "latest"

    @property
    def best(self) -> Path:
        """Text file that holds the name of the checkpoint with the best evaluation."""
        return self.checkpoints / "best"

    @property
    def exports(self) -> Path:
        """Folder of exported checkpoints, each a folder: what other runs start from."""
        return self.path / "exports"

    @property
    def sample(self) -> Path:
        """Text generated at the end of the run."""
        return self.path / "sample.txt"

    @property
    def samples(self) -> Path:
        """One JSON object a line: a text generated at a step, with its prompt."""
        return self.path / "samples.jsonl"

    @property
    def predictions(self) -> Path:
        """A few validation images with labels and predictions at the end of the run."""
        return self.path / "predictions.json"

    @property
    def confusion(self) -> Path:
        """Classes that the last validation took for others."""
        return self.path / "confusion.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def exporters(self) -> Path:
        """Folder of the processes that send the run to W&B and MLflow: logs, files of clients."""
        return self.path / "exporters"

    @property
    def telemetry(self) -> Path:
        """Folder with a file a node: its devices every few seconds."""
        return self.path / "telemetry"

    def telemetry_of(self, node_rank: int) -> Path:
        """Lines of one node."""
        return self.telemetry / f"node-{node_rank}.jsonl"

    @property
    def reference(self) -> Path:
        """Folder of the log-probabilities of pairs of answers under the reference model."""
        return self.path / "reference"

    @property
    def profiles(self) -> Path:
        """Folder with a folder a profile, by its first step."""
        return self.path / "profiles"

    def profile(self, step: int) -> Path:
        """profile.json and a trace a rank."""
        return self.profiles / f"step-{step:08d}"

    @property
    def profile_request(self) -> Path:
        """Profile request to rank 0; missing without a request."""
        return self.path / "requests" / "profile.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def report_markdown(self) -> Path:
        return self.path / "report.md"

    def attempt(self, number: int) -> Path:
        """Folder of one attempt: resolved.json, plan.json, manifest.json."""
        return self.path / "attempts" / str(number)

    def attempt_recipe(self, attempt: int) -> Path:
        """Return the file of this attempt's request: the recipe with a resume's overrides."""
        return self.attempt(attempt) / "recipe.yaml"

    def resolved(self, attempt: int) -> Path:
        return self.attempt(attempt) / "resolved.json"

    def script(self, attempt: int) -> Path:
        """Return the file of what a user's own script gave to ``shardyard.run``."""
        return self.attempt(attempt) / "script.json"

    def failure(self, attempt: int, rank: int) -> Path:
        """Return the file in which a rank says why it ended."""
        return self.attempt(attempt) / f"failure-rank-{rank}.json"

    def plan(self, attempt: int) -> Path:
        return self.attempt(attempt) / "plan.json"

    def manifest(self, attempt: int) -> Path:
        return self.attempt(attempt) / "manifest.json"

    def secret(self, attempt: int) -> Path:
        """Return the file of the secret that this attempt's nodes share.

        Only its owner may read it.
        """
        return self.attempt(attempt) / "secret"

    def session(self, name: str) -> Path:
        """Return the file by which node 0, or its substitute, informs other nodes of a start."""
        return self.path / "sessions" / f"{name}.json"

    def log(self, attempt: int, rank: int) -> Path:
        """Output of one process."""
        return self.path / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def attempts(self) -> list[int]:
        """Numbers of the attempts made so far, in order."""
        folder = self.path / "attempts"
        if not folder.is_dir():
            return []
        names = [entry.name for entry in folder.iterdir()]
        return sorted(int(name) for name in names if name.isascii() and name.isdigit())

    def checkpoint_steps(self) -> list[int]:
        """Steps of all checkpoints that hold what their manifests say, oldest first.

        Names and sizes are looked at; only a load reads the content. What was copied to another
        step's name does not count, nor do ``.tmp`` folders.
        """
        if not self.checkpoints.is_dir():
            return []
        found = {step_of_name(entry.name): entry for entry in self.checkpoints.iterdir()}
        return sorted(
            step for step, folder in found.items() if step is not None and _is_whole(folder, step)
        )

    def latest_checkpoint(self) -> Path | None:
        """The folder that ``latest`` names; None where it names none that is there."""
        try:
            name = read_plain(self.latest, limit_bytes=_MOST_POINTER_BYTES).decode().strip()
        except (OSError, StorageError, UnicodeDecodeError):
            return None
        folder = self.checkpoints / name
        return folder if step_of_name(name) is not None and folder.is_dir() else None


REPLACED = ".replaced"
"""Ending of a checkpoint from whose steps a run went back (``resume --step``)."""


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run; see ``RunDir.exists``."""
    if (folder / "recipe.yaml").is_file():
        return True
    has_any = any((folder / name).exists() for name in _OF_A_RUN)
    return has_any and not (folder / "cluster.json").exists()  # a cluster has a ledger, too


def step_of_name(name: str) -> int | None:
    """The step of a complete checkpoint's folder; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def _is_whole(folder: Path, step: int) -> bool:
    """Whether a checkpoint has its manifest, of this step, and every file in its size."""
    try:
        manifest = read_json(folder / "manifest.json")
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        is_its_own: bool = manifest["step"] == step
        return is_its_own and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def new_run_id(name: str, now: float | None = None) -> str:
    """``<name>-<yyyymmdd-hhmmss>-<4 hex>``, in UTC."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    return f"{name}-{stamp}-{secrets.token_hex(2)}"


def find_run(run: str, runs_dir: Path, *, option: str = "--runs-dir") -> RunDir:
    """Find a run by path, id, or unique prefix of its id.

    Args:
        option: Option or setting that names the folder of runs, for an error.

    Raises:
        RequestError: There is no such run, or the prefix fits several.
    """
    as_path = Path(run)
    if is_run(as_path):
        return RunDir(as_path.resolve())
    known = (
        sorted(entry.name for entry in runs_dir.iterdir() if is_run(entry))
        if runs_dir.is_dir()
        else []
    )
    fits = [run] if run in known else [name for name in known if name.startswith(run)]
    if len(fits) == 1:
        return RunDir((runs_dir / fits[0]).resolve())
    if fits:
        raise RequestError(
            f"RUN {run!r} fits {len(fits)} runs: {', '.join(fits)}. Give more of the id."
        )
    names = {each.rsplit("-", 3)[0]: each for each in known}  # of each name the newest
    near = [names[name] for name in difflib.get_close_matches(run, names, n=1)]
    newest = f" The newest there is {known[-1]}." if known else " The folder has no runs."
    hint = f" Did you mean {near[0]}?" if near else newest
    raise RequestError(
        f"RUN {run!r} is neither a run folder nor the beginning of a run id in {runs_dir}/.{hint}"
        f" Give a path, or say where the runs are with {option}."
    )
