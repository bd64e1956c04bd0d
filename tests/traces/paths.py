"""The paths through the protocol, each played by two or three peers. A path's docstring is the head of its trace."""

import inspect
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations
from pathlib import Path

from gossip.config import Config
from gossip.effects import MemberState, Send
from gossip.wire.messages import Commit
from tests.harness.host import Host
from tests.traces.recorder import Recorder

HERE = Path(__file__).parent
RARELY = Config(mix_every_steps=1_000)  # No peer mixes unless the path makes its mix due.


def acquainted(swarm: Recorder, count: int) -> list[Host]:
    """Return members of one run that know each other and have mixed nothing, with weights of 100, 200, 300."""
    nodes = swarm.swarm(count)
    pairs = list(permutations(nodes, 2))
    swarm.until(lambda: swarm.agreed() and all(a.peer.partners.fits(b.id) for a, b in pairs), 30.0)
    for node in nodes:
        node.value = Fraction(100 + 100 * node.number)
    swarm.record()
    return nodes


def due(swarm: Recorder, *nodes: Host) -> None:
    """Make the mixes of these nodes due now."""
    for node in nodes:
        node.peer.schedule.retry_at, node.peer.schedule.due_steps = swarm.now, 0


def mixed(swarm: Recorder, limit_s: float = 10.0) -> Recorder:
    """Run until all nodes have mixed, and have added the differences."""
    swarm.until(lambda: all(node.mixes and not node.model.pending for node in swarm.hosts), limit_s)
    return swarm


def join() -> Recorder:
    """A newcomer, c, is told the address of a alone, and comes to a run that a and b train: their weights are 70.
    a's gossip tells b of it, which dials. Half a second after its first link c asks both what they have (a fetch of no
    elements), then fetches half of the weights from each. Look at when c becomes ready: once its loop has taken the
    weights whole, at a step boundary; and at how soon others may choose it as a partner."""
    swarm = Recorder(1, config=RARELY)
    a, b = swarm.swarm(2)
    swarm.until(swarm.agreed, 10.0)
    swarm.run(5.0)
    a.value = b.value = Fraction(70)
    swarm.members = True
    swarm.record()
    c = swarm.start(0)
    for node in (a, b):
        swarm.until(lambda node=node: node.peer.partners.fits(c.id), 10.0)
        swarm.say("may choose c as a partner from now on", swarm.names(node.id))
    return swarm


def pair() -> Recorder:
    """a's mix is due, and it averages its weights with b's: 100 and 200 become 150 and 150.
    A message stands where it is sent, and arrives 10 ms later. Look at the two commits: each says that the whole vector
    of the other has arrived and passes the checks, and a side mixes once it has both sent and received one. Snapshots
    and additions come at step boundaries, every 100 ms; nothing else changes the weights, and no step waits for it."""
    swarm = Recorder(2, config=RARELY)
    due(swarm, acquainted(swarm, 2)[0])
    return mixed(swarm)


def crossed_offers() -> Recorder:
    """a and b offer to each other at once: messages take 150 ms here, so that neither knows of the other's offer.
    The result must be exactly one exchange. Both decide alike, without another message: the offer of the smaller id,
    which is a's, counts. b drops its own #2, and answers #1 with the snapshot that it had taken for #2; the busy that
    answers #2 is late, and changes nothing."""
    swarm = Recorder(7, config=RARELY, latency_s=0.15)
    due(swarm, *acquainted(swarm, 2))
    return mixed(swarm)


def doubt() -> Recorder:
    """The link breaks while b's commit is on its way: b has sent and received a commit and mixes, a cannot know that.
    a may assume neither yes nor no, so it asks over a new link (outcome), and b's answer is final (settled yes). Look
    at the end: both have mixed, and the mean is unchanged. The doubt blocks no other exchange: a does not wait for the
    answer, and prepares another mix of its own, #2."""
    swarm = Recorder(4, config=RARELY)
    swarm.members = True
    a, b = acquainted(swarm, 2)
    due(swarm, a)
    swarm.until(lambda: any(isinstance(send.message, Commit) for _, send in b.said(Send)), 10.0)
    swarm.say("the link breaks", "a -- b")
    swarm.unlink(a, b)
    return mixed(swarm)


def group() -> Recorder:
    """a's mix is due, and it invites b and c to a group: 100, 200 and 300 become 200.
    Each averages one slice of the vector for all, and sends them the mean. Look at which peer decides: the members send
    commit to a, which invited. Once a has all commits, and all means itself, its settled yes makes all members mix; a
    failure before that ends the group for all."""
    swarm = Recorder(5, config=Config(mixing="group", mix_every_steps=1_000))
    due(swarm, acquainted(swarm, 3)[0])
    return mixed(swarm)


def heal() -> Recorder:
    """The network is cut between a and b on one side and c on the other. It heals 3 s after each side holds the other
    DEAD; a and b do so sooner, since each confirms the other's suspicion. The trace shows only the end of exchanges.
    Look at what DEAD means: no partner, but not forgotten. c continues to dial. Once a hears it, both refute that they
    are dead, which raises their incarnation to 2; so does b, which c's claim alone makes no more than a suspect."""
    swarm = Recorder(6, config=Config(mix_every_steps=None, mix_every_s=12.0))
    a, b, c = acquainted(swarm, 3)
    swarm.members, swarm.exchanges = True, False

    def dead() -> bool:
        held = [x.peer.membership.state(y.id) for x, y in ((a, c), (b, c), (c, a), (c, b))]
        return all(state is MemberState.DEAD for state in held)

    swarm.say("the network is cut: a and b | c")
    swarm.network.partition(lambda number: number == c.number)
    swarm.until(dead, 60.0)
    swarm.run(3.0)
    swarm.say("the network is whole again")
    swarm.network.partition(None)
    assert not c.mixes
    return mixed(swarm, 60.0)


PATHS: dict[str, Callable[[], Recorder]] = {f.__name__: f for f in (join, pair, crossed_offers, doubt, group, heal)}


def played(name: str) -> str:
    """Play the path, and return the content that its file should have."""
    path = PATHS[name]
    return "\n".join([inspect.cleandoc(path.__doc__ or ""), "", *(path().lines or []), ""])
