"""The lease of a router's port: renewed by its own protocol, kept while it holds, and given back."""

import trio
import trio.testing

from gossip.errors import LocalError
from gossip.ids import Address
from node.transport import router
from node.transport.router import LEASE_S, RETRY_SOON_S, PortKeeper, PortLease

OPENED = Address("203.0.113.7", 7701)


def test_a_lease_outlives_a_request_that_fails_and_is_given_back_by_its_protocol(monkeypatch):
    asked, told, fails = [], [], []

    async def open_port(port, outside, lease_s=LEASE_S, nonce=b"", protocol=""):
        asked.append((port, outside, lease_s, protocol))
        if fails and lease_s:
            raise LocalError("It is not allowed.")
        return PortLease(OPENED, port, float(lease_s), "NAT-PMP")

    monkeypatch.setattr(router, "open_port", open_port)

    async def main():
        keeper = PortKeeper(lambda address, detail: told.append((trio.current_time(), address, detail)), b"n" * 12)
        async with trio.open_nursery() as nursery:
            keeper.open(7700, nursery.start_soon)
            await trio.sleep(1.0)
            fails.append(True)
            await trio.sleep(LEASE_S * 0.75)
            assert told[1:] == [], "the lease holds"
            await trio.sleep(LEASE_S * 0.25 + RETRY_SOON_S)
            assert told[1][1:] == (None, "It is not allowed.")
            fails.clear()
            keeper.open(7700, nursery.start_soon)
            await trio.sleep(1.0)
            keeper.open(0, nursery.start_soon)
            await trio.sleep(1.0)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.0))
    assert asked[0] == (7700, 7700, LEASE_S, "")
    assert asked[1] == (7700, 7701, LEASE_S, "NAT-PMP")
    assert asked[-2:] == [(7700, 7700, LEASE_S, ""), (7700, 7701, 0, "NAT-PMP")]
    assert [address for _, address, _ in told] == [OPENED, None, OPENED]
