from __future__ import annotations

import doctest
from importlib import import_module

import pytest


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["dataset", "loader", "module"])
def test_the_examples_in_docstrings_run(module):
    found = doctest.testmod(import_module(f"persisting_torch.datasets.{module}"))
    assert found.attempted > 0
    assert found.failed == 0
