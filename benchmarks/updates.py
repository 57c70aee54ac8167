"""One GRPO update on one prompt and a group of responses, the conventional way and LongStraw's, on equal terms.

Both update the same model (Megatron's modules, equal weights from the seed) on the same tokens, with the same objective
(`longstraw.objectives`: token-level clipped loss), the same vocabulary projection and log-probabilities, the same gated
delta rule and the same torch optimizer. Where a choice had to be made, it favours the conventional side: its attention
is torch's fused kernel, and its head runs on response tokens only. Old log-probabilities are the new ones, detached, which is
right for the first update of a batch: LongStraw takes them from the replay too, after a forward of a response's earlier blocks
where it has more than one.

Left out: rollouts and rewards, which cost both sides the same; gradient clipping.

P prompt tokens, R response tokens, B responses replayed together.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from longstraw.objectives import ObjectiveConfig, compute_loss_weights, count_loss_terms, token_policy_loss
from longstraw.objectives.logprobs import compute_logprobs


@dataclass(frozen=True, kw_only=True)
class Batch:
    """prompt [1, P] and responses [G, R] (token ids), advantages [G], weights [G, R] of the token losses."""

    prompt: torch.Tensor
    responses: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor

    def cut(self, prompt_length: int, group_size: int) -> "Batch":
        """The first tokens and responses, for a warm-up."""
        group = slice(group_size)
        return Batch(
            prompt=self.prompt[:, :prompt_length], responses=self.responses[group], advantages=self.advantages[group],
            weights=self.weights[group],
        )


OBJECTIVE = ObjectiveConfig()


def draw_batch(prompt_length: int, response_length: int, group_size: int, vocab_size: int, seed: int, device) -> Batch:
    """Random tokens and advantages, equal in every process with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(vocab_size, (1, prompt_length), generator=generator)
    responses = torch.randint(vocab_size, (group_size, response_length), generator=generator)
    advantages = torch.randn(group_size, generator=generator)
    masks = [torch.ones(response_length, dtype=torch.bool) for _ in range(group_size)]
    weights = torch.stack(compute_loss_weights(masks, OBJECTIVE, counts=count_loss_terms(masks)))
    return Batch(
        prompt=prompt.to(device), responses=responses.to(device), advantages=advantages.to(device),
        weights=weights.to(device),
    )


def weighted_loss(logprobs, old_logprobs, advantages, weights) -> torch.Tensor:
    """The objective's part of tokens [B, M]; advantages [B]."""
    spread = advantages[:, None].expand_as(logprobs).flatten()
    losses = token_policy_loss(logprobs.flatten(), old_logprobs.flatten(), spread, config=OBJECTIVE).loss
    return (losses * weights.flatten()).sum()


