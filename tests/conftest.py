"""Runs before anything imports Triton (see ``kernels/triton/interpreter.py``) and before a property test is made."""

from tests.kernels.triton import interpreter

interpreter.switch_on()

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:
    pass  # tests/gpu does without
else:
    # The same examples every time and no limits in seconds: a failure is a fault of the code, not of the machine or of
    # chance. `pytest --hypothesis-profile=search` looks for new ones.
    settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("fixed", settings.get_profile("search"), derandomize=True)
    settings.load_profile("fixed")
