"""All tests of this folder need megatron-core (the mark `megatron`); without it they say so and are skipped."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.megatron.plain import Plain, plain_transformers
from tests.engines.megatron.ranks import make_family

HERE = Path(__file__).parent
INSTALLED = find_spec("megatron") is not None and find_spec("megatron.core") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.megatron)
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="megatron-core is not installed"))


class Families:
    """A folder of a tiny model of a family, made when it is first asked for, and what transformers makes of it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._plain: dict[str, Plain] = {}

    def folder(self, family: str) -> Path:
        folder = self.place / family
        return folder if folder.exists() else make_family(folder, family)

    def plain(self, family: str) -> Plain:
        if family not in self._plain:
            self._plain[family] = plain_transformers(self.folder(family))
        return self._plain[family]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Families:
    return Families(tmp_path_factory.mktemp("families"))
