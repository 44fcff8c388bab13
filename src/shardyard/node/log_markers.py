"""Log events on node 0's stdout: every new event and every new line of metrics.

Read from the files as they grow, as in `control/follow.py`. This costs the training no
time.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

from shardyard.control.follow import Tail
from shardyard.io.polling import poll_in_background
from shardyard.launchers.log_markers import NONCE_VARIABLE, Kind, mark
from shardyard.rundir.layout import RunDir

_POLL_S = 0.5


def take_nonce(environ: MutableMapping[str, str]) -> str:
    """What to mark lines with; taken out, so that no process of the training inherits it."""
    return environ.pop(NONCE_VARIABLE, "")


@contextmanager
def marked_on_stdout(run_dir: RunDir, *, nonce: str = "") -> Iterator[None]:
    """Print what is appended to a run's line files while the block runs, marked with a nonce."""
    tails: dict[Kind, Tail] = {"event": Tail(run_dir.events), "metrics": Tail(run_dir.metrics)}
    for tail in tails.values():
        tail.read()  # printed by an earlier session

    def print_new() -> None:
        for kind, tail in tails.items():
            for content in tail.read():
                with suppress(OSError):  # the reader may be gone; the run goes on
                    print(mark(kind, content, nonce=nonce), flush=True)

    with poll_in_background(print_new, every_s=_POLL_S, name="marked", poll_at_end=True):
        yield