class ConventionalUpdate:
    """Full-sequence autograd: the prompt and one response a sequence, gradients summed over the group.

    model: of `build_conventional_model`; with Megatron's recompute settings it is the checkpointed run.
    """

    def __init__(self, model, vocab_size: int):
        self.model, self.vocab_size = model, vocab_size
        _use_fast_delta_rule(model)

    def accumulate(self, batch: Batch) -> None:
        """Loss and backward of every response; gradients land in the parameters."""
        for index in range(len(batch.responses)):
            response = batch.responses[index : index + 1]
            logprobs = self._logprobs(torch.cat([batch.prompt, response[:, :-1]], 1), response)
            old = logprobs.detach()
            weighted_loss(logprobs, old, batch.advantages[index : index + 1], batch.weights[index]).backward()

    def _logprobs(self, ids: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
        from longstraw.adapters.decoder import output_weight

        model = self.model
        rotary = model.rotary_pos_emb.get_emb(ids.shape[1])
        hidden = model.decoder(
            hidden_states=model.embedding(input_ids=ids, position_ids=None), attention_mask=None, rotary_pos_emb=rotary
        )
        answers = hidden[-response.shape[1] :, 0]
        return compute_logprobs(answers, output_weight(model), response[0], vocab_size=self.vocab_size)[None]

    def tokens(self, batch: Batch) -> int:
        """Tokens that go through the model."""
        return len(batch.responses) * (batch.prompt.shape[1] + batch.responses.shape[1] - 1)


def _use_fast_delta_rule(model) -> None:
    """On the CPU, give Megatron's GatedDeltaNet the delta rule that ours uses: the algorithms are compared, not kernels."""
    from longstraw.attention.delta_rule import chunked_delta_rule

    def delta_rule(q, k, v, *, g, beta, **_):
        wide = torch.promote_types(q.dtype, torch.float32)
        start = q.new_zeros(q.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=wide)
        return chunked_delta_rule(q, k, v, g, beta, start)

    for module in model.modules():
        if hasattr(module, "gated_delta_rule") and module.config.deterministic_mode:
            module.gated_delta_rule = delta_rule


class LongStrawUpdate:
    """The engine's update: prompt forward, each response scored and replayed, prompt backward.

    responses_per_replay: responses that share one forward and one backward.
    """

    def __init__(self, engine, responses_per_replay: int):
        self.engine, self.responses_per_replay = engine, responses_per_replay

    def accumulate(self, batch: Batch) -> None:
        """Gradients of the whole group land in the parameters, summed over the context-parallel ranks."""
        from longstraw.segments import prompt_segment

        engine = self.engine
        constant = engine.config.semantics == "response_only"
        prompt = prompt_segment(batch.prompt)
        state, _ = engine.forward_sweep(prompt, None, constant=constant, for_replay=True)
        if not constant:
            engine.prepare_adjoints(state)
        for at in range(0, len(batch.responses), self.responses_per_replay):
            self._replay(batch, slice(at, at + self.responses_per_replay), state)
        if not constant:
            engine.reverse_sweep(prompt, state)
        _sum_gradients(engine)

    def _replay(self, batch: Batch, members: slice, state) -> None:
        """Score some responses, then differentiate them from the same state."""
        from longstraw.segments import Segment

        responses = batch.responses[members]
        inputs = torch.cat([batch.prompt[:, -1:].expand(len(responses), 1), responses[:, :-1]], 1)
        advantages, weights = batch.advantages[members], batch.weights[members]

        def make_loss(old):
            return lambda logprobs, columns: weighted_loss(logprobs, old[:, columns], advantages, weights[:, columns])

        self.engine.score_and_replay(Segment("responses", inputs, responses), state, make_loss)

    def accumulate_prompt_only(self, batch: Batch) -> None:
        """The prompt's share alone: its forward, its recomputation and its backward, from adjoints of ones."""
        from longstraw.prompt_state.recurrent import RecurrentStates
        from longstraw.segments import prompt_segment

        engine, prompt = self.engine, prompt_segment(batch.prompt)
        state, _ = engine.forward_sweep(prompt, None)
        engine.prepare_adjoints(state)
        for layer in state.layers.values():
            if isinstance(layer, RecurrentStates):
                layer.add_adjoint(layer.at(len(state.plan)).map(torch.ones_like))
            pages = getattr(layer, "pages", None) or getattr(layer, "latents", None)
            for adjoint in pages.adjoints if pages else ():
                adjoint.fill_(1e-3)
        engine.reverse_sweep(prompt, state)
        _sum_gradients(engine)

    def tokens(self, batch: Batch) -> int:
        """Distinct tokens that go through the model."""
        return batch.prompt.shape[1] - 1 + batch.responses.numel()


def _sum_gradients(engine) -> None:
    """What DDP and Megatron's finalization do in training, for context and expert parallelism: a sum of each gradient over
    the ranks that hold the parameter; an expert that got no token has a gradient of zeros."""
    groups = engine.model.pg_collection
    by_group: dict = {groups.cp: [], groups.expt_dp: []}
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            by_group[groups.cp if getattr(parameter, "allreduce", True) else groups.expt_dp].append(parameter.grad)
    for group, gradients in by_group.items():
        if group.size() > 1 and gradients:
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=group)
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
                gradient.copy_(summed.view_as(gradient))
