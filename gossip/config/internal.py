"""Times and bounds that are no settings: nobody tunes a number that he cannot explain."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Internal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Internal:
    """The numbers that no user sets. Tests and benchmarks replace some, as in ``Config(internal=Internal(bench_s=1))``.

    None follows from the settings, by the property of the same name of :class:`gossip.config.Config`.
    """

    # -- links and streams -------------------------------------------------------------------------------------------
    reply_timeout_s: float | None = None  # For the answer to an offer.
    hello_timeout_s: float | None = None  # From the first byte of a connection to a finished handshake.
    bench_s: float | None = None  # How long a partner that failed is not asked.
    chunk_elements: int | None = None  # Elements of one chunk.
    # A connection without traffic is closed before a firewall forgets it, and after more than an interval of mixing.
    idle_s: float = 60.0
    max_links: int = 256  # A quarter of the 1,024 descriptors that a process usually has; with stripes all of one.

    # -- exchanges ---------------------------------------------------------------------------------------------------
    mixing_share: float = 0.02  # How much of the time of training mix_every_steps = "auto" may cost a node.
    norm_bound: float = 10.0  # Refuse |theirs - ours| > bound (|ours| + sqrt(elements)): broken, not merely far.
    # A Commit without an answer is asked after for so long, then the exchange is dropped. Each holds two vectors.
    doubt_s: float = 30.0
    # The chance of any member, however far, as the partner of a `nearest` mix. At 0.1 an exchange costs an eighth of
    # one with anybody, and nodes are 1.4 times as far apart.
    shortcuts: float = 0.1

    # -- membership: SWIM with Lifeguard -----------------------------------------------------------------------------
    probe_period_s: float = 2.0  # Between two probes of one member each.
    probe_timeout_min_s: float = 0.5  # A probe's time is clamp(3 RTT, min, max) (1 + local health): processors pause.
    probe_timeout_max_s: float = 1.0  # Half of a period, so that indirect probes follow within the same period.
    gossip_period_s: float = 0.5  # Between two rounds of news.
    gossip_fanout: int = 3  # Members that one round of news goes to, as in memberlist.
    push_pull_period_s: float = 30.0  # Between two exchanges of whole tables, which repair what news missed.
    heal_period_s: float = 30.0  # One dead member or seed is dialled so often, which heals partitions.
    progress_period_s: float = 0.25  # A member signs its own counts anew at most so often: a check takes 131 us.
    max_members: int = 10_000  # Members known at most, about 250 B each: the largest full table that was measured.

    # -- joining -----------------------------------------------------------------------------------------------------
    donors: int = 4  # Members that a newcomer fetches its state from at once; three already show an odd one.
    seed_backoff_s: float = 1.0  # The first pause before a seed that is down is dialled again; it doubles.
    seed_backoff_max_s: float = 60.0  # The longest such pause: a seed that comes back is found within a minute.
