"""All gloo groups of a process on one network device.

torch gives every gloo group a device of its own, each with a thread that wakes a hundred times a second whether or not
anything comes. A topology has some fifty groups, so on ranks that share cores those threads take a large part of the
processor time. With one device for all, one thread waits; data and results are the same.

Left out: groups made before the patch keep theirs.
"""

import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo

from longstraw.patches.verify import require_attribute

_devices: dict[int, list] = {}
"""process id -> its devices: a forked process makes its own, since threads do not come along."""


def share_gloo_device() -> None:
    """From now on gloo groups share this process's device. Safe to call twice.

    Raises PatchMismatch when torch's class is not what this was written for.
    """
    if hasattr(ProcessGroupGloo, "_longstraw_shared"):
        return
    for name in ("_Options", "create_device", "create_default_device"):
        require_attribute(ProcessGroupGloo, name)
    require_attribute(ProcessGroupGloo._Options, "_devices")
    original = ProcessGroupGloo.__init__

    def __init__(self, store, rank, size, options=None, *, timeout=None):
        if options is None or isinstance(options, timedelta):
            timeout = options if timeout is None else timeout
            options = ProcessGroupGloo._Options()
            options._devices = _shared_devices()
            if timeout is not None:
                options._timeout = timeout
        original(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = __init__
    ProcessGroupGloo._longstraw_shared = True


def _shared_devices() -> list:
    """This process's devices: those of the interfaces in GLOO_SOCKET_IFNAME, as torch reads it, or the default one."""
    if os.getpid() not in _devices:
        names = os.environ.get("GLOO_SOCKET_IFNAME", "")
        make = ProcessGroupGloo.create_device
        _devices[os.getpid()] = (
            [make(interface=name) for name in names.split(",")] if names else [ProcessGroupGloo.create_default_device()]
        )
    return _devices[os.getpid()]
