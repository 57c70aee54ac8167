"""Lift Megatron's float32 islands, so that a float64 audit is float64 throughout.

Megatron's modules cast to float32 in places (the gated delta rule, decay and gates, the rotary application, softmaxes, the
scores of the sparse indexer and of the router). In a float64 model each such cast would cap the agreement at 1e-7. Inside
`lift_float64()` a cast of a float64 tensor to float32 leaves it as it is, and a function that is asked for a float32
result of a float64 tensor gives a float64 one; tensors of other dtypes are untouched.
"""

import torch
from torch.overrides import TorchFunctionMode


class lift_float64(TorchFunctionMode):
    """`with lift_float64():` keeps what comes of a float64 tensor in float64.

    `.float()` and `.to(torch.float32)` are the identity on it, and `dtype=torch.float32` means float64.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if not kwargs and func not in _NARROWS:  # nearly every call, properties of tensors included
            return func(*args)
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            narrows = func is torch.Tensor.float or (
                func is torch.Tensor.to and (torch.float32 in args[1:] or kwargs.get("dtype") is torch.float32)
            )
            if narrows:
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


_NARROWS = frozenset({torch.Tensor.float, torch.Tensor.to})
