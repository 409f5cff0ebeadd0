"""How many examples hypothesis draws: a few, always the same, in `make test`; many new ones in `make attack`."""

from hypothesis import HealthCheck, settings

# No example fails because the machine is busy.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("test", patient, derandomize=True, database=None, max_examples=30)
settings.register_profile("attack", patient, max_examples=500, print_blob=True)
settings.load_profile("test")
