"""The selection of each peer's next batch of samples, for many peers at once."""

from collections.abc import Sequence

import numpy as np

from sim.arrays import I64
from sim.seeds import GOLDEN, derive_int, splitmix

# A shuffle sorts random keys that carry their place in the low bits, at half the cost of argsort. 24 bits for the place
# leave 40 random bits: in a part of 60,000 samples, about one pair in 600 epochs ties and keeps its order.
PLACE_BITS = 24
PLACES = np.uint64((1 << PLACE_BITS) - 1)
KEYS_AT_ONCE = 1 << 18  # Keys sorted in one call: bounds a temporary array to 2 MiB for any number of peers.
EPOCHS = 0xD1B54A32D192ED03  # An odd number that separates the hash inputs of epochs from those of places.


class Batches:
    """The batches of all peers. Each peer samples its part without replacement, in a new order each epoch.

    The order depends only on (seed, name, epoch). An epoch drops its last incomplete batch, which holds other samples
    each time. A part smaller than a batch is repeated until it fills one. All batches therefore have one size, and the
    batches of many peers form one array.

    Args:
        parts: The samples of each peer as rows of the data set, int64 (samples,).
        names: The names of the peers.
        seed: The seed of the run.
        batch_size: Samples in a batch.
    """

    def __init__(self, parts: Sequence[I64], names: Sequence[str], seed: int, batch_size: int) -> None:
        filled = [part if len(part) >= batch_size else np.resize(part, batch_size) for part in parts]
        self.sizes = np.array([len(part) for part in filled])  # Samples of each peer, (peers,).
        assert self.sizes.max() <= int(PLACES), "a part has at most 2^24 samples"
        self.batches_per_epoch = self.sizes // batch_size  # (peers,)
        self.batch_size = batch_size
        # The samples of all peers, one peer after the other: as given, and in the order of each peer's current epoch.
        self._samples = np.concatenate(filled)
        self._order = self._samples.copy()
        self._starts = np.cumsum(self.sizes) - self.sizes  # Index of each peer's first sample, (peers,).
        self._epoch = np.full(len(parts), -1)  # The current epoch, (peers,).
        self._keys = np.array([derive_int(seed, name, "batches") for name in names], np.uint64)
        # Parts of similar size are shuffled together, padded to a power of two: sorting costs at most twice as much.
        self._width_bits = np.array([(size - 1).bit_length() for size in self.sizes.tolist()])  # (peers,)
        self._places = np.arange(batch_size)

    def draw(self, peers: I64, steps: I64) -> I64:
        """Return the samples of batch number ``steps[i]``, from 0, of peer ``peers[i]``, shape (peers, batch).

        ``peers`` are unique. Any step is allowed; each change to another epoch costs a shuffle.
        """
        epochs, batch_number = np.divmod(steps, self.batches_per_epoch[peers])
        stale = epochs != self._epoch[peers]
        if stale.any():
            self._shuffle(peers[stale], epochs[stale])
        first = self._starts[peers] + batch_number * self.batch_size
        batch: I64 = self._order.take(first[:, None] + self._places)
        return batch

    def _shuffle(self, peers: I64, epochs: I64) -> None:
        """Bring the samples of these peers into the order of their epochs; both arrays have shape (peers,)."""
        self._epoch[peers] = epochs
        width_bits = self._width_bits[peers]
        for bits in np.unique(width_bits).tolist():
            chosen = np.flatnonzero(width_bits == bits)
            rows = max(1, KEYS_AT_ONCE >> bits)
            for start in range(0, len(chosen), rows):
                block = chosen[start : start + rows]
                self._sort(peers[block], epochs[block], 1 << bits)

    def _sort(self, peers: I64, epochs: I64, width: int) -> None:
        """Order the samples of peers with at most ``width`` each by a hash of (peer, epoch, place)."""
        places = np.arange(width, dtype=np.uint64)
        keys = splitmix(self._keys[peers] + epochs.astype(np.uint64) * EPOCHS)[:, None] + places * GOLDEN
        keys = splitmix(keys)
        keys &= ~PLACES
        keys |= places
        starts, sizes = self._starts[peers], self.sizes[peers]
        if (sizes == width).all():
            keys.sort(axis=1)
            keys &= PLACES
            self._order[starts[:, None] + places.view(np.int64)] = self._samples[starts[:, None] + keys.view(np.int64)]
            return
        inside = places.view(np.int64) < sizes[:, None]
        keys[~inside] = ~np.uint64(0)  # The padding sorts behind all samples.
        keys.sort(axis=1)
        keys &= PLACES
        sources = (starts[:, None] + keys.view(np.int64))[inside]
        self._order[(starts[:, None] + places.view(np.int64))[inside]] = self._samples[sources]
