"""What several folders of tests share."""

from collections.abc import Iterator

import pytest

from tests.world import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """`worlds[2].run(function, …)`: real gloo ranks, kept for the whole session."""
    made = Worlds()
    yield made
    made.close()
