"""Lift Megatron's float32 islands, so that a float64 audit is float64 throughout.

Megatron's modules cast to float32 in places (the gated delta rule, decay and gates, the rotary application, the
softmax). In a float64 model each such cast would cap the agreement at 1e-7. Inside `lift_float64()` a cast of a float64
tensor to float32 leaves it as it is; tensors of other dtypes are untouched.
"""

import torch
from torch.overrides import TorchFunctionMode


class lift_float64(TorchFunctionMode):
    """`with lift_float64():` makes `.float()` and `.to(torch.float32)` the identity on float64 tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            narrows = func is torch.Tensor.float or (
                func is torch.Tensor.to and (torch.float32 in args[1:] or kwargs.get("dtype") is torch.float32)
            )
            if narrows:
                return args[0]
        return func(*args, **kwargs)
