"""What an operation says beside its result, through Python's logging, under the name `shardyard`.

The command line shows it on stderr (terminal.py). In a program of the user's own warnings are
shown, as logging does by itself, and the rest where `logging` is set to show it.
"""

import logging

LOG = logging.getLogger("shardyard")


def info(text: str) -> None:
    """What goes on, or is worth knowing."""
    LOG.info("%s", text)


def warn(text: str) -> None:
    """What may be wrong; without the word `warning:`, which whoever shows it writes."""
    LOG.warning("%s", text)
