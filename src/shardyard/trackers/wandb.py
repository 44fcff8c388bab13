"""Weights & Biases: one run for each of ours, with our id; it reports the last line it has.

W&B wants steps of its own that only grow, so these are numbers of lines of metrics.jsonl;
curves are drawn over our steps. Its client is a process that keeps logged lines and tries
again by itself for as long as it lives, without reports. Whether all has arrived is known
when it has ended.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardyard.errors import AccessError, LostError, RequestError, ShardyardError
from shardyard.io.files import make_folder, write_text
from shardyard.trackers.service import AttemptEnd, AttemptMetadata, MetricsRow

_PAGE = "exporters#keys"

_INIT_S = 20.0
_OF_CLIENT = {"WANDB_ERROR_REPORTING": "false"}
"""No reports of its errors to others."""


class WandbTracker:
    """W&B's cloud, a server of one's own, or with WANDB_MODE=offline a folder."""

    def __init__(self) -> None:
        self.address = ""
        self._wandb: Any = None
        self._run: Any = None
        self._count = Path()

    @property
    def keeps_count(self) -> bool:
        """Offline, what was logged is a file."""
        return self._run is not None and bool(self._run.offline)

    def open(self, metadata: AttemptMetadata) -> int:
        """Begin the run in the service, or continue it."""
        if self._wandb is not None:
            self._wandb.teardown(exit_code=1)  # what is left of a try that failed
        os.environ.update(_OF_CLIENT)
        import wandb

        self._wandb = wandb
        folder = metadata.run.exporters
        make_folder(folder)
        self._count = folder / "wandb-offline.txt"
        wandb_section = metadata.observe.wandb
        try:
            self._run = wandb.init(
                id=metadata.run.run_id,
                name=metadata.run.run_id,
                resume="allow",
                project=wandb_section.project,
                entity=wandb_section.entity,
                dir=str(folder),
                config={**metadata.settings},
                tags=[f"{name}:{value}" for name, value in metadata.tags.items()],
                allow_val_change=True,
                settings=self._settings(wandb_section.url),
            )
        except (wandb.Error, TimeoutError, OSError) as error:
            raise _convert_error(wandb, error) from error
        run = self._run
        run.define_metric("step", hidden=True)
        for curves in ("train/*", "eval/*"):
            run.define_metric(curves, step_metric="step")
        run.summary.update({f"plan/{name}": value for name, value in metadata.predicted.items()})
        if run.offline:
            self.address = str(Path(run.sync_dir))
            return self._counted()
        self.address = str(run.url)
        return max(0, int(run.starting_step) - 1)

    def send(self, rows: Sequence[MetricsRow]) -> None:
        """Log rows, which W&B's own process then sends."""
        try:
            for row in rows:
                content = {**row.values, "step": row.step, "_timestamp": row.t}
                self._run.log(content, step=row.number, commit=True)  # or the last one waits
        except (self._wandb.Error, OSError) as error:
            raise _convert_error(self._wandb, error) from error
        if self._run.offline:
            write_text(self._count, f"{rows[-1].number}\n")

    def close(self, end: AttemptEnd) -> None:
        """Say how it ended, and wait until W&B's process has sent all."""
        run = self._run
        result = {f"result/{name}": value for name, value in end.result.items()}
        run.summary.update({**result, "outcome": end.outcome, "reason": end.reason})
        if end.outcome == "drained":
            run.mark_preempting()  # shown as preempted, not as failed
        try:
            run.finish(exit_code=end.exit_code)
        except (self._wandb.Error, OSError) as error:
            raise _convert_error(self._wandb, error) from error

    def _settings(self, url: str | None) -> Any:
        """Return settings that send no data of the machine, the code or the output."""
        place = {} if url is None else {"base_url": url}
        return self._wandb.Settings(
            **place,
            init_timeout=_INIT_S,
            console="off",
            silent=True,
            symlink=False,  # a run's folder is fetched and copied
            disable_code=True,
            disable_git=True,
            label_disable=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )

    def _counted(self) -> int:
        try:
            return int(self._count.read_text())
        except (OSError, ValueError):
            return 0


def _convert_error(wandb: Any, error: Exception) -> ShardyardError:
    """A refusal of the client in our words, by the status that it names."""
    words = " ".join(str(error).split())[:200]
    named = re.search(r"\berror:? (\d{3})\b", words)
    status = int(named[1]) if named else 0
    key = "Keep a key of that server under secrets: `secrets: {WANDB_API_KEY: env}`."
    if isinstance(error, wandb.errors.AuthenticationError) or status in (401, 403):
        return AccessError(f"W&B rejected the key. {key}", page=_PAGE)
    if "api key" in words.lower() or "api_key" in words.lower():
        return AccessError(f"W&B has no key to use: {words}. {key}", page=_PAGE)
    is_final = 400 <= status < 500 and status not in (408, 429)
    if is_final or isinstance(error, wandb.errors.UsageError):
        return RequestError(f"W&B rejected the request: {words}. Look at observe.wandb.")
    return LostError(f"W&B was not reached: {words}. Look at observe.wandb.url and the network.")
