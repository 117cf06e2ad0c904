"""Long tests, run by hand: `make soak`. `--share 0.1` runs a tenth of each."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=float, default=1.0, help="how much of each soak test runs, 0 to 1")


@pytest.fixture
def share(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--share"))
