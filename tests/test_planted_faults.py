"""The list of planted faults fits the product: each is one place, and its tests exist. Planting them takes an hour."""

from __future__ import annotations

import pytest

from tests.support.planted_faults import FAULTS, ROOT, Fault, place_of


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_place_and_has_tests(fault: Fault) -> None:
    place_of(fault)
    assert fault.after not in (fault.before, "")
    assert all((ROOT / path).exists() for path in fault.tests)
