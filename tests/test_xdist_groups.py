"""That tests which share what takes seconds to make do go to one worker: versions of pytest ended that silently."""

from __future__ import annotations

import os

import pytest


@pytest.mark.xdist_group("groups")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="only pytest -n has workers")
def test_a_group_is_part_of_the_name(request: pytest.FixtureRequest) -> None:
    assert request.node.nodeid.endswith("@groups")
