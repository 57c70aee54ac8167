"""The experts that a sampler sent a response's rows to, so that the trainer can send them there too (router replay).

A response of T tokens has T rows: the prompt's last token and the response's own but its last, which predict the response.
Rows of the prompt before that are shared by a group and not part of it: there the trainer's choice stays.

Torch is imported where tensors are wanted: samples pass through programs that have none.

L layers with experts, K experts a row, E experts of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from longstraw.rollout.protocol import Sample


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """What a model's routes look like. layers: numbers of its layers with experts, from 1 on, ascending."""

    layers: tuple[int, ...]
    num_experts: int
    topk: int


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """One response's routes, in plain values. layers: L layer numbers. topk: K. data: [T, L, K], little-endian uint16."""

    layers: tuple[int, ...]
    topk: int
    data: bytes

    @classmethod
    def from_tensor(cls, experts: "torch.Tensor", layers: Sequence[int]) -> "RoutedExperts":
        """experts: [T, L, K] of any integer type, in any order."""
        import torch

        ordered = experts.cpu().sort(-1).values.to(torch.uint16)
        return cls(layers=tuple(layers), topk=experts.shape[2], data=ordered.contiguous().numpy().astype("<u2").tobytes())

    def to_tensor(self) -> "torch.Tensor":
        """[T, L, K] int64, each row's experts ascending."""
        import torch

        numbers = torch.frombuffer(bytearray(self.data), dtype=torch.uint16).long()
        return numbers.view(-1, len(self.layers), self.topk)


def check_routes(sample: "Sample", shape: RouteShape) -> str:
    """A clause where a sample's routes are not those of its tokens in a model of that shape, or are missing; else ""."""
    routes = sample.routes
    if routes is None:
        return "comes without the experts that its rows went to, which --rollout-router-replay repeats"
    if (routes.layers, routes.topk) != (shape.layers, shape.topk):
        return (
            f"has routes through {routes.topk} experts of layers {list(routes.layers)}, and the model has {shape.topk} of "
            f"layers {list(shape.layers)}"
        )
    rows, numbers = len(sample.token_ids), 2 * len(shape.layers) * shape.topk
    if len(routes.data) != rows * numbers:
        return f"has {rows} tokens and routes of {len(routes.data) / numbers:g} rows"
    experts = routes.to_tensor()
    if experts.max() >= shape.num_experts:
        return f"was sent to expert {experts.max()}, and the model has {shape.num_experts}"
    if shape.topk > 1 and bool((experts[..., 1:] == experts[..., :-1]).any()):
        return "was sent to one expert twice in one layer"
    return ""
