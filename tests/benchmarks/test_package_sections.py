"""The table of package descriptions: what of apt's output is a row, and in which split."""

import csv
from pathlib import Path

from benchmarks.package_sections import LEAST_PACKAGES, parse_packages, write_table

STANZA = """Package: libfoo-dev
Source: foo (1.2)
Description: files to build with foo
Tag: devel::library
Section: contrib/libdevel"""


def test_a_stanza_is_a_description_and_a_section() -> None:
    text = (
        f"{STANZA}\n\nPackage: bar\nSection: games\n\nPackage: baz\nSection: web\nDescription: z\n"
    )
    assert list(parse_packages(text)) == [
        ("foo", ("files to build with foo", "libdevel")),
        ("baz", ("z", "web")),
    ]


def test_packages_of_one_source_are_in_one_split(tmp_path: Path) -> None:
    rows = [
        (f"source-{n // 3}", (f"description {n}", "libs" if n % 3 else "doc"))
        for n in range(3 * LEAST_PACKAGES)
    ]
    rare = [("other", ("a rare one", "fonts"))]
    about = write_table(tmp_path, [*rows, *rows, *rare], most=None)
    assert about["sections"] == 2 and about["majority"] == "libs"
    assert sum(about["rows"].values()) == 3 * LEAST_PACKAGES
    source_of = {words: source for source, (words, _) in rows}
    splits = []
    for name in ("train", "validation"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            splits.append({source_of[row["text"]] for row in csv.DictReader(file)})
    assert splits[0] and splits[1] and not splits[0] & splits[1]
