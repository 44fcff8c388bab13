"""Makes text from other sources harmless to a terminal.

Output of a training, a scheduler's reasons and names of jobs may hold escape sequences.
These clear the screen, change a window's title or write the clipboard. They are as
unwelcome in a pipe and in a file: a reader of those may be a terminal, too.
"""

import re

_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 but tab and line end, DEL, C1
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069"  # order of reading, line ends
    "\ufeff"  # a byte order mark, which nobody sees
    "\ud800-\udfff]"  # of bytes that are no text
)


def sanitize(text: str) -> str:
    r"""Return a text with its control characters written out: ``\x1b``, ``\u202e``.

    Line ends and tabs stay. All characters are kept, so that a person sees what was tried.
    """
    return _ACTING.sub(lambda match: ascii(match[0])[1:-1], text)


def log_line(text: str) -> str:
    """One line of output as a terminal would leave it: of a progress bar its last state."""
    states = [state for state in text.split("\r") if state]
    return sanitize(states[-1]) if states else ""
