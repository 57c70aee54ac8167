"""Reference weights: swapped in and out bit for bit, also where scoring fails."""

import pytest
import torch

from longstraw.transaction.reference import ReferencePolicy


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).bfloat16())


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def test_swapping_in_and_out():
    model = make_model(1)
    policy_before = weights_of(model)
    reference = ReferencePolicy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    trained, addresses = weights_of(model), [p.data_ptr() for p in model.parameters()]
    with reference.swapped_in():
        assert all(map(torch.equal, weights_of(model), policy_before))
    assert all(map(torch.equal, weights_of(model), trained))
    assert addresses == [p.data_ptr() for p in model.parameters()]  # DDP and the optimizer hold these very tensors


class Biased(torch.nn.Module):
    """As a router of experts: a weight, a saved bias that has no gradient, and a count that is not saved."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("bias", torch.ones(2))
        self.register_buffer("counts", torch.ones(2), persistent=False)


def test_saved_buffers_belong_to_the_policy():
    model = Biased()
    reference = ReferencePolicy(model)
    with torch.no_grad():
        for tensor in (model.weight, model.bias, model.counts):
            tensor.zero_()
    with reference.swapped_in():
        assert model.weight.all() and model.bias.all() and not model.counts.any()
    assert not model.weight.any() and not model.bias.any()


def test_weights_come_back_when_scoring_fails():
    model = make_model(2)
    reference = ReferencePolicy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(RuntimeError, match="scoring failed"), reference.swapped_in():
        assert model[0].weight.any()
        raise RuntimeError("scoring failed")
    assert not model[0].weight.any()
