"""What the ranks of `test_expert_gradients.py` check: who sums which gradient, and the norm that clips it.

Every check runs on this many ranks under every fitting pair of context-parallel and expert-parallel sizes; what is left
over is data parallel.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from longstraw.adapters.registry import find_adapters, find_routers
from longstraw.patches.device import cuda_means_cpu
from longstraw.patches.finalize_model_grads import finalize_gradients, wrap_for_gradients
from longstraw.sweep_config import SweepConfig
from longstraw.sweeps import ReplayEngine
from megatron.grpo.model_provider import build_model
from megatron.grpo.optimizer import build_optimizer, clip_gradients
from megatron.grpo.presets import get_preset
from megatron.grpo.sharding import is_expert
from tests.ranks.training_state import switch_topology
from tests.support.models import draw_group, draw_weights
from tests.support.ranks import fork_ranks

TOPOLOGIES = {2: [(1, 1), (1, 2), (2, 1), (2, 2)], 4: [(2, 4), (4, 2)]}
"""(context parallel, expert parallel) by number of ranks."""


def build(groups, name: str, num_layers: int, **settings):
    """The first layers of a preset on these groups, and DDP around them; settings: of Megatron's config."""
    model_parallel_cuda_manual_seed(1)
    preset = get_preset(name)
    freq = preset.moe_layer_freq if isinstance(preset.moe_layer_freq, int) else preset.moe_layer_freq[:num_layers]
    preset = replace(preset, num_layers=num_layers, moe_layer_freq=freq)
    config = preset.transformer_config(
        use_cpu_initialization=True, context_parallel_size=groups.cp.size(), expert_model_parallel_size=groups.ep.size(),
        **settings,
    )
    model = build_model(preset, config, groups)
    draw_weights(model, 1)
    return model, wrap_for_gradients(model, groups)


def check_sums(ranks: int, groups, ep: int) -> None:
    """Each rank contributes its rank + 1 to every parameter: dense ones sum over all ranks, experts over their copies."""
    trained = dict(dsa_indexer_loss_coeff=0.1, dsa_indexer_use_sparse_loss=True)
    model, ddp = build(groups, "tiny-glm5.2", 3, **trained)
    adapters = [*find_adapters(model, 3), *find_routers(model)]
    biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("expert_bias")}
    assert len(biases) == 2 and all(bias.any() for bias in biases.values())
    ddp.zero_grad_buffer()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.main_grad.fill_(dist.get_rank() + 1)
    finalize_gradients(ddp, adapters, groups)
    everyone = ranks * (ranks + 1) / 2
    copies = sum(rank + 1 for rank in range(ranks) if rank % ep == dist.get_rank() % ep)
    seen = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = copies if is_expert(name) else everyone
        assert (parameter.main_grad == expected).all(), (name, parameter.main_grad.flatten()[0], expected)
        seen.add(name.split("layers.1.")[-1] if "layers." in name else name)
    for part in ("mlp.router.weight", "mlp.shared_experts.linear_fc1.weight", "mlp.experts.local_experts.0.linear_fc2.weight",
                 "self_attention.linear_kv_up_proj.weight", "self_attention.q_layernorm.weight",
                 "self_attention.core_attention.indexer.linear_wk.weight",
                 "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"):
        assert part in seen, part
    for name, bias in model.named_buffers():
        assert name not in biases or torch.equal(bias, biases[name]), f"{name} has moved"


def optimizer_of(ddp, groups, **changes):
    values = dict(optimizer="adam", lr=0.1, min_lr=0.0, weight_decay=0.0, clip_grad=1.0, bf16=False)
    return build_optimizer(SimpleNamespace(**values | changes), ddp, groups)


def check_norm(ranks: int, groups, ep: int) -> None:
    """Every expert and every dense parameter counts once, whatever the topology; all are scaled by one factor."""
    model, ddp = build(groups, "tiny-qwen3-moe", 1)
    optimizer = optimizer_of(ddp, groups)
    ddp.zero_grad_buffer()
    first = "mlp.experts.local_experts.0.linear_fc1.weight"
    for name, parameter in model.named_parameters():
        if name == f"decoder.layers.0.{first}":
            parameter.main_grad.view(-1)[:2] = 1.0
    with_experts_only = clip(optimizer)
    assert math.isclose(with_experts_only, (2 * ep) ** 0.5, rel_tol=1e-6), with_experts_only
    clipped = dict(model.named_parameters())[f"decoder.layers.0.{first}"].main_grad.view(-1)[:2]
    torch.testing.assert_close(clipped, torch.full((2,), min(1.0, 1.0 / (2 * ep) ** 0.5)), rtol=1e-4, atol=0)
    ddp.zero_grad_buffer()
    dict(model.named_parameters())["decoder.layers.0.mlp.router.weight"].main_grad.view(-1)[:2] = 1.0
    assert math.isclose(clip(optimizer), 2**0.5, rel_tol=1e-6)


def clip(optimizer) -> float:
    with cuda_means_cpu():
        optimizer.prepare_grads()
    return clip_gradients(optimizer)


def check_idle_experts(ranks: int, groups, ep: int) -> None:
    """All tokens to the first four experts of sixteen: the step completes, idle experts get zeros and stay."""
    model, ddp = build(groups, "tiny-glm5.2", 2)
    for router in find_routers(model):
        router.module.expert_bias.copy_(torch.tensor([9.0, 8.0, 7.0, 6.0] + [0.0] * 12))
    engine = ReplayEngine(model, SweepConfig(prompt_chunk_size=8, response_block_size=4), vocab_size=128)
    optimizer = optimizer_of(ddp, groups)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        engine.replay(draw_group(13, (5, 2), 128).tree())
        engine.finish_phase()
    finalize_gradients(ddp, engine.adapters, groups)
    used = {}
    for name, parameter in model.named_parameters():
        if is_expert(name):
            used[name] = parameter.main_grad.any().item()
            number = int(name.split("local_experts.")[1].split(".")[0]) + groups.ep.rank() * 16 // ep
            assert used[name] == (number < 4), (name, number)
    clip(optimizer)
    with cuda_means_cpu():
        optimizer.step_with_ready_grads()
    for name, parameter in model.named_parameters():
        if is_expert(name):
            assert torch.equal(parameter, before[name]) == (not used[name]), name


def main(rank, ranks, arguments):
    done = []
    for cp, ep in TOPOLOGIES[ranks]:
        groups = switch_topology(1, cp, ep)
        for check in (check_sums, check_norm, check_idle_experts):
            check(ranks, groups, ep)
            done.append(f"{check.__name__} cp{cp} ep{ep}")
            if rank == 0:
                print(done[-1], flush=True)
    if rank == 0:
        Path(arguments[0]).write_text(json.dumps(done))


if __name__ == "__main__":
    fork_ranks(main)
