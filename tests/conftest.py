"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# No example fails because the machine is busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
