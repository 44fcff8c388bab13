"""Log messages of an operation apart from its result, and of libraries, through Python's logging.

Ours are logged as `shardyard`. The command line shows them on stderr (terminal.py). In a user's own
program, warnings are shown, as logging does by default. The rest is shown where `logging` is set to
show it.
"""

import logging

LOG = logging.getLogger("shardyard")


def info(text: str) -> None:
    """Log progress or a fact worth knowing."""
    LOG.info("%s", text)


def warn(text: str) -> None:
    """Log a warning, without the word `warning:`, which the program that shows it adds."""
    LOG.warning("%s", text)


def quiet_libraries() -> None:
    """Hide what libraries log about themselves, which is not about what the user asked for.

    torchao logs at its import which of its kernels this machine cannot load, and torch complains of
    how torchao registers its types.
    """
    for library in ("torchao", "torch.utils._pytree"):
        logging.getLogger(library).setLevel(logging.ERROR)
