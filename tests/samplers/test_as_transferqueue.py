"""Samplers called directly answer as TransferQueue's do."""

from __future__ import annotations

import json

import pytest

from persisting_torch import samplers
from tests.samplers.transcripts import NAMES, RECORD, play

TOLD = json.loads(RECORD.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_sampler_gives_the_answers_and_errors_that_transferqueue_gave(name: str) -> None:
    told = [part for part in TOLD if part["story"]["sampler"] == name]
    assert len(told) >= 40
    for part in told:
        assert play(samplers, part["story"]) == part["answers"], part["story"]
