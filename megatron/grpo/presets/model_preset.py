"""One architecture as a frozen record that speaks two languages.

`transformer_config` gives megatron-core's TransformerConfig (tools build from it), and `megatron_arguments` gives the same
architecture as defaults of Megatron's command-line flags (the training program parses over them, so that an explicit
flag wins). A test holds the two together. Fields have Megatron's names, so that each flag has its field.
"""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """One architecture. Sizes in elements; heads, layers and experts in counts.

    Full attention with `linear_*` set: gated delta net layers between. `multi_latent_attention`: latent attention with
    the sparse selection of the `dsa_*` fields. `num_experts`: mixture-of-experts layers where `moe_layer_freq` says.
    """

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

    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_head_dim: int | None = None
    qk_pos_emb_head_dim: int | None = None
    v_head_dim: int | None = None
    latent_norm_epsilon: float | None = None
    """Of the norms on the query and key/value latents; Megatron has no flag for it."""

    dsa_indexer_n_heads: int | None = None
    dsa_indexer_head_dim: int | None = None
    dsa_indexer_topk: int | None = None
    dsa_indexer_topk_freq: int = 1
    """One layer in this many selects; the layers between use its selection (1: every layer selects)."""
    dsa_indexer_skip_topk_offset: int = 0
    """Layers up to this number all select."""
    dsa_indexer_rope_interleaved: bool = False
    dsa_indexer_k_norm_epsilon: float | None = None

    num_experts: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    """An experts layer every N layers, or 1 (experts) and 0 (dense) for each layer."""
    moe_ffn_hidden_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_router_topk: int = 2
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None

    def __post_init__(self):
        if isinstance(self.moe_layer_freq, list):  # as Megatron's parser gives it; a record has to be hashable
            object.__setattr__(self, "moe_layer_freq", tuple(self.moe_layer_freq))

    @property
    def hybrid(self) -> bool:
        """Whether the model has gated delta net layers."""
        return self.linear_attention_freq is not None

    @property
    def sparse(self) -> bool:
        """Whether attention reads the positions that an indexer selects."""
        return self.dsa_indexer_topk is not None

    @property
    def has_experts(self) -> bool:
        """Whether the model has mixture-of-experts layers."""
        return self.num_experts is not None

    def _fields_like(self, prefix: str) -> dict:
        return {name: value for name, value in asdict(self).items() if name.startswith(prefix)}

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
            shared |= dict(experimental_attention_variant="gated_delta_net", **self._fields_like("linear_"))
        if self.multi_latent_attention:
            shared |= {
                name: getattr(self, name)
                for name in (
                    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
                    "v_head_dim",
                )
            }
            # The pre-training stretch of YaRN is not part of these models: plain rotary angles.
            shared |= dict(rope_type="rope", rotary_scaling_factor=1.0)
        if self.sparse:
            # The Hadamard rotation of the indexer serves fp8 alone (a rotation leaves scores as they are); the
            # indexer's own loss is not part of GRPO's.
            shared |= dict(
                experimental_attention_variant="dsa", dsa_kernel_backend="none", dsa_indexer_loss_coeff=0.0,
                dsa_indexer_rotate_activation=False, dsa_indexer_scoring_relu=True, **self._fields_like("dsa_"),
            )
        if self.has_experts:
            shared |= self._fields_like("moe_") | dict(
                moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", moe_router_dtype="fp32",
            )
            if not isinstance(self.moe_layer_freq, int):
                shared["moe_layer_freq"] = list(self.moe_layer_freq)
        return shared

    def transformer_config(self, **parallel_and_precision):
        """megatron-core's TransformerConfig of this model (MLATransformerConfig with multi-latent attention).

        parallel_and_precision: e.g. tensor_model_parallel_size, context_parallel_size, sequence_parallel, bf16.
        """
        import torch
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

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
            num_moe_experts=self.num_experts,
        )
        if self.sparse:
            fields["cp_comm_type"] = "allgather"  # Megatron wants its own way named; ours takes its place
        if not self.multi_latent_attention:
            return TransformerConfig(**fields | parallel_and_precision)
        fields |= dict(rotary_base=self.rotary_base, rotary_percent=self.rotary_percent)
        return MLATransformerConfig(**fields | parallel_and_precision)

    def megatron_arguments(self) -> dict:
        """The same architecture as defaults of Megatron's flags (argparse destinations)."""
        return self.model_fields() | ({"cp_comm_type": ["allgather"]} if self.sparse else {}) | dict(
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
            num_experts=self.num_experts,
        )
