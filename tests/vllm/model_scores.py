"""Log-probabilities of samples from the converted model: a Hugging Face folder, read into Megatron's modules."""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "conversion"))


@functools.cache
def load_model(folder: Path):
    """(the Megatron model, its preset) of a Hugging Face folder, in float32."""
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.weights import import_weights

    with HFReader(folder) as reader:
        preset = preset_from_hf_config(reader.config)
        model = build_blank_model(preset, start_groups(), dtype=torch.float32)
        import_weights(model, reader, preset)
    return model, preset


def score_rows(folder: Path, prompt: tuple[int, ...], response: tuple[int, ...]) -> torch.Tensor:
    """Logits [T, V] that each token of a response was drawn from."""
    from conversion_models import chunked_logits

    model, preset = load_model(folder)
    logits = chunked_logits(model, torch.tensor([[*prompt, *response]]), 64)[0, :, : preset.vocab_size]
    return logits[len(prompt) - 1 : -1]


def largest_difference(folder: Path, prompt: tuple[int, ...], samples, *, temperature: float) -> float:
    """Between the samples' log-probabilities and the model's own at the temperature."""
    worst = 0.0
    for sample in samples:
        rows = torch.log_softmax(score_rows(folder, prompt, sample.token_ids) / temperature, -1)
        own = rows.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(sample.logprobs)).abs().max().item())
    return worst
