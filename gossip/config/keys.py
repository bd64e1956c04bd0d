"""The keys of a Config: default, meaning, advice, unit and range. They are the source of docs/config.md."""

from __future__ import annotations

from dataclasses import dataclass

from gossip.codecs import AUTO, CODECS
from gossip.config.filters import FILTERS
from gossip.config.mixings import MIXINGS
from gossip.config.selections import SELECTIONS
from gossip.config.setting import key

MOST_PARTNERS = 16  # Each costs a stream, and two vectors of memory if both sides stream.


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """The fields of :class:`gossip.config.Config`; the equations are in docs/algorithms.md.

    The first text of a key is its meaning, and the second says when to change it.
    """

    # Keep a key on three or four lines instead of ten.
    # fmt: off
    swarm: str = key(
        "default", "The name of the swarm. Nodes of differently named swarms refuse each other.",
        "Set it if two swarms of one model share machines or seeds.", section="The swarm",
        form="1 to 64 printable characters",
    )

    # -- with whom (gossip.selection) --------------------------------------------------------------------------------
    selection: str = key(
        "uniform", "The rule by which a node chooses partners.",
        "Use `nearest` where distant links are expensive, `graph` where only some members can reach each other, and "
        "`grid` for groups.", section="With whom", choices=tuple(SELECTIONS),
    )
    graph: str = key(
        "", "The file with the edges of `graph`, two members on each line.",
        "Set it with `selection = \"graph\"`.", form="a path",
    )
    group_size: int = key(
        4, 'The number of members of one group, for `mixing = "group"` and for `grid`.',
        "Raise it to agree in fewer rounds. Larger groups go on without late members more often.",
        unit="members", least=2, most=MOST_PARTNERS, zero=f"all members, {MOST_PARTNERS} at most",
    )
    partners: int = key(
        1, "The number of partners of one mix. Only pushes can have more than 1.",
        "Use 0 with a ring, torus or graph, and the logarithm of the swarm's size for `row-stochastic`.",
        unit="members", least=0, most=MOST_PARTNERS,
        least_is="all neighbours at once, each pair weighted by Metropolis",
    )

    # -- when to mix (gossip.schedule) -------------------------------------------------------------------------------
    mix_every_steps: int | str | None = key(
        None, "The mean number of local steps between two finished exchanges, whichever side requested them. Each "
        "interval is drawn within a quarter of it. `\"auto\"` lets each node mix as often as its link and CPU allow, "
        "at no more bytes than an fp32 exchange every 8 steps.",
        "Raise it to send fewer bytes. Set it where all nodes must mix equally often.", section="When to mix",
        unit="local steps", positive=True, word=AUTO,
        left_out="`\"auto\"` with the default outer step; else 8, or none with `mix_every_s`",
    )
    mix_every_s: float | None = key(
        None, "The mean number of seconds between two finished exchanges. If `mix_every_steps` is set too, the mix "
        "that falls due first counts.",
        "Set it if steps take minutes, or if machines differ in speed by orders of magnitude.", unit="s",
        positive=True, left_out="mixing by steps alone",
    )
    max_version_gap: float | None = key(
        None, "The number of intervals that the loop trains on while a mix is under way, before it waits.",
        "Set it to bound staleness as a paper has it. All nodes then wait for slow links.", unit="intervals", least=0,
        least_is="lockstep pairs", left_out="no bound, and no loop ever waits",
    )

    # -- how to mix (gossip.mixing states the equations) -------------------------------------------------------------
    mixing: str = key(
        "pair", "How vectors are combined: " + ", ".join(f"`{name}` {rule.means}" for name, rule in MIXINGS.items())
        + ".",
        "Use `group` for up to 16 equal machines on a LAN, and pushes where no node may wait for another.",
        section="How to mix", choices=tuple(MIXINGS),
    )
    outer_momentum: float | str | None = key(
        None, "The alpha of the outer step, m <- alpha m + beta (mean - phi). `\"auto\"` lets each node measure it: "
        "momentum rises while successive steps go back and forth, and falls to 0 where they point alike.",
        "Set it if all nodes must use one. 0 saves two vectors of memory.", unit="factor", least=0, most=1, below=True,
        least_is="plain means", word=AUTO,
        left_out="`\"auto\"` where whole vectors of pairs are mixed, else 0",
    )
    outer_rate: float | None = key(
        None, "The beta of the outer step, phi <- phi + m. For pairs it must be below 2 (1 - alpha^2).",
        "Change it together with `outer_momentum`: nodes stay closest at half of the stable limit.", unit="factor",
        positive=True, left_out="1 - alpha^2 with a measured `outer_momentum`, else 1",
    )
    correction: float | None = key(
        None, "The kappa of the correction, c <- c + kappa d. The correction takes the pull of a node's own data out "
        "of its local steps.",
        "Use 0 to save a vector of memory and four passes over the model in each interval.", unit="factor", least=0,
        most=1, below=True, least_is="none",
        left_out="0.2 with the default outer step, unless the clock alone counts; else 0",
    )
    staleness_exponent: float = key(
        0.0, "The a of a pair's weight, 1/2 (1 + gap)^-a, where gap is the difference in whole mixing rounds.",
        "Use 0.5 if the weights of members far behind do harm.", unit="exponent", least=0, most=4,
        least_is="the same weight for all pairs",
    )
    codec: str | None = key(
        None, "The encoding of vectors on the wire. `auto` chooses one for each link.",
        "Use `fp32` to mix without rounding, `int4` for slow links, and `moniqua4` for language models on slow links.",
        form=", ".join((*CODECS, AUTO)), left_out="`auto` where each node chooses its interval; else `fp32`",
    )
    mix_state: str = key(
        "auto", "The optimizer's moments that are mixed too, a part after each mix: `auto` those of optimizers whose "
        "steps do not depend on the gradients' length (Adam, RMSprop, Muon and relatives), `on` the momentum of SGD as "
        "well, `off` none.",
        "Use `off` to save their bytes where all nodes have data alike.", choices=("auto", "on", "off"),
    )
    part: str = key(
        "all", "The elements that one exchange mixes: all, a random share (`mask`), or one fragment after another.",
        "Use `fragments 4` to spread the same bytes evenly over a link that is always busy.",
        form='all, "mask SHARE" such as "mask 0.005", or "fragments N" such as "fragments 8"',
    )

    # -- what to accept (gossip.filters) -----------------------------------------------------------------------------
    filter: str = key(
        "auto", "The defence against wrong weights: "
        + ", ".join(f"`{name}` {rule.does}" for name, rule in FILTERS.items() if rule.does)
        + ". `auto` is `clip` for pairs and row-stochastic pushes, else `none`.",
        "Use `none` if all members are trusted and some are forty times slower than the others. They are far from all "
        "others, so that `clip` lets them catch up only slowly.", section="What to accept", choices=("auto", *FILTERS),
    )
    filter_limit: float | None = key(
        None, "The parameter of the filter: "
        + ", ".join(f"for `{name}` {rule.limit}" for name, rule in FILTERS.items() if rule.limit) + ".",
        "Set it if the usual distance, the length of the training or the number of liars is known beforehand.",
        unit="the filter's", positive=True,
        left_out="a radius that follows the usual distance for `clip`, 1,000 rounds for `balance`, 1 for `trimmed`",
    )

    # -- links and patience: every timeout of an exchange follows from these (gossip.config.derived) -------------------
    incoming_exchanges: int = key(
        2, "The number of exchanges that other members may have with this node at once, besides its own one. Where "
        "mixes overlap, own and incoming ones together are at most one more than this number.",
        "Use 1 to save memory: each exchange holds two vectors.", section="Links and patience", unit="exchanges",
        least=1, most=8,
    )
    boundary_patience_s: float = key(
        2.0, "The time since the loop's last step boundary after which the node answers offers with BUSY. Members wait "
        "up to 3 s longer for an answer.", "Set it above the duration of one step.", unit="s", positive=True,
    )
    slowest_rate_mb_s: float = key(
        0.05, "The rate that sets the longest time of a transfer: its bytes over this rate, or its median + 6 MAD if "
        "that is longer.", "Set it below the rate of your slowest link, which several transfers may share. 0.05 is 40 "
        "% of 1 Mbit/s.", unit="MB/s", positive=True,
    )
    stall_s: float = key(
        3.0, "The time without one byte after which a transfer has failed. Answers and handshakes may take as long.",
        "Raise it for links that pause, lower it for links that lose many packets.", unit="s", positive=True,
    )
    connections: int = key(
        8, "The most connections that share one vector. More than one is opened only where one does not fill the path, "
        "as when packet loss limits `cubic`.",
        "Use 1 to leave more of a full path to others. Raise it where fast links lose packets.", unit="connections",
        least=1, most=64, least_is="the link alone",
    )

    # -- joining -----------------------------------------------------------------------------------------------------
    join_timeout_s: float = key(
        20.0, "The time after which a node that reaches no member starts alone. It merges later.",
        "Raise it if seeds start late. `join_or_fail_s` of Node ends the node instead.", section="Joining", unit="s",
        positive=True,
    )
    merge: str = key(
        "auto", "What a node does when it meets a larger run: `auto` takes its weights if a trial finds them better, "
        "`ask` gives a notice and waits for `node.merge`, `never` keeps its own.",
        "Use `ask` or `never` if the weights of this node are worth more than any other run's.",
        choices=("auto", "ask", "never"),
    )
    # fmt: on
