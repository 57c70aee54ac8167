"""Process groups and gradient finalization on one rank; on several: tests/ranks/test_engine_ranks.py."""

import pytest
import torch
import torch.distributed as dist

from longstraw.adapters.registry import find_adapters
from longstraw.patches.finalize_model_grads import sum_over_tp
from longstraw.patches.process_groups import initialize_groups, single_rank_groups
from longstraw.patches.world_sizes import find_misfits
from tests.support.models import get_pair, one_rank


@pytest.mark.parametrize("sizes", [dict(tensor_parallel=2), dict(context_parallel=3), dict(tensor_parallel=2, context_parallel=2)])
def test_sizes_that_do_not_divide_the_world_are_refused(sizes):
    one_rank()
    tp, cp = sizes.get("tensor_parallel", 1), sizes.get("context_parallel", 1)
    sentence = f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} does not divide the 1 ranks"
    with pytest.raises(ValueError, match=sentence):
        initialize_groups(**sizes)


@pytest.mark.parametrize("world, tp, cp, ep, sentences", [
    (4, 1, 4, 4, []), (4, 1, 4, 2, []), (4, 1, 2, 4, []), (8, 1, 2, 4, []), (32, 1, 32, 32, []), (4, 2, 2, 1, []),
    (4, 1, 3, 1, ["--tensor-model-parallel-size 1 x --context-parallel-size 3 does not divide the 4 ranks"]),
    (4, 1, 2, 3, ["--tensor-model-parallel-size 1 x --expert-model-parallel-size 3 does not divide the 4 ranks"]),
    (6, 1, 2, 3, ["--expert-model-parallel-size 3 neither divides --context-parallel-size 2 nor is a multiple of it: "
                  "experts would be spread over a part of a replica"]),
])
def test_expert_parallel_ranks_are_a_part_of_a_replica_or_whole_replicas(world, tp, cp, ep, sentences):
    assert find_misfits(world, tensor_parallel=tp, context_parallel=cp, expert_parallel=ep) == sentences


def test_expert_parallel_sizes_that_do_not_fit_are_refused():
    one_rank()
    with pytest.raises(ValueError, match="--expert-model-parallel-size 2 does not divide the 1 ranks"):
        initialize_groups(expert_parallel=2)


def test_a_single_rank_stands_alone():
    groups = single_rank_groups(one_rank())
    alone = (groups.tp, groups.cp, groups.dp, groups.dp_cp, groups.ep, groups.tp_ep, groups.expt_tp, groups.expt_dp)
    assert [group.size() for group in alone] == [1] * 8


def test_nothing_is_summed_over_one_tensor_parallel_rank():
    """With TP 1 the sum returns before it looks at gradients (there are none here)."""
    pair = get_pair("tiny-qwen3.6")
    sum_over_tp(find_adapters(pair.model, 4), dist.group.WORLD)


def test_partial_gradients_are_the_output_norms_of_gated_delta_nets():
    """What Megatron's finalization leaves out over TP, by name."""
    pair = get_pair("tiny-qwen3.6")
    names = {id(p): name for name, p in pair.model.named_parameters()}
    partial = [names[id(p)] for a in find_adapters(pair.model, 4) for p in a.partial_over_tp()]
    assert partial == [f"decoder.layers.{n}.self_attention.out_norm.weight" for n in range(3)]
    assert all(isinstance(p, torch.nn.Parameter) for a in find_adapters(pair.model, 4) for p in a.partial_over_tp())
