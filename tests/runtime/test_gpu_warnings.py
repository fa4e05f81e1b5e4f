"""Tests that need a GPU run where libraries warn of what is not ours; all others fail with a warning."""

from __future__ import annotations

import warnings

import pytest

from tests.conftest import pytest_collection_modifyitems


def test_tests_for_gpus_do_not_fail_with_a_warning(request: pytest.FixtureRequest) -> None:
    item = request.node
    assert not list(item.iter_markers("filterwarnings"))
    with pytest.raises(UserWarning, match="planted"):
        warnings.warn("planted", stacklevel=1)
    pytest_collection_modifyitems(request.config, [item])
    assert not list(item.iter_markers("filterwarnings"))
    item.add_marker(pytest.mark.gpu)
    pytest_collection_modifyitems(request.config, [item])
    assert [marker.args for marker in item.iter_markers("filterwarnings")] == [("default",)]
