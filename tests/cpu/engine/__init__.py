import pytest

# Failing asserts of the rig then show values, as those of test files do.
pytest.register_assert_rewrite("tests.cpu.engine.scheduler_rig")
