"""Builds the documentation site: ``python -m docs.site``, which `make site` runs.

Fails at a page, heading or file that a link does not find, and at anything that would be fetched
from elsewhere when a page is read.
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
    built = subprocess.run([generator, "build", "--strict", "--config-file", config], check=False)
    if built.returncode:
        return built.returncode
    wrong = list(problems(FOLDER / "html"))
    for problem in wrong:
        print(f"error: {problem}", file=sys.stderr)
    if wrong:
        return 1
    print(f"{(FOLDER / 'html' / 'index.html').relative_to(ROOT)} is the first page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
