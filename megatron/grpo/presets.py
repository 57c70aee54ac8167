"""Model presets: the architecture of each supported model as one frozen record.

A preset speaks two languages: `transformer_config` gives megatron-core's TransformerConfig (tools build from it), and
`megatron_arguments` gives the same architecture as defaults of Megatron's command-line flags (the training program
parses over them, so that an explicit flag wins). A test holds the two together.

Left out: parallel sizes, precision and training settings, which are the launch's, not the model's.
"""

from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """One architecture. Sizes in elements; heads and layers in counts."""

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    rotary_base: int = 10_000
    rotary_percent: float = 1.0
    layernorm_epsilon: float = 1e-6
    init_method_std: float = 0.02
    qk_layernorm: bool = False
    zero_centered_norm: bool = False
    tied_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_gate: bool = False
    linear_attention_freq: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_conv_kernel_dim: int | None = None

    @property
    def hybrid(self) -> bool:
        """Whether the model has gated delta net layers."""
        return self.linear_attention_freq is not None

    def model_fields(self) -> dict:
        """The fields that TransformerConfig and Megatron's flags call by the same name."""
        shared = {
            name: getattr(self, name)
            for name in (
                "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
                "qk_layernorm", "attention_output_gate", "init_method_std",
            )
        }
        if self.hybrid:
            shared["experimental_attention_variant"] = "gated_delta_net"
            shared |= {name: value for name, value in asdict(self).items() if name.startswith("linear_")}
        return shared

    def transformer_config(self, **parallel_and_precision):
        """megatron-core's TransformerConfig of this model.

        parallel_and_precision: e.g. tensor_model_parallel_size, context_parallel_size, sequence_parallel, bf16.
        """
        import torch
        from megatron.core.transformer.transformer_config import TransformerConfig

        fields = self.model_fields() | dict(
            normalization="RMSNorm",
            layernorm_epsilon=self.layernorm_epsilon,
            layernorm_zero_centered_gamma=self.zero_centered_norm,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            deterministic_mode=self.hybrid,
            calculate_per_token_loss=True,
        )
        return TransformerConfig(**fields | parallel_and_precision)

    def megatron_arguments(self) -> dict:
        """The same architecture as defaults of Megatron's flags (argparse destinations)."""
        return self.model_fields() | dict(
            group_query_attention=self.num_query_groups != self.num_attention_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_position_embeddings,
            seq_length=self.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=self.rotary_base,
            rotary_percent=self.rotary_percent,
            normalization="RMSNorm",
            layernorm_epsilon=self.layernorm_epsilon,
            layernorm_zero_centered_gamma=self.zero_centered_norm,
            swiglu=True,
            add_bias_linear=False,
            add_qkv_bias=self.qkv_bias,
            untie_embeddings_and_output_weights=not self.tied_embeddings,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
        )


_TINY_QWEN36 = ModelPreset(
    name="tiny-qwen3.6",
    num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=32,
    vocab_size=128, max_position_embeddings=65_536, rotary_base=10_000_000, rotary_percent=0.25, qk_layernorm=True,
    zero_centered_norm=True, attention_output_gate=True, init_method_std=0.1,
    linear_attention_freq=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=4,
    linear_num_value_heads=8, linear_conv_kernel_dim=4,
)

_LLAMA = dict(kv_channels=64, layernorm_epsilon=1e-5, tied_embeddings=True)

PRESETS: dict[str, ModelPreset] = {
    preset.name: preset
    for preset in (
        _TINY_QWEN36,
        replace(_TINY_QWEN36, name="tiny-qwen3.6-8layer", num_layers=8),
        ModelPreset(
            name="qwen3.6-27b",
            num_layers=64, hidden_size=5120, ffn_hidden_size=17_408, num_attention_heads=24, num_query_groups=4,
            kv_channels=256, vocab_size=248_320, max_position_embeddings=4_456_448, rotary_base=10_000_000,
            rotary_percent=0.25, qk_layernorm=True, zero_centered_norm=True, attention_output_gate=True,
            linear_attention_freq=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
            linear_num_value_heads=48, linear_conv_kernel_dim=4,
        ),
        ModelPreset(
            name="tiny-llama",
            num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2,
            vocab_size=128, max_position_embeddings=65_536, **(_LLAMA | dict(kv_channels=32)),
        ),
        ModelPreset(
            name="tiny-qwen3",
            num_layers=4, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2, kv_channels=32,
            vocab_size=128, max_position_embeddings=65_536, rotary_base=1_000_000, qk_layernorm=True,
        ),
        ModelPreset(
            name="smollm2-135m",
            num_layers=30, hidden_size=576, ffn_hidden_size=1536, num_attention_heads=9, num_query_groups=3,
            vocab_size=49_152, max_position_embeddings=8_192, rotary_base=100_000, **_LLAMA,
        ),
    )
}


def get_preset(name: str) -> ModelPreset:
    """The preset of that name. Raises ValueError that lists the known ones."""
    if name not in PRESETS:
        raise ValueError(f"--model-preset {name} is not known; known are {', '.join(PRESETS)}")
    return PRESETS[name]


def check_divisible(preset: ModelPreset, sizes) -> None:
    """Raise ValueError, naming the flags, where a parallel size does not divide the model's heads.

    sizes: anything with Megatron's `tensor_model_parallel_size` and `context_parallel_size`.
    """
    tp, cp = sizes.tensor_model_parallel_size, sizes.context_parallel_size
    if preset.num_attention_heads % tp or preset.num_query_groups % tp:
        raise ValueError(
            f"--tensor-model-parallel-size {tp} does not divide the {preset.num_attention_heads} query heads and "
            f"{preset.num_query_groups} key/value heads of --model-preset {preset.name}"
        )
    if preset.hybrid and preset.linear_num_key_heads % (tp * cp):
        raise ValueError(
            f"--tensor-model-parallel-size {tp} x --context-parallel-size {cp} does not divide the "
            f"{preset.linear_num_key_heads} gated delta net key heads of --model-preset {preset.name}"
        )
