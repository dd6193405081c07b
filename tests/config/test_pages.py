"""The docs say what the code does."""

from pathlib import Path

import pytest

from spmd_rl.config.pages import PAGES, fill

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_part_is_that_of_the_code(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == fill(text, PAGES[name]()), f"docs/{name} is stale; run: python -m spmd_rl.config.pages docs"


def test_a_page_without_a_place_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        fill("nothing here", "x")
