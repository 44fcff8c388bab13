"""``python -m docs.generate``, which `make docs` runs: writes the pages that are made from code."""

from docs.generate.pages import DOCS, TABLES, WHOLE, made

for name in (*WHOLE, *TABLES):
    (DOCS / name).write_text(made(name))
