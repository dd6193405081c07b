"""The docs say what the code does."""

import re
from pathlib import Path

import pytest

from spmd_rl.config.pages import PAGES, fill, presets

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_generated_part_is_that_of_the_code(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == fill(text, PAGES[name]()), f"docs/{name} is stale; run: python -m spmd_rl.config.pages docs"


def test_every_preset_is_described_by_a_whole_sentence() -> None:
    said = [row.strip("| ").partition(" | ")[2] for row in presets().splitlines()[2:]]
    assert len(said) > 40
    cut = [text for text in said if not text.endswith(".") and not re.search(r"https://\S+$", text)]
    assert cut == []


def test_a_page_without_a_place_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match="the page needs the lines"):
        fill("nothing here", "x")
