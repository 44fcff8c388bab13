"""`shardyard serve`: a read-only page of all runs in a folder."""

import signal
import threading
from pathlib import Path

import click

from shardyard.errors import RequestError
from shardyard.io.path_option import LocalPath
from shardyard.io.terminal import echo, echo_err
from shardyard.report.serve.server import LOOPBACK, Server
from shardyard.rundir.layout import RUNS_DIR


@click.command()
@click.argument("folder", metavar="DIR", type=LocalPath(path_type=Path), default=RUNS_DIR)
@click.option("--port", type=click.IntRange(0, 65535), default=8347, show_default=True,
              help="Port to listen on. 0: any free port.")  # fmt: skip
@click.option("--host", default=LOOPBACK[0], show_default=True, help="Address to listen on.")
def command(folder: Path, *, port: int, host: str) -> int:
    """Compare all runs in DIR (default: runs) in a browser: charts, settings, events, logs.

    Ctrl-C stops it. The page is read-only; the only file written is a cache of the list.
    """
    if not folder.is_dir():
        raise RequestError(
            f"{folder} is not a folder. Give the folder of the runs (run.dir): `shardyard serve "
            "DIR`."
        )
    server = Server(folder.resolve(), host=host, port=port)
    if not server.is_on_loopback:
        echo_err(
            f"warning: everyone who reaches {host} can read names, settings, curves, events and "
            "logs of all runs, without encryption and without a password"
        )
    is_over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_over.set())
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2})
    thread.start()
    echo(server.url)
    echo_err("Ctrl-C ends it")
    is_over.wait()
    server.shutdown()
    thread.join()
    server.server_close()
    server.pages.index.write()
    return 0
