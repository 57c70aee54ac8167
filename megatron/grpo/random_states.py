"""Every random state of a rank as plain values, and back.

Python's, NumPy's, torch's, the current CUDA device's, Megatron's named generators and whatever generators the caller
names. Plain values (numbers, lists, byte tensors), so that a checkpoint of them loads with weights_only.
"""

import random
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from megatron.core import tensor_parallel

from longstraw.patches.device import cuda_available, cuda_means_cpu


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts: the same on every rank and machine, and after a resume."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def collect_random_states(generators: Mapping[str, torch.Generator]) -> dict:
    """The random states of this rank, as they stand."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": [version, list(internal), gauss],
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "megatron": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }
    if cuda_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict, generators: Mapping[str, torch.Generator]) -> None:
    """Set the random states of this rank to what `collect_random_states` gave.

    Raises ValueError when the generators have other names; nothing is changed then.
    """
    if set(states["generators"]) != set(generators):
        raise ValueError(
            f"the checkpoint holds the random generators {sorted(states['generators'])}, not {sorted(generators)}: pass "
            "--no-load-rng to start them anew"
        )
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    for name, generator in generators.items():
        generator.set_state(states["generators"][name])
    with cuda_means_cpu():
        tensor_parallel.get_cuda_rng_tracker().set_states(states["megatron"])
    if cuda_available() and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    torch.set_rng_state(states["torch"])
