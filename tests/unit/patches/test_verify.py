"""Each patch's guard trips on a target that changed, with a sentence that names it."""

import pytest

from longstraw.patches import verify
from longstraw.patches.verify import PatchMismatch, require_attribute, require_megatron_version, require_source


def target():
    return "the line that the patch replaces"


def test_unchanged_source_passes():
    require_source(target, "def target(", "the line that the patch")


def test_changed_source_is_refused():
    with pytest.raises(PatchMismatch, match="target no longer contains 'another line': the patch on it has to be checked"):
        require_source(target, "def target(", "another line")


def test_a_missing_attribute_is_refused():
    require_attribute(verify, "PatchMismatch")
    with pytest.raises(PatchMismatch, match="has no attribute 'HAVE_WINGS'"):
        require_attribute(verify, "HAVE_WINGS")


@pytest.mark.parametrize("found", ["0.18.3", "0.20.0", "0.190.1", "1.19.0"])
def test_another_minor_version_is_refused(monkeypatch, found):
    monkeypatch.setattr(verify, "version", lambda name: found)
    with pytest.raises(PatchMismatch, match=rf"checked on megatron-core 0\.19\.x, but {found} is installed"):
        require_megatron_version()


def test_the_installed_version_passes():
    require_megatron_version()
