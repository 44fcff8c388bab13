"""MLflow's own tracking server on loopback: what `mlflow server` serves, on a sqlite file.

The whole package would bring scikit-learn, pandas and more; the server's code is in mlflow-skinny,
and needs Flask, SQLAlchemy and Alembic beside it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAM = """
import logging, sys
from werkzeug.serving import make_server
from mlflow.server import app
from mlflow.server.handlers import _get_tracking_store
_get_tracking_store()  # makes the tables
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Its address, while the block runs."""
    environ = {
        **os.environ,
        "_MLFLOW_SERVER_FILE_STORE": f"sqlite:///{folder / 'mlflow.db'}",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with (
        (folder / "server.log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=log, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            assert port, (folder / "server.log").read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
