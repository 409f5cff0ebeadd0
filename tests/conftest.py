"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# No example fails because the machine is busy. What fixtures give to several examples is not changed by them.
PATIENT = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("patient", deadline=None, suppress_health_check=PATIENT)
settings.load_profile("patient")
