"""The one-process groups that the tests' Megatron models are built on."""

import pytest


@pytest.fixture(scope="session")
def groups():
    """Groups of a single process, those of this process's other tests too."""
    from megatron.grpo.conversion.build import start_groups
    from tests.support.models import one_rank

    one_rank()
    return start_groups()
