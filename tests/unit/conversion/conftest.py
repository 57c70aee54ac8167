"""The one-process groups that the tests' Megatron models are built on."""

import pytest


@pytest.fixture(scope="session")
def groups():
    """Groups of a single process."""
    from megatron.core import parallel_state

    from megatron.grpo.conversion.build import leave_groups, start_groups

    owned = not parallel_state.model_parallel_is_initialized()
    yield start_groups()
    if owned:
        leave_groups()
