"""`python -m shardyard.cli.node_from_environment`: a node whose recipe came in its environment.

For schedulers that carry no files. Writes the recipe into a file of the container and becomes
`python -m shardyard.cli.node`, with the same arguments and the same process id, so that the
scheduler's signals reach it.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardyard.launch.aws_batch_objects import RECIPE_VARIABLE


def main(arguments: Sequence[str]) -> int:
    """Become the node; returns only if that is not possible."""
    text = os.environ.get(RECIPE_VARIABLE)
    if not text:
        print(
            f"error: the variable {RECIPE_VARIABLE} is not set. It carries the recipe of a job; "
            "`shardyard launch` puts it into the job definition. Start the job with that.",
            file=sys.stderr,
        )
        return 2
    recipe = Path(tempfile.mkdtemp(prefix="shardyard-")) / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "shardyard.cli.node", str(recipe), *arguments]
    return os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
