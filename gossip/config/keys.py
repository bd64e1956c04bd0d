"""The keys of a Config: default, meaning, advice, unit and range. They are the source of docs/config.md."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.codecs import AUTO, CODECS
from gossip.config.filters import FILTERS
from gossip.config.mixings import MIXINGS
from gossip.config.selections import SELECTIONS
from gossip.config.setting import key

__all__ = ["MOST_PARTNERS", "Keys"]

MOST_PARTNERS = 16  # Each costs a stream, and two vectors of memory if both sides stream.


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The fields of :class:`gossip.config.Config`; the equations are in docs/algorithms.md."""

    # Keep a key on three or four lines instead of ten.
    # fmt: off
    swarm: str = key(
        "default", "name of the swarm; swarms of different names refuse each other",
        "two swarms of one model share machines or seeds", section="The swarm", form="1 to 64 printable characters",
    )

    # -- with whom (gossip.selection) --------------------------------------------------------------------------------
    selection: str = key(
        "uniform", "rule by which partners are chosen",
        "`nearest` where distant links are dear, `graph` where only some can reach each other, `grid` for groups",
        section="With whom", choices=tuple(SELECTIONS),
    )
    graph: str = key(
        "", "for `graph`: the file of edges, two members a line", "selection is `graph`", form="a path",
    )
    shortcuts: float = key(
        0.1, "for `nearest`: how many mixes are with anybody, however far",
        "higher if regions drift apart, lower if distant links are dear", unit="share of mixes", least=0, most=1,
        least_is="the nearest alone", most_is="anybody; it is a share",
    )
    group_size: int = key(
        4, 'members of one group, for `mixing = "group"` and for `grid`',
        "larger groups agree faster and fail more often", unit="members", least=2, most=MOST_PARTNERS,
        zero=f"everybody, {MOST_PARTNERS} at most",
    )
    partners: int = key(
        1, "partners of one mix; more than 1 for pushes only",
        "0 with a ring, torus or graph; the logarithm of the swarm's size for `row-stochastic`", unit="members",
        least=0, most=MOST_PARTNERS, least_is="all neighbours at once, each pair weighted by Metropolis",
    )

    # -- when to mix (gossip.schedule) -------------------------------------------------------------------------------
    mix_every_steps: int | str | None = key(
        8, "local steps for each finished exchange, whoever asked for it, jittered by a quarter; `\"auto\"`: as few as "
        "a node can afford, at no more bytes than fp32 every 8",
        '`"auto"` with `codec = "auto"` on any link; else fewer keep nodes closer, more send less',
        section="When to mix", unit="local steps", positive=True, word=AUTO, left_out="mixing by the clock alone",
    )
    mixing_share: float = key(
        0.02, "for `mix_every_steps = \"auto\"`: how much of the time of training mixing may cost a node",
        "more where large models may train a little slower for nodes closer together", unit="share of step time",
        positive=True, most=1,
    )
    mix_every_s: float | None = key(
        None, "or so many seconds, whichever comes first",
        "steps take minutes, or machines differ by orders of magnitude", unit="s", positive=True,
        left_out="mixing by steps alone",
    )
    max_version_gap: float | None = key(
        None, "intervals that a loop trains on while a mix is under way, before it waits",
        "staleness must be bounded, as a paper has it; it makes everybody wait for slow links", unit="intervals",
        least=0, least_is="lockstep pairs", left_out="no bound, nobody waits",
    )
    consensus_target: float | None = key(
        None, "keep nodes so many local steps apart: mix up to 4 times as often, or as rarely",
        "distances should stay alike while the rate falls", unit="local steps", positive=True,
        left_out="a constant pace",
    )

    # -- how to mix (gossip.mixing states the equations) -------------------------------------------------------------
    mixing: str = key(
        "pair", "how vectors combine: " + ", ".join(f"`{name}` {rule.means}" for name, rule in MIXINGS.items()),
        "`group` for up to 16 equal machines on a LAN; pushes where nothing may be waited for", section="How to mix",
        choices=tuple(MIXINGS),
    )
    outer_momentum: float | None = key(
        None, "alpha of the outer step, m <- alpha m + beta (mean - phi)",
        "0 with `outer_rate = 1` saves two vectors of memory; more for fewer mixes", unit="factor", least=0, most=1,
        below=True, least_is="plain means",
        left_out="0.5 where whole vectors of pairs are mixed, without quasi-global momentum, else 0",
    )
    outer_rate: float | None = key(
        None, "beta of the outer step, phi <- phi + m; for pairs below 2 (1 - alpha^2)",
        "with `outer_momentum`: nodes stay closest at half of what is stable", unit="factor", positive=True,
        left_out="0.7 where whole vectors of pairs are mixed, without quasi-global momentum, else 1",
    )
    correction: float | None = key(
        None, "kappa of the correction, c <- c + kappa d: the pull of a node's own data, taken out of its local steps",
        "0 saves a vector of memory and four passes over the model in each interval",
        unit="factor", least=0, most=1, below=True, least_is="none",
        left_out="0.2 where the outer step is left out too and is not plain, and mixes are by steps, else 0",
    )
    staleness_exponent: float = key(
        0.0, "a of a pair's weight, 1/2 (1 + gap)^-a with the gap in whole mixing rounds",
        "0.5 if weights of members far behind do harm", unit="exponent", least=0, most=4, least_is="all pairs alike",
    )
    codec: str = key(
        "fp32", "what crosses the wire; `auto` chooses for each link",
        "`bf16` halves the bytes at no loss, `int8` and `int4` for slow links, `moniqua4` for language models on them",
        form=", ".join((*CODECS, AUTO)),
    )
    part: str = key(
        "all",
        "which elements one exchange mixes: all, a random share, or one fragment after another",
        "`fragments 4` spreads the same bytes evenly over a link that is busy all the time",
        form='all, "mask SHARE" as mask 0.005, or "fragments N" as fragments 8',
    )

    # -- what to accept (gossip.filters) -----------------------------------------------------------------------------
    norm_bound: float = key(
        10.0, "refuse |theirs - ours| > bound (|ours| + sqrt(elements)): that is broken, not merely far",
        "hardly ever: unlike `filter` it is no defence, only a check", section="What to accept", unit="factor",
        positive=True,
    )
    filter: str = key(
        "auto",
        ", ".join(f"`{name}` {rule.does}" for name, rule in FILTERS.items() if rule.does),
        "`none` if all are trusted and one is forty times slower; `auto` is `clip` for pairs and row-stochastic pushes",
        choices=("auto", *FILTERS),
    )
    clip_radius: float | None = key(
        None, "for `clip`: the longest difference taken whole", "the usual distance is known beforehand",
        unit="distance of weights", positive=True, left_out="a radius that follows the usual distance",
    )
    clip_factor: float = key(
        1.5, "the radius is so many usual distances: the lower quartile of 16 partners', and half of own steps",
        "higher where honest data are very uneven, lower among strangers", unit="factor", positive=True,
    )
    trim: int = key(
        1, "for `trimmed`: values of each element left out at either end", "as many as the liars expected in one group",
        unit="members", least=1, most=MOST_PARTNERS // 2,
    )
    balance_gamma: float = key(
        0.3, "for `balance`: refuse |theirs - ours| > gamma exp(-kappa t/T) |ours|, t in mixing rounds",
        "higher if honest members are refused at the beginning", unit="factor", positive=True,
    )
    balance_kappa: float = key(
        1.0, "how fast that bound falls", "higher if training converges sooner than T rounds", unit="factor",
        positive=True,
    )
    balance_rounds: float = key(
        1000.0, "T, the mixing rounds of the whole training", "set it to what your training has", unit="mixing rounds",
        positive=True,
    )

    # -- exchanges ---------------------------------------------------------------------------------------------------
    incoming_exchanges: int = key(
        2, "exchanges that others asked for at once, beside one of our own; in all one more where mixes overlap",
        "1 to save memory: each costs two vectors", section="Exchanges", unit="exchanges", least=1, most=8,
    )
    reply_timeout_s: float = key(
        5.0, "an offer without an answer is given up; a partner answers at its next step boundary or says BUSY",
        "longer than twice the links' round trip and `boundary_patience_s`", unit="s", positive=True,
    )
    boundary_patience_s: float = key(
        2.0, "offers are answered BUSY when our loop has reached no step boundary for so long",
        "longer than your steps take", unit="s", positive=True,
    )
    slowest_rate_mb_s: float = key(
        0.05, "a transfer may take its median + 6 MAD, and never less than its bytes over this rate",
        "lower than your slowest link, which several transfers may share: 0.05 is 40 % of 1 Mbit/s", unit="MB/s",
        positive=True,
    )
    stall_s: float = key(
        3.0, "a transfer of which no byte moved for so long has failed",
        "longer on links that pause, shorter where they lose a lot", unit="s", positive=True,
    )
    bench_s: float = key(
        10.0, "a partner that failed is not asked for so long, doubling up to 16 times this",
        "shorter where failures pass quickly", unit="s", positive=True,
    )
    doubt_s: float = key(
        30.0, "a COMMIT without an answer is asked after for so long, then the exchange is dropped",
        "longer where links are cut for minutes; each doubt holds two vectors", unit="s", positive=True,
    )

    # -- membership: SWIM with Lifeguard -----------------------------------------------------------------------------
    probe_period_s: float = key(
        2.0, "between two probes of one member each", "shorter to find the dead sooner, at more messages",
        section="Membership (SWIM with Lifeguard)", unit="s", positive=True,
    )
    probe_timeout_min_s: float = key(
        0.5, "a probe's time: clamp(3 RTT, min, max) (1 + local health)",
        "longer on machines that are busy for tenths of seconds", unit="s", positive=True,
    )
    probe_timeout_max_s: float = key(
        1.0, "the upper end of it", "above three round trips of your slowest link", unit="s", positive=True,
    )
    indirect_probes: int = key(
        3, "members asked to probe in our place", "more on lossy networks", unit="members", positive=True,
    )
    suspicion_periods: float = key(
        4.0, "a suspect has this times max(1, log10 N) probe periods to refute, less with more accusers",
        "longer if live members are called dead", unit="probe periods", positive=True,
    )
    gossip_period_s: float = key(
        0.5, "between two rounds of news", "shorter for sooner news, at more messages", unit="s", positive=True,
    )
    gossip_fanout: int = key(
        3, "members that one round of news goes to", "more for sooner news in large swarms", unit="members",
        positive=True,
    )
    push_pull_period_s: float = key(
        30.0, "between two exchanges of whole tables with one member", "hardly ever: it repairs what news missed",
        unit="s", positive=True,
    )
    heal_period_s: float = key(
        30.0, "one dead member or seed is dialled so often, which heals partitions",
        "shorter if partitions must heal at once", unit="s", positive=True,
    )
    dead_kept_s: float = key(
        86_400.0, "how long the dead are remembered: not sampled, still dialled",
        "longer than the longest cut of your network", unit="s", positive=True,
    )
    max_members: int = key(
        10_000, "members known at most, about 250 B each", "the largest full table measured: not above it",
        unit="members", positive=True,
    )
    progress_period_s: float = key(
        0.25, "a member signs its own step, sample and loss counts anew at most so often",
        "longer on very slow processors", unit="s", positive=True,
    )

    # -- joining -----------------------------------------------------------------------------------------------------
    join_timeout_s: float = key(
        20.0, "with nobody reachable for so long a node starts alone, and merges later",
        "longer where seeds start late; `join_or_fail_s` of Node ends it instead", section="Joining", unit="s",
        positive=True,
    )
    merge: str = key(
        "auto", "with a larger run: `auto` (its weights are judged first), `ask` (a notice, and `node.merge`), `never`",
        "`ask` or `never` if what this node holds is worth more than any other run", choices=("auto", "ask", "never"),
    )
    donors: int = key(
        4, "members that a newcomer fetches its state from at once", "fewer if donors' links are slow", unit="members",
        positive=True,
    )
    seed_backoff_s: float = key(
        1.0, "first retry of a seed that is down; doubles", "shorter if seeds restart within a second", unit="s",
        positive=True,
    )
    seed_backoff_max_s: float = key(
        60.0, "the longest pause between two tries", "shorter if seeds come up late", unit="s", positive=True,
    )

    # -- links -------------------------------------------------------------------------------------------------------
    max_links: int = key(
        256, "connections kept", "lower where descriptors are few", section="Links", unit="links", positive=True,
    )
    connections: int = key(
        8, "that share a vector at most, where one does not fill its path, as where `cubic` loses packets",
        "1 to leave others more of a path that is full, more where packets are lost on fast links", unit="connections",
        least=1, most=64, least_is="the link alone",
    )
    idle_s: float = key(
        60.0, "a connection without traffic for so long is closed",
        "shorter than a firewall's own limit, longer than the interval between mixes", unit="s", positive=True,
    )
    hello_timeout_s: float = key(
        5.0, "from the first byte to a finished handshake", "longer over satellites", unit="s", positive=True,
    )
    chunk_elements: int = key(
        131_072, "elements of one chunk: 512 KiB of fp32, in cache, and 0.2 s at 20 Mbit/s before a probe gets through",
        "more at 10 Gbit/s; chunks become shorter by themselves where they take long", unit="elements", least=1024,
        most=1 << 20,
    )
    # fmt: on
