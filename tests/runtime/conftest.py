"""Ranks of the launcher that live for the whole test run: to start them, a process imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime.protocol.jobs import RankLocation
from runtime.ranks.launcher import LaunchedRanks, launch


@pytest.fixture(scope="session")
def ranks() -> Iterator[LaunchedRanks]:
    """Four ranks. A test that ends one of them, or changes it, starts ranks of its own."""
    with launch([RankLocation()] * 4) as launched:
        yield launched
