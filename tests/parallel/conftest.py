"""One crew of processes for all tests of this folder."""

import pytest
from crew import Crew


@pytest.fixture(scope="package")
def crew(tmp_path_factory):
    crew = Crew(tmp_path_factory.mktemp("crew") / "store")
    yield crew
    crew.stop()
