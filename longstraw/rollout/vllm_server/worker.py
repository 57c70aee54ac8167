"""What vLLM's workers do for weight syncs: methods that vLLM adds to its worker class and calls by name on every rank.

Weights come as safetensors files with the names of the Hugging Face checkpoint. They go through the model's own loader,
as at start-up, so that whatever a rank makes of them (its part of a tensor, fused projections, a CPU's repacked matrices)
is made again. Tensors are hashed on their way in, each on one of the ranks.

Left out: applying an update to weights in place. A CPU engine has repacked them and kept no other copy, and float32
updates of bfloat16 weights need the float32 ones; see `longstraw.rollout.host_copy`.
"""

import inspect
from collections.abc import Iterator

import numpy as np
import torch
from safetensors import safe_open
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from longstraw.receipts.collect import checksum_tensors
from longstraw.rollout.lifetime import die_with_parent


class WeightWorker:
    """Mixed into vLLM's worker on every rank."""

    def follow_server(self, server: int) -> None:
        """Die when the server dies. server: its pid. Not for a worker that runs inside the server itself."""
        die_with_parent(server)

    def open_first_step(self) -> None:
        """Make the tensors that a later pipeline stage receives into. vLLM's CPU worker makes them in its warm-up, which it
        leaves out where nothing is compiled, and then fails on the first step."""
        runner = self.model_runner
        if get_pp_group().is_first_rank or runner.intermediate_tensors is not None:
            return
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )

    def rewind_discarded_draws(self) -> None:
        """Let a prompt be computed in several passes on a CPU, where requests have seeds.

        Each pass draws a token; of all but a prompt's last it is thrown away, and the request's generator is set back, so
        that its response does not depend on the passes. vLLM does that by an offset, which a CPU's generators do not
        have. Here the whole state is put back, and vLLM's way is not reached.

        Raises RuntimeError where vLLM's runner is not the one that this is written for.
        """
        runner = self.model_runner
        sample, settle = runner._sample, runner._bookkeeping_sync
        if "set_offset" not in inspect.getsource(settle) or not hasattr(runner, "discard_request_mask"):
            raise RuntimeError("this vLLM sets generators back in another way: rewind_discarded_draws has to follow it")

        def discarded():
            generators = runner.input_batch.generators
            places = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0].tolist()
            return {place: generators[place] for place in places if place in generators}

        def sample_and_rewind(*args, **kwargs):
            states = [(generator, generator.get_state()) for generator in discarded().values()]
            output = sample(*args, **kwargs)
            for generator, state in states:
                generator.set_state(state)
            return output

        def settle_without_offsets(*args, **kwargs):
            aside, generators = discarded(), runner.input_batch.generators
            for place in aside:
                del generators[place]
            try:
                return settle(*args, **kwargs)
            finally:
                generators.update(aside)

        runner._sample, runner._bookkeeping_sync = sample_and_rewind, settle_without_offsets

    def load_tensors(self, sources: list[tuple[str, list[str] | None]]) -> dict[str, str]:
        """Load tensors of safetensors files; returns the checksums of those that this rank hashes.

        sources: (file, the names to take from it; None for all). The model is no longer whole where this raises.
        """
        checksums: dict[str, str] = {}
        rank, ranks = self.rank, self.parallel_config.world_size
        self.reload_weights(weights_iterator=_read(sources, checksums, rank, ranks), is_checkpoint_format=True)
        for module in self.get_model().modules():
            # An output layer whose weight is the embeddings' has loaded nothing itself; what vLLM's CPU kernels keep is a
            # repacked copy of its own, which would go on with the old weights.
            if isinstance(module, ParallelLMHead) and type(module.quant_method) is UnquantizedEmbeddingMethod:
                module.quant_method.process_weights_after_loading(module)
        return checksums


def _read(sources, checksums: dict[str, str], rank: int, ranks: int) -> Iterator[tuple[str, torch.Tensor]]:
    place = 0
    for path, names in sources:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys() if names is None else names:
                tensor = file.get_tensor(name)
                if place % ranks == rank:
                    checksums[name] = checksum_tensors([(name, tensor)])
                place += 1
                yield name, tensor
