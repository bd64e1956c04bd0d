"""Membership: SWIM with Lifeguard, signed records and push-pull anti-entropy."""
