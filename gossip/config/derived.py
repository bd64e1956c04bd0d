"""Properties that follow from a Config's keys."""

from dataclasses import dataclass

from gossip.codecs import AUTO, get_codec
from gossip.codecs.choice import NOMINAL_STEPS, steps_for_bytes
from gossip.config.filters import AUTO_FILTER, FILTERS
from gossip.config.internal import Internal
from gossip.config.keys import MOST_PARTNERS, Keys
from gossip.config.mixings import MIXINGS

INTERNAL = Internal()
PLAIN = (0.0, 1.0)  # Momentum and rate that make the outer step the plain mean.


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived(Keys):
    """The keys, and properties that depend on several of them."""

    internal: Internal = INTERNAL

    @property
    def reply_timeout_s(self) -> float:
        """Return the time for the answer to an offer: a partner answers at its next step boundary, or says BUSY.

        Three seconds more are enough for the round trips of a slow link; 1.5 ``stall_s`` are where links pause for
        less. A link that pauses for longer may delay the answer as well.
        """
        return self.internal.reply_timeout_s or max(
            self.boundary_patience_s + min(3.0, 1.5 * self.stall_s), self.stall_s
        )

    @property
    def bench_s(self) -> float:
        """Return how long a partner that failed is not asked (benched); the time doubles up to 16 times this.

        A node that notices failures sooner may also try again sooner.
        """
        return self.internal.bench_s or min(10.0, 5.0 * self.stall_s)

    @property
    def hello_timeout_s(self) -> float:
        """Return the time from a connection's first byte to a finished handshake: six latencies of up to 0.8 s."""
        return self.internal.hello_timeout_s or max(5.0, self.stall_s)

    @property
    def chunk_elements(self) -> int:
        """Return the elements of one chunk, behind which other messages wait.

        512 KiB of fp32 fit in cache and take 4 ms at 1 Gbit/s. Links that pause for 10 s are slow: 128 KiB take 10 ms
        at 100 Mbit/s. Links that carry a megabyte a second even if they are slow take 1 MiB. Chunks that take long
        become shorter by themselves.
        """
        usual = 32_768 if self.stall_s >= 10.0 else 262_144 if self.slowest_rate_mb_s >= 1.0 else 131_072
        return self.internal.chunk_elements or usual

    @property
    def outer(self) -> tuple[float, float]:
        """Return momentum and rate of the first outer step; if left open or measured, the plain mean."""
        momentum = self.outer_momentum if isinstance(self.outer_momentum, int | float) else PLAIN[0]
        return momentum, PLAIN[1] if self.outer_rate is None else self.outer_rate

    @property
    def measures_momentum(self) -> bool:
        """Return True if each node measures its outer momentum (``gossip.arithmetic.outer_step``)."""
        return self.outer_momentum == AUTO

    @property
    def plain(self) -> bool:
        """Return True if a mix is the plain mean, without outer momentum."""
        return self.outer == PLAIN and not self.measures_momentum

    @property
    def kappa(self) -> float:
        """Return the share of a mix's displacement that the correction takes up; if left open, 0."""
        return self.correction or 0.0

    @property
    def auto_interval(self) -> bool:
        """Return True if each node chooses its own interval."""
        return self.mix_every_steps == AUTO

    @property
    def interval_steps(self) -> int | None:
        """Return the local steps in an interval as versions count them; None with a clock alone.

        All nodes of a swarm must have the same number.
        """
        steps = self.mix_every_steps
        if steps is None and self.mix_every_s is not None:
            return None
        return steps if isinstance(steps, int) else NOMINAL_STEPS

    @property
    def first_interval(self) -> int | None:
        """Return the local steps of a node's first interval; None with a clock alone.

        A node that chooses its interval begins with the shortest that the bytes of its codec allow. The usual distance
        of :mod:`gossip.filters.clip` is that of earlier exchanges. After a longer interval it would let in lies.
        """
        if not self.auto_interval:
            return self.interval_steps
        share = 0.0 if self.codec_name == AUTO else get_codec(self.codec_name).encoded_bytes(1 << 16) / (4 << 16)
        return steps_for_bytes(share)

    @property
    def codec_name(self) -> str:
        """Return the codec; if left open, "auto" if each node chooses its own interval, else fp32."""
        return self.codec or (AUTO if self.auto_interval else "fp32")

    @property
    def averaged(self) -> int:
        """Return the number of vectors that a mix averages, for the outer step's stability."""
        return (self.group_size or MOST_PARTNERS) if self.grouped else 2

    @property
    def incoming_limit(self) -> int:
        """Return the limit of concurrent incoming exchanges.

        With an outer step it is 1 for parts and groups, and if the loop waits for mixes.
        """
        return self.incoming_exchanges if self.plain or self.overlaps else 1

    @property
    def overlaps(self) -> bool:
        """Return True if mixes with an outer step may overlap.

        That holds for pairs of the whole vector, if no training loop waits for them.
        """
        mixes_whole_pairs = self.paired and self.partners == 1 and self.part == "all"
        return mixes_whole_pairs and not self.plain and self.max_version_gap is None

    @property
    def finds_radius(self) -> bool:
        """Return True if the filter finds its radius itself, from distances and the movement by local steps."""
        return FILTERS[self.filter_name].follows_movement and self.filter_limit is None

    @property
    def limits_directions(self) -> bool:
        """Return True if the filter limits the movement in one direction, for which it needs sketches of differences.

        The directions of parts of a model cannot be compared with one another.
        """
        return self.finds_radius and self.part == "all"

    @property
    def pushes(self) -> bool:
        """Return True if vectors are pushed one way."""
        return MIXINGS[self.mixing].one_way

    @property
    def conserves(self) -> bool:
        """Return True if a node loses the mass that it gives away (:mod:`gossip.config.mixings`)."""
        return MIXINGS[self.mixing].conserves

    @property
    def grouped(self) -> bool:
        """Return True if more than two members average at once."""
        return MIXINGS[self.mixing].group

    @property
    def paired(self) -> bool:
        """Return True if two members average with each other."""
        return not (self.pushes or self.grouped)

    @property
    def filter_name(self) -> str:
        """Return the filter in use.

        "auto" means "clip", except for push-sum, whose mass must not be cut off, and for groups, whose mean depends on
        more than one partner.
        """
        if self.filter != "auto":
            return self.filter
        return next(name for name in AUTO_FILTER if FILTERS[name].fits(self.grouped, self.conserves))
