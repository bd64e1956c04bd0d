"""Rendezvous hashing as it is defined, for all members at once, as a reference for a node's own lookup."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gossip.ids import PeerId
from node.data.division import _bucket_hashes, _hash64, _mix


def owners(buckets: int, members: Sequence[PeerId], salt: bytes) -> npt.NDArray[np.int64]:
    """Return the owner of every bucket, as an index into ``sorted(set(members))``; (buckets,) int64.

    A running maximum over the members: 10,000 of them with 4,096 buckets need five arrays of 32 KiB, not a table of
    330 MB.
    """
    everybody = sorted(set(members))
    hashes = _bucket_hashes(buckets, salt)  # (buckets,)
    best = _mix(hashes ^ _hash64(salt + everybody[0]))
    winner = np.zeros(buckets, dtype=np.int64)
    for index, member in enumerate(everybody[1:], start=1):
        weight = _mix(hashes ^ _hash64(salt + member))
        higher = weight > best
        np.copyto(best, weight, where=higher)
        winner[higher] = index
    return winner
