"""Which adapter leaves its slot for another. Pure."""

from collections.abc import Mapping, Set


def victim(last_used: Mapping[str, float], wanted: Set[str]) -> str | None:
    """The resident digest that was used longest ago, among those that no open turn or running job needs.

    None when all are needed: an adapter in use is never evicted.
    """
    free = {digest: used for digest, used in last_used.items() if digest not in wanted}
    return min(free, key=lambda digest: (free[digest], digest), default=None)
