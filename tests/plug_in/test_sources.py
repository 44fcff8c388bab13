"""A package adds a kind of place that text comes from."""

from shardyard.config.schema.recipe import Recipe
from shardyard.config.sources import address_error, store_class
from shardyard.config.versions import plug_ins_of
from shardyard.control.doctor import plug_in_findings
from tests.plug_in.packages import Packages


def test_a_package_adds_a_scheme_by_a_row_of_its_own(packages: Packages) -> None:
    source = (
        "from shardyard.config.sources import Scheme\n"
        "ROW = Scheme(code='shelf:Shelf')\n"
        "class Shelf: pass\n"
    )
    packages.add("books", {"sources": {"shelf": "shelf:ROW", "odd": "shelf:Shelf"}}, shelf=source)
    assert address_error("shelf://a/x.txt") is None
    assert store_class("shelf://a/x.txt").__name__ == "Shelf"
    recipe = Recipe.model_validate({"data": {"source": ["shelf://a/x.txt", "s3://b", "here"]}})
    assert [plug_in.what for plug_in in plug_ins_of(recipe, None)] == [
        "the data source 'shelf' of books 1.0"
    ]
    findings = [finding.what for finding in plug_in_findings() if finding.verdict != "ok"]
    assert any("the data source 'odd' of books 1.0" in what for what in findings)
    assert "unknown data source 'shelv'. Did you mean shelf? Available: s3" in str(
        address_error("shelv://a/x")
    )
    assert "not a shardyard.config.sources.Scheme" in str(address_error("odd://a/x"))
