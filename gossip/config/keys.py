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
    group_size: int = key(
        4, 'members of one group, for `mixing = "group"` and for `grid`',
        "larger groups agree faster and fail more often", unit="members", least=2, most=MOST_PARTNERS,
        zero=f"all members, {MOST_PARTNERS} at most",
    )
    partners: int = key(
        1, "partners of one mix; more than 1 for pushes only",
        "0 with a ring, torus or graph; the logarithm of the swarm's size for `row-stochastic`", unit="members",
        least=0, most=MOST_PARTNERS, least_is="all neighbours at once, each pair weighted by Metropolis",
    )

    # -- when to mix (gossip.schedule) -------------------------------------------------------------------------------
    mix_every_steps: int | str | None = key(
        8, "local steps for each finished exchange, own or requested, jittered by a quarter; `\"auto\"`: as few as "
        "a node can afford, at no more bytes than fp32 every 8",
        '`"auto"` with `codec = "auto"` on any link; else fewer keep nodes closer, more send less',
        section="When to mix", unit="local steps", positive=True, word=AUTO, left_out="mixing by the clock alone",
    )
    mix_every_s: float | None = key(
        None, "the same in seconds; the earlier of the two counts",
        "steps take minutes, or machines differ by orders of magnitude", unit="s", positive=True,
        left_out="mixing by steps alone",
    )
    max_version_gap: float | None = key(
        None, "intervals that a loop trains on while a mix is under way, before it waits",
        "staleness must be bounded, as a paper has it; it makes all nodes wait for slow links", unit="intervals",
        least=0, least_is="lockstep pairs", left_out="no bound: no loop waits",
    )
    consensus_target: float | None = key(
        None, "keep nodes so many local steps apart: mix up to 4 times as often, or as rarely",
        "distances should stay alike while the rate falls", unit="local steps", positive=True,
        left_out="a constant pace",
    )

    # -- how to mix (gossip.mixing states the equations) -------------------------------------------------------------
    mixing: str = key(
        "pair", "how vectors combine: " + ", ".join(f"`{name}` {rule.means}" for name, rule in MIXINGS.items()),
        "`group` for up to 16 equal machines on a LAN; pushes where no node may wait for another", section="How to mix",
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
    filter: str = key(
        "auto",
        ", ".join(f"`{name}` {rule.does}" for name, rule in FILTERS.items() if rule.does),
        "`none` if all are trusted and one is forty times slower; `auto` is `clip` for pairs and row-stochastic pushes",
        section="What to accept", choices=("auto", *FILTERS),
    )
    filter_limit: float | None = key(
        None, "the filter's own number: "
        + ", ".join(f"for `{name}` {rule.limit}" for name, rule in FILTERS.items() if rule.limit),
        "the usual distance, the length of the training or the number of liars is known beforehand",
        unit="the filter's", positive=True, left_out="a radius that follows the usual distance, 1,000 rounds, 1 value",
    )

    # -- links and patience: every timeout of an exchange follows from these (gossip.config.derived) -------------------
    incoming_exchanges: int = key(
        2, "exchanges that others asked for at once, beside one of our own; in all one more where mixes overlap",
        "1 to save memory: each costs two vectors", section="Links and patience", unit="exchanges", least=1, most=8,
    )
    boundary_patience_s: float = key(
        2.0, "offers are answered BUSY when our loop has reached no step boundary for so long; an answer is awaited "
        "up to 3 s longer", "longer than your steps take", unit="s", positive=True,
    )
    slowest_rate_mb_s: float = key(
        0.05, "a transfer may take its median + 6 MAD, and never less than its bytes over this rate",
        "lower than your slowest link, which several transfers may share: 0.05 is 40 % of 1 Mbit/s", unit="MB/s",
        positive=True,
    )
    stall_s: float = key(
        3.0, "a transfer of which no byte moved for so long has failed; answers and handshakes may take as long",
        "longer on links that pause, shorter where they lose a lot", unit="s", positive=True,
    )
    connections: int = key(
        8, "that share a vector at most, where one does not fill its path, as where `cubic` loses packets",
        "1 to leave others more of a path that is full, more where packets are lost on fast links", unit="connections",
        least=1, most=64, least_is="the link alone",
    )

    # -- joining -----------------------------------------------------------------------------------------------------
    join_timeout_s: float = key(
        20.0, "a node that reaches no member for so long starts alone, and merges later",
        "longer where seeds start late; `join_or_fail_s` of Node ends it instead", section="Joining", unit="s",
        positive=True,
    )
    merge: str = key(
        "auto", "with a larger run: `auto` (its weights are judged first), `ask` (a notice, and `node.merge`), `never`",
        "`ask` or `never` if what this node holds is worth more than any other run", choices=("auto", "ask", "never"),
    )
    # fmt: on
