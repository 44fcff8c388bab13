"""What the Job controller and the kubelet do for a side job: its pod's command as a process here.

The claim's mount point is a folder of this machine under the same path, so paths are the pod's.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.launchers.kubernetes.api_server import RUNNING, ApiServer, exited

_POLL_S = 0.05


class JobController:
    """One process for each Job that stands in the server; a deleted Job's gets SIGTERM."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[str]] = {}
        """Name of the Job -> its pod's process."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def live(self, kind: str) -> list[subprocess.Popen[str]]:
        """Processes of side jobs of a kind that have not ended."""
        found = dict(self.processes)
        return [each for name, each in found.items() if f"-{kind}-" in name and each.poll() is None]

    def kill(self, kind: str) -> None:
        """As if the node were lost."""
        for process in self.live(kind):
            os.killpg(process.pid, signal.SIGKILL)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            jobs = {
                path.rpartition("/")[2]: item
                for path, item in list(self.server.objects.items())
                if "/jobs/" in path
            }
            for name, item in jobs.items():
                if name not in self.processes:
                    self._start(name, item)
            for name, process in list(self.processes.items()):
                if name not in jobs and process.poll() is None:
                    process.terminate()

    def _start(self, name: str, job: dict[str, Any]) -> None:
        template = job["spec"]["template"]["spec"]
        (container,) = template["containers"]
        recipe = next(each for each in template["volumes"] if each["name"] == "recipe")
        config = recipe["configMap"]["name"]
        path = f"/api/v1/namespaces/default/configmaps/{config}"
        file = self.folder / f"{name}.yaml"
        file.write_text(self.server.objects[path]["data"]["recipe.yaml"])
        words = [
            word.replace("$$", "$").replace("/shardyard/recipe/recipe.yaml", str(file))
            for word in container["command"]
        ]
        process = subprocess.Popen(
            [sys.executable, *words[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True, cwd=self.folder,
            env={**os.environ, **{each["name"]: each["value"] for each in container["env"]
                                  if "value" in each and each["name"] != "HOME"}},
        )  # fmt: skip
        self.processes[name] = process
        pod = f"{name}-x"
        output = self.server.add_pod(pod, job=name, rank=0, status=RUNNING, lines=[])
        item = self.server.objects[f"/api/v1/namespaces/default/pods/{pod}"]
        item["metadata"]["labels"]["batch.kubernetes.io/job-name"] = name

        def follow() -> None:
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    output.lines.append(line.rstrip("\n"))
            code = process.wait()
            item["status"] = exited(code if code >= 0 else 128 - code)
            kind = "Complete" if code == 0 else "Failed"
            condition = {"type": kind, "status": "True", "message": f"exit code {code}"}
            job["status"] = {"conditions": [condition]}
            time.sleep(_POLL_S)
            output.ended.set()

        threading.Thread(target=follow, daemon=True).start()


@contextmanager
def job_controller(server: ApiServer, folder: Path) -> Iterator[JobController]:
    """Serve until the end; then no process is left."""
    made = JobController(server, folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()
