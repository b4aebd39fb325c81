"""What tests of deployed runs share."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(scope="module")
def data():
    from flowerrun import unequal  # which needs flwr

    return unequal()


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "flwr.fedspeed")
    logging.getLogger("flwr").propagate = True
    yield caplog
    logging.getLogger("flwr").propagate = False
