"""The pages that are made from the code are those of now."""

import pytest

from docs.generate.pages import ALL, DOCS, MARK, made, with_table


@pytest.mark.parametrize("name", sorted({*ALL} - {"errors.md"}))
def test_a_page_is_current(name: str) -> None:
    """errors.md is looked at in tests/launchers/test_wrong_situations.py, beside its table."""
    assert (DOCS / name).read_text() == made(name), "run: make docs"


def test_a_table_is_replaced_and_what_stands_around_it_stays() -> None:
    page = f"# One\n\n| a |\n\n{MARK}\n\n| old |\n| rows |\n\nText.\n\n| b |\n"
    new = f"# One\n\n| a |\n\n{MARK}\n\n| new |\n\nText.\n\n| b |\n"
    assert with_table(page, "| new |\n") == new
    assert with_table(new, "| new |\n") == new


@pytest.mark.parametrize("page", ["# One\n\n| a |\n", 2 * f"{MARK}\n\n| a |\n"])
def test_a_page_without_one_mark_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="once"):
        with_table(page, "| new |\n")
