"""``python -m docs.generate``, which `make docs` runs: writes the pages that are made from code."""

from docs.generate.pages import ALL, DOCS, made

for name in ALL:
    (DOCS / name).write_text(made(name))
