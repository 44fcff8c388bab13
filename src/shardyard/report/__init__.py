"""Reports of runs and plans, as pages and as text."""

import logging

# It complains twice of a HOME that cannot be written, and draws all the same.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
