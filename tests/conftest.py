"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How fast a machine makes an example is no property of what is tested: a busy one fails nothing.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
