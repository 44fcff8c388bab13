"""`python -m shardyard.node.env_entry`: a node whose recipe came in its environment.

For schedulers that carry no files. Writes the recipe into a file without a name, which ends with
the process, and becomes `python -m shardyard.node` (with --side: `shardyard.node.side_job`) with
the same arguments and the same process id, so that the scheduler's signals reach it.
"""

import os
import sys
from collections.abc import Sequence

from shardyard.launchers.aws_batch.requests import RECIPE_VARIABLE
from shardyard.own_processes import ISOLATED


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
    recipe = os.memfd_create("recipe.yaml", flags=0)  # stays open through exec
    with os.fdopen(os.dup(recipe), "w", encoding="utf-8") as file:
        file.write(text)
    module = "shardyard.node.side_job" if "--side" in arguments else "shardyard.node"
    command = [*ISOLATED, module, f"/proc/self/fd/{recipe}", *arguments]
    return os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
