"""Settings of the property tests: they never judge speed, a loaded machine is no failure."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")
