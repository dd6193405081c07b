"""What several folders of tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.world import Worlds

settings.register_profile("shared machine", deadline=None)  # a clock says nothing of what is tested
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds[2].run(function, …)`: real gloo ranks, kept for the whole session."""
    made = Worlds()
    yield made
    made.close()
