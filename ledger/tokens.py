"""Tokens of a minute and of a day: what is reserved at admission and corrected by usage. Pure.

A minute is a sum of short buckets of the admissions' times: every 60 s lie inside the buckets that are summed, so that
no 60 s ever hold more than the limit. A day is a day of UTC. A job counts where it was admitted, whenever it ends.
"""

from collections.abc import Mapping

BUCKET_US = 5_000_000
# So many buckets, the one that runs now among them, cover any 60 s that end now.
BUCKETS = 13
DAY_US = 86_400_000_000


def bucket_of(time_us: int) -> int:
    return time_us // BUCKET_US


def day_of(time_us: int) -> int:
    return time_us // DAY_US


def in_minute(buckets: Mapping[int, int], now_us: int) -> dict[int, int]:
    """The buckets that count now, oldest first."""
    now = bucket_of(now_us)
    return {bucket: buckets[bucket] for bucket in sorted(buckets) if now - BUCKETS < bucket <= now}


def minute_wait_ms(buckets: Mapping[int, int], reserve: int, limit: int, now_us: int) -> int:
    """Until so many tokens have left the minute that the reserve fits; 0 where it fits now."""
    counted = in_minute(buckets, now_us)
    spent = sum(counted.values())
    if spent + reserve <= limit:
        return 0
    leaves_us = now_us
    for bucket, tokens in counted.items():
        spent -= tokens
        leaves_us = (bucket + BUCKETS) * BUCKET_US
        if spent + reserve <= limit:
            break
    return _ms(leaves_us - now_us)


def day_wait_ms(spent: int, reserve: int, limit: int, now_us: int) -> int:
    """Until the next day, where the reserve does not fit into this one; 0 where it does."""
    return 0 if spent + reserve <= limit else _ms((day_of(now_us) + 1) * DAY_US - now_us)


def _ms(time_us: int) -> int:
    return max(1, -(-time_us // 1000))
