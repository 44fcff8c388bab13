"""Builds the documentation site: ``python -m docs.site``, which `make site` runs.

Fails at a page, heading or file that a link does not find, at a docstring that does not fit what it
is of, and at anything that would be fetched from elsewhere when a page is read.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from docs.site.check import problems
from docs.site.pages import ROOT, gather, navigation

FOLDER = ROOT / "build" / "site"


def main() -> int:
    """The exit code."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    gather(FOLDER / "pages")
    # joined as text, as only the generator knows the tags of its settings; JSON is YAML
    config = FOLDER / "site.yml"
    settings = (Path(__file__).parent / "site.yml").read_text()
    config.write_text(f"{settings}nav: {json.dumps(navigation())}\n")
    generator = Path(sys.executable).with_name("zensical")
    command = [str(generator), "build", "--strict", "--config-file", str(config)]
    built = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    print(built.stderr, end="", file=sys.stderr)
    if built.returncode or "griffe: " in built.stderr:  # its warnings stop nobody by themselves
        return 1
    wrong = list(problems(FOLDER / "html"))
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    if wrong:
        return 1
    print(f"{(FOLDER / 'html' / 'index.html').relative_to(ROOT)} is the first page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
