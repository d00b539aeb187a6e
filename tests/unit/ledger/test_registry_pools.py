"""Which worker counts as ready: one that runs what its pool is configured for now."""

from typing import Any

import pytest

from tests.factories import make_registry, pool_of, ready

BASE, OTHER = (f"sha256:{number:064x}" for number in (1, 2))


@pytest.mark.parametrize(
    ("pool", "worker", "suits"),
    [
        ({}, {}, True),
        ({"engines": ("fake",)}, {}, True),
        ({"engines": ("vllm 1", "fake")}, {}, True),
        ({"engines": ("vllm 1",)}, {}, False),
        ({}, {"base": OTHER}, False),
        ({"rank_max": 16}, {"rank_max": 16, "context_max": 1024}, True),
        ({"rank_max": 16}, {"rank_max": 8}, False),
        ({"context_max": 2048}, {"context_max": 1024}, False),
        # A record of before these were said.
        ({"rank_max": 16}, {"rank_max": None}, True),
        ({}, {"rows": 0}, False),
    ],
)
def test_a_worker_counts_where_it_suits_its_pool(pool: dict[str, Any], worker: dict[str, Any], suits: bool) -> None:
    """Any: fields of the records."""
    registry = make_registry([pool_of(BASE, **pool), ready(**{"base": BASE, **worker})])
    assert [w.pool for w in registry.serving()] == (["main"] if suits else [])
    owner = registry.owner_of("main", 0)
    assert (owner is not None and owner.rows > 0) == suits


def test_a_pool_that_changed_is_served_again_by_a_worker_that_began_after_it() -> None:
    changed = [pool_of(BASE), ready(BASE, rank_max=8), pool_of(BASE, rank_max=16)]
    assert not make_registry(changed).serving()
    assert [w.pool for w in make_registry([*changed, ready(BASE, rank_max=16)]).serving()] == ["main"]
