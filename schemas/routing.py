"""Where a digest's records go: pure, the same in every process and language."""

import hashlib


def home_partitions(digest: str, partitions: int, replicas: int) -> tuple[int, ...]:
    """The digest's home partitions, best first, by rendezvous hashing (Thaler and Ravishankar, 1998).

    One of the first `replicas` takes each job. Adding a partition moves only what moves to it.
    """
    ranked = sorted(range(partitions), key=lambda p: hashlib.sha256(f"{digest}/{p}".encode()).digest(), reverse=True)
    return tuple(ranked[: max(1, min(replicas, partitions))])


def partition_of(digest: str, job_key: str, partitions: int, replicas: int) -> int:
    """The one partition of a job: stable per job, spread over its digest's homes."""
    homes = home_partitions(digest, partitions, replicas)
    pick = int.from_bytes(hashlib.sha256(job_key.encode()).digest()[:8], "big") % len(homes)
    return homes[pick]
