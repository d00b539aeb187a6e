"""A tenant that calls another version of its adapter every second, through the whole pipeline.

`python -m tests.bench versions_foreign_evictions` does the same for five minutes.
"""

import pytest

from infra.launch.stack import Stack
from schemas.service import Residency
from tests.bench import versions

# Asked for more often than it may load in the time, so that its limit is met.
SECONDS = 30.0


@pytest.mark.timeout(180)
async def test_a_tenant_that_keeps_calling_new_versions_takes_no_slot_and_no_time_of_the_others(whole: Stack) -> None:
    measured = await versions.measure(whole, SECONDS, print)
    for seen in (measured.quiet, measured.beside):
        assert not seen.failed
        assert seen.met == {Residency.SLOT: len(seen.replies)}
        assert (list(seen.evictions), list(seen.loads)) == ([], [])
    assert len(measured.beside.replies) == len(measured.quiet.replies) > 0
    # At its rate: no more, and not much less.
    assert measured.most_in_a_minute <= versions.LOADS_PER_MINUTE < measured.offender_asked
    assert len(measured.offender_loads_ms) >= versions.LOADS_PER_MINUTE * 0.8
    assert measured.offender_done >= versions.LOADS_PER_MINUTE * 0.8
