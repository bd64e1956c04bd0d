"""Times and bounds that are not settings, since no user could tell what to set them to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Internal:
    """The numbers that no user sets. Tests and benchmarks replace some, as in ``Config(internal=Internal(bench_s=1))``.

    A value of None follows from the settings, by the property of the same name of :class:`gossip.config.Config`.
    """

    # -- links and streams -------------------------------------------------------------------------------------------
    reply_timeout_s: float | None = None  # Limit for the answer to an offer.
    hello_timeout_s: float | None = None  # Limit from the first byte of a connection to a finished handshake.
    bench_s: float | None = None  # Time for which a partner that failed is not asked.
    chunk_elements: int | None = None  # Elements of one chunk.
    # A connection without traffic is closed before a firewall forgets it, and after more than an interval of mixing.
    idle_s: float = 60.0
    max_tunnels: int = 2  # Tunnels that a node relays at the same time, for undialable members.
    opens_ports: bool = False  # Ask the router for a port where nobody outside can dial us.
    max_links: int = 256  # A quarter of a process's usual 1,024 descriptors, of which stripes take the rest.

    # -- exchanges ---------------------------------------------------------------------------------------------------
    mixing_share: float = 0.02  # Share of the training time that mix_every_steps = "auto" may cost a node.
    norm_bound: float = 10.0  # Refuse |theirs - ours| > bound (|ours| + sqrt(elements)): broken, not merely far.
    grace_s: float = 5.0  # The most time for the last mixes of a peer that leaves; of a node GOSSIP_GRACE.
    # The outcome of an exchange in doubt is asked for this long, then it is dropped. Each holds two vectors.
    doubt_s: float = 30.0
    # The chance of any member, however far, as the partner of a `nearest` mix. At 0.1 an exchange costs an eighth of
    # one with a random member, and nodes are 1.4 times as far apart.
    shortcuts: float = 0.1

    # -- membership: SWIM with Lifeguard -----------------------------------------------------------------------------
    probe_period_s: float = 2.0  # Interval between two probes of one member each.
    probe_timeout_min_s: float = 0.5  # A probe's time is clamp(3 RTT, min, max) (1 + local health): processors pause.
    probe_timeout_max_s: float = 1.0  # Half of a period, so that indirect probes follow within the same period.
    gossip_period_s: float = 0.5  # Interval between two gossip frames.
    gossip_fanout: int = 3  # Members to which one gossip frame goes, as in memberlist.
    push_pull_period_s: float = 30.0  # Interval between two exchanges of whole tables, which repair missed gossip.
    heal_period_s: float = 30.0  # Interval between two dials of a dead member or seed, which heal partitions.
    progress_period_s: float = 0.25  # Least interval at which a member signs its counts anew: a check takes 131 us.
    max_members: int = 10_000  # Most members known, about 250 B each: the largest full table that was measured.

    # -- joining -----------------------------------------------------------------------------------------------------
    donors: int = 4  # Members that a newcomer fetches its state from at once; three already show an odd one.
    seed_backoff_s: float = 1.0  # The first pause before a seed that is down is dialled again; it doubles.
    seed_backoff_max_s: float = 5.0  # The longest such pause. A node waits until a person starts its seed.
