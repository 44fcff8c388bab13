"""Worker processes of one node, as torch's agent keeps them: running, ended, with orders.

Their meaning to the other nodes is not known here; see `group.py`.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from shardyard import torch_private
from shardyard.elastic import forkserver
from shardyard.elastic.shared_memory import translate_semaphore_errors
from shardyard.elastic.standby import StandbyPool
from shardyard.io.polling import wait_for


class OwnLogs(LogsSpecs):
    """Log settings that make torch leave the workers' output as it is; each redirects its own."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, "")
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


def standby_pool_of(spec: WorkerSpec, resolved: Path) -> StandbyPool:
    """Standby workers of a node, of which none has started; arguments as of ``StandbyPool``."""
    return StandbyPool(resolved, processes=spec.local_world_size, logs=OwnLogs())


class ProcessesAgent(LocalElasticAgent):
    """Torch's agent, with forks of our server as its workers, that waits for none of them."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(
            spec, logs_specs=OwnLogs(), start_method="forkserver", exit_barrier_timeout=60
        )
        torch_private.kill_without_grace(self)
        self._standby_pool: StandbyPool | None = None
        self._variables: dict[str, str] = {}
        """Variables of each worker in addition to torch's; the server that forks it has others."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with (
            translate_semaphore_errors(),
            torch_private.replaced_start_processes(self._start_processes),
        ):
            pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _start_processes(self, **kwargs: Any) -> PContext:
        """Start the workers, or give those that are parked their orders."""
        secrets = forkserver.variables_of_workers()
        envs = {
            rank: {**secrets, **env, **self._variables} for rank, env in kwargs.pop("envs").items()
        }
        start = start_processes if self._standby_pool is None else self._standby_pool.start
        return start(**kwargs, envs=envs)

    def _wait_for_ends(
        self, is_over: Callable[[], bool], *, within_s: float, every_s: float
    ) -> None:
        """Wait until all workers have ended by themselves, or it is over."""
        wait_for(
            lambda: is_over() or torch_private.have_workers_ended(self),
            within_s=within_s, every_s=every_s,
        )  # fmt: skip

    def worker_pids(self) -> list[int]:
        """Processes of this node's workers that have not ended."""
        return [process.pid for process in self._processes() if process.is_alive()]

    def _dead(self) -> dict[int, Any]:
        """By rank, processes that have ended while the group has not finished."""
        workers = self.get_worker_group().workers
        return {
            worker.global_rank: process
            for worker, process in zip(workers, self._processes(), strict=False)
            if process.exitcode is not None
        }

    def _processes(self) -> list[Any]:
        return torch_private.worker_processes(self)

    def _signal_workers(self, number: signal.Signals) -> None:
        for pid in self.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """End the workers without waiting.

        Torch calls this where agents lost each other, so state cannot be saved. Torch 2.11 has
        no setting for that, and would wait half a minute.
        """
        torch_private.end_workers(self, death_sig, timeout)
        super()._shutdown(death_sig)
