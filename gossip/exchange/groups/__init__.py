"""Exchanges between more than two members: matchmaking, and the state machine of one group."""
