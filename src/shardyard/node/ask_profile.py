"""`python -m shardyard.node.ask_profile RUN_DIR`: requests a profile of a run where its files are.

Started alongside a training whose folder the command line does not see. Answers with a line
of JSON.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from shardyard.control.profile import ProfileOptions, answer_of
from shardyard.io.terminal import echo
from shardyard.rundir.layout import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and answer with the profile's id, or why there is none."""
    parser = argparse.ArgumentParser(prog="python -m shardyard.node.ask_profile")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--ranks", required=True)
    args = parser.parse_args(argv)
    echo(
        json.dumps(
            answer_of(RunDir(args.run_dir), ProfileOptions(steps=args.steps, ranks=args.ranks))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
