"""RMSNorm for the layer specs.

Megatron's `WrappedTorchNorm` refuses sequence parallelism and zero-centred weights, both of which the models need:
Qwen3.5 and 3.6 scale by (1 + w), and under sequence parallelism a norm's weight sees only this rank's rows, so its
gradient is a partial sum that `finalize_model_grads` has to add over TP (it looks for the `sequence_parallel` mark).
"""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) * w, or * (1 + w) with `config.layernorm_zero_centered_gamma`; statistics in float32 at least.

    x: [..., H] of any float dtype; the result has x's dtype.
    """

    zero_centered_allowed = True

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.zero_centered = config.layernorm_zero_centered_gamma and self.zero_centered_allowed
        initial = 0.0 if self.zero_centered else 1.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), initial, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = 1.0 + self.weight.float() if self.zero_centered else self.weight.float()
        return torch.nn.functional.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GatedOutputNorm(RMSNorm):
    """The norm before GDN's output gate: its weight is never zero-centred, also where the layer norms are."""

    zero_centered_allowed = False
