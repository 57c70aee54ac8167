"""Whether a tensor's operations run on a CUDA device, asked in one place.

What runs where differs: 16-bit products with float32 sums, the attention kernels, the sizes of steps. A dry run of a GPU's step
(`longstraw.dry_run.kernels`) has this say so of tensors that are on no device. Call it through the module.
"""

import torch


def computes_on_cuda(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on a CUDA device."""
    return tensor.device.type == "cuda"
