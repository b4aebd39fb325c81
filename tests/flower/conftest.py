"""What tests of deployed runs share."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import fedspeed


@pytest.fixture(scope="module")
def data():
    """Digits over clients of unequal sizes, so that job order matters."""
    whole = fedspeed.load_data("digits", split="iid", clients=1)
    rows = np.split(np.arange(300), [30, 110, 190])
    test = (whole.x_test.numpy(), whole.y_test.numpy())
    return fedspeed.Federated.from_arrays(whole.x.numpy(), whole.y.numpy(), rows, test, classes=10)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO, "flwr.fedspeed")
    logging.getLogger("flwr").propagate = True
    yield caplog
    logging.getLogger("flwr").propagate = False
