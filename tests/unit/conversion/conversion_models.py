"""Small random models of transformers' own classes, and the ways in which the tests run them and ours.

B batch, S tokens, V vocabulary.
"""

import json
from pathlib import Path

import torch

VOCABULARY = 101

_SHARED = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip

QWEN35_TEXT = _SHARED | dict(
    head_dim=16, tie_word_embeddings=False, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_conv_kernel_dim=4, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                     "mrope_section": [1, 1, 0], "mrope_interleaved": True},
)  # fmt: skip

CONFIGS = {
    "llama": ("LlamaConfig", _SHARED | dict(tie_word_embeddings=True, rms_norm_eps=1e-5,
                                            rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
    "qwen3": ("Qwen3Config", _SHARED | dict(head_dim=20, tie_word_embeddings=False,
                                            rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3_5_text": ("Qwen3_5TextConfig", QWEN35_TEXT),
}  # fmt: skip

_LATENT = _SHARED | dict(
    num_key_value_heads=4, moe_intermediate_size=16, n_shared_experts=2, n_routed_experts=8, num_experts_per_tok=4,
    routed_scaling_factor=2.5, first_k_dense_replace=2, q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12,
    qk_rope_head_dim=8, v_head_dim=10, index_n_heads=8, index_head_dim=16, index_topk=7, tie_word_embeddings=False,
    # As published, beyond what transformers' classes declare:
    scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, moe_router_dtype="float32", pretraining_tp=1,
    rope_interleave=True, num_nextn_predict_layers=0,
)  # fmt: skip

LATENT_CONFIGS = {
    "glm_moe_dsa": ("GlmMoeDsaConfig", _LATENT | dict(
        # Layers 0, 1 and 4 select.
        num_hidden_layers=6, index_topk_freq=3, index_skip_topk_offset=2, indexer_rope_interleave=True,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 8e6})),
    "deepseek_v32": ("DeepseekV32Config", _LATENT | dict(
        num_hidden_layers=3, n_group=4, topk_group=2, indexer_rope_interleave=False, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
}  # fmt: skip

ALL_CONFIGS = CONFIGS | LATENT_CONFIGS


def build_hf_model(family: str, **changes):
    """A model of a family with random weights at which nothing is special (norms, gates and decays off their defaults)."""
    import transformers

    config_class, fields = ALL_CONFIGS[family]
    config = getattr(transformers, config_class)(**fields | changes)
    return randomize(transformers.AutoModelForCausalLM.from_config(config))


def build_multimodal_model():
    """A Qwen3.5 with its vision tower, text part as in `CONFIGS`."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, out_hidden_size=48,
                  num_position_embeddings=16)  # fmt: skip
    ids = dict(image_token_id=90, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)
    config = Qwen3_5Config(text_config=QWEN35_TEXT | {"mtp_num_hidden_layers": 1}, vision_config=vision, **ids)
    return randomize(Qwen3_5ForConditionalGeneration(config))


@torch.no_grad()
def randomize(model, seed: int = 3):
    """Random weights from the seed; the model in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("A_log"):  # transformers draws these from the global random state
            parameter.copy_(noise)
        elif parameter.dim() == 1:
            parameter.add_(0.2 * noise)
        else:
            # The delta rule's readout is normalised, also where it is nearly zero, which makes rounding large on both
            # sides (transformers' own float32 is 1e-5 off its float64): small output weights keep it below the bar.
            # Small latents and index keys show what their norms add to the variance.
            scales = {"out_proj": 0.03, "q_a_proj": 0.003, "kv_a_proj": 0.003, "indexer.wk": 0.003}
            parameter.copy_(noise * next((scale for part, scale in scales.items() if part in name), 0.1))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def draw_tokens(batch: int = 2, length: int = 75, seed: int = 5) -> torch.Tensor:
    """Token ids [B, S]."""
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def hf_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """transformers' logits [B, S, V]."""
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def whole_sequence_logits(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [B, S, padded V] of a conventional Megatron model."""
    mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    return model(tokens, None, mask)


@torch.no_grad()
def chunked_logits(model, tokens: torch.Tensor, chunk: int) -> torch.Tensor:
    """Logits [B, S, padded V] of a stateful model, chunk by chunk through the engine."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    from longstraw.adapters.decoder import output_weight
    from longstraw.segments import Segment
    from longstraw.sweep_config import SweepConfig
    from longstraw.sweeps import ReplayEngine

    engine = ReplayEngine(model, SweepConfig(response_block_size=chunk), vocab_size=VOCABULARY)
    segment = Segment("text", tokens, targets=tokens)  # with targets: a chunk runs to its last hidden state
    state = engine.open_segment(segment, None)
    hidden = torch.cat([engine.run_forward(segment, state, block) for block in range(len(state.plan))])
    logits = hidden.transpose(0, 1) @ output_weight(model).t()
    return gather_from_tensor_model_parallel_region(logits, group=model.pg_collection.tp)


def build_pair(preset, groups, dtype=torch.float32):
    """(stateful, conventional) Megatron models without weights, vocabulary padded to 128 x TP."""
    from megatron.grpo.conversion.build import build_blank_model

    return build_blank_model(preset, groups, dtype=dtype), build_conventional(preset, groups, dtype)


def build_conventional(preset, groups, dtype=torch.float32):
    """The conventional model of `build_pair`."""
    from megatron.grpo.model_provider import build_conventional_model, pad_vocab_size

    config = preset.transformer_config(
        tensor_model_parallel_size=groups.tp.size(), expert_model_parallel_size=groups.ep.size(), params_dtype=dtype,
        perform_initialization=False, use_cpu_initialization=True,
    )  # fmt: skip
    padded = pad_vocab_size(preset.vocab_size, 128, groups.tp.size())
    return build_conventional_model(preset, config, groups, flash=True, padded_vocab_size=padded)


def share_weights(source, target) -> None:
    """Make a model use another's parameters and buffers, by name."""
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(source, kind)())
        for name, tensor in getattr(target, kind)():
            tensor.data = tensors.pop(name).data
        assert not tensors


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a Hugging Face folder, by safetensors alone."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_folder(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    """A Hugging Face folder of one safetensors file."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bits (NaN and -0.0 included)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
