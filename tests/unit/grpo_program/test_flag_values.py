"""Numbers out of range, sizes that contradict each other, flags that do nothing: a sentence each, no traceback."""

import dataclasses

import pytest

from megatron.grpo.arguments import ArgumentErrors, build_parser, parse_arguments
from megatron.grpo.flag_policy import TAKEN
from megatron.grpo.flag_ranges import RANGES
from megatron.grpo.idle_flags import _KINDS, _SWITCHES
from megatron.grpo.presets import PRESETS
from megatron.grpo.presets.sizes import find_bad_sizes
from megatron.grpo.run_config import CONFIG_GROUPS

REQUIRED = "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10"
HUGE = 2**70


def refusals(flags: str) -> list[str]:
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(f"{REQUIRED} {flags}".split())
    return caught.value.sentences


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


OUT_OF_RANGE = {
    "--lr nan": "--lr must be finite, not nan",
    "--lr inf": "--lr must be finite, not inf",
    "--lr=-inf": "--lr must be finite, not -inf",
    "--lr=-1e-3": "--lr must be at least 0, not -0.001",
    "--clip-grad nan": "--clip-grad must be finite, not nan",
    "--clip-grad -1": "--clip-grad must be at least 0, not -1.0",
    "--weight-decay nan": "--weight-decay must be finite, not nan",
    "--weight-decay -0.1": "--weight-decay must be at least 0, not -0.1",
    "--adam-beta1 2": "--adam-beta1 must be in [0, 1), not 2.0",
    "--adam-beta1 1": "--adam-beta1 must be in [0, 1), not 1.0",
    "--adam-beta2 -0.5": "--adam-beta2 must be in [0, 1), not -0.5",
    "--adam-beta2 nan": "--adam-beta2 must be finite, not nan",
    "--adam-eps 0": "--adam-eps must be above 0, not 0.0",
    "--init-method-std nan": "--init-method-std must be finite, not nan",
    "--init-method-std -1": "--init-method-std must be above 0, not -1.0",
    "--init-method-std 0": "--init-method-std must be above 0, not 0.0",
    "--norm-epsilon 0": "--norm-epsilon must be above 0, not 0.0",
    "--lr-warmup-fraction nan": "--lr-warmup-fraction must be finite, not nan",
    "--lr-warmup-fraction 1": "--lr-warmup-fraction must be in [0, 1), not 1.0",
    "--lr-warmup-iters -3": "--lr-warmup-iters must be at least 0, not -3",
    "--reward-weights nan": "--reward-weights must be finite, not nan",
    "--clip-range-high inf": "--clip-range-high must be finite, not inf",
    "--kl-coefficient nan": "--kl-coefficient must be finite, not nan",
    "--reward-timeout inf": "--reward-timeout must be finite, not inf",
    "--lora-rank -1": "--lora-rank must be at least 0, not -1",
    "--lora-rank 4 --lora-alpha 0": "--lora-alpha must be above 0 and finite, not 0.0",
    "--lora-rank 4 --lora-alpha nan": "--lora-alpha must be finite, not nan",
    f"--seed {HUGE}": f"--seed must be between 0 and 2^63 - 1, not {HUGE}",
    "--seed -1": "--seed must be between 0 and 2^63 - 1, not -1",
    "--ckpt-step -1": "--ckpt-step must be at least 0, not -1",
    "--distributed-timeout-minutes 0": "--distributed-timeout-minutes must be between 1 and 527040, a year, not 0",
    f"--distributed-timeout-minutes {HUGE}": f"a year, not {HUGE}",
    "--make-vocab-size-divisible-by 0": "--make-vocab-size-divisible-by must be at least 1, not 0",
    "--hidden-size -8": "--hidden-size must be at least 1, not -8",
    "--num-layers 0": "--num-layers must be at least 1, not 0",
    "--num-attention-heads 0": "--num-attention-heads must be at least 1, not 0",
    "--num-query-groups 0": "--num-query-groups must be at least 1, not 0",
    "--kv-channels 0": "--kv-channels must be at least 1, not 0",
    "--linear-conv-kernel-dim 0": "--linear-conv-kernel-dim must be at least 1, not 0",
    "--linear-num-key-heads 0": "--linear-num-key-heads must be at least 1, not 0",
    "--linear-attention-freq 0": "--linear-attention-freq must be at least 1, not 0",
    "--rotary-base 0": "--rotary-base must be at least 1, not 0",
    "--rotary-percent 2": "--rotary-percent must be in (0, 1], not 2.0",
    "--rotary-percent 0": "--rotary-percent must be in (0, 1], not 0.0",
    "--model-preset tiny-glm5.2 --kv-lora-rank 0": "--kv-lora-rank must be at least 1, not 0",
    "--model-preset tiny-glm5.2 --num-experts 0": "--num-experts must be at least 1, not 0",
    "--model-preset tiny-glm5.2 --moe-layer-freq 0": "--moe-layer-freq must be at least 1, not 0",
}
CONTRADICTING = {
    "--num-query-groups 3": "--num-query-groups 3 does not divide --num-attention-heads 4",
    "--kv-channels 7": "--kv-channels 7 x --rotary-percent 0.25 leaves 1 channels to rotary angles",
    "--kv-channels 12": "--kv-channels 12 x --rotary-percent 0.25 leaves 3 channels",
    "--model-preset tiny-llama --kv-channels 7": "--kv-channels 7 x --rotary-percent 1.0 leaves 7 channels",
    "--model-preset tiny-glm5.2 --qk-pos-emb-head-dim 7": "--qk-pos-emb-head-dim 7 x --rotary-percent 1.0",
    "--linear-num-value-heads 3": "--linear-num-key-heads 4 does not divide --linear-num-value-heads 3",
    "--linear-attention-freq [1,0]": "--linear-attention-freq names 2 layers, but --num-layers is 4",
    "--linear-attention-freq [1,2,1,0]": "--linear-attention-freq [1, 2, 1, 0] holds something other than 0 and 1",
    "--linear-attention-freq [": "neither a number nor a list of 0 and 1",
    "--linear-attention-freq [1]*(": "neither a number nor a list of 0 and 1",
    "--linear-attention-freq often": "neither a number nor a list of 0 and 1",
    "--model-preset tiny-glm5.2 --moe-layer-freq [": "neither a number nor a list of 0 and 1",
    "--model-preset tiny-glm5.2 --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 1 --lora-rank 4":
        "--lora-rank 4 freezes the indexer, which --dsa-indexer-loss-coeff 1.0 would train",
    "--model-preset tiny-glm5.2 --moe-router-num-groups 4": "need each other",
    "--model-preset tiny-glm5.2 --moe-router-group-topk 2": "need each other",
}
IDLE = {
    "--model-preset tiny-llama --linear-conv-kernel-dim 4": "tiny-llama has no gated delta net layers",
    "--model-preset tiny-llama --linear-attention-freq 4": "tiny-llama has no gated delta net layers",
    "--q-lora-rank 8": "--q-lora-rank 8: --model-preset tiny-qwen3.6 has no latent attention",
    "--v-head-dim 8": "has no latent attention",
    "--dsa-indexer-topk 4": "has no sparse attention",
    "--index-page-residency host": "has no sparse attention",
    "--selection-residency host": "has no sparse attention",
    "--moe-router-topk 2": "has no experts",
    "--moe-router-dtype fp64": "has no experts",
    "--model-preset tiny-llama --apply-wd-to-qk-layernorm": "has no norms of queries and keys",
    "--recompute-modules mlp": "--recompute-modules mlp is read only with --recompute-granularity selective",
    "--finetune": "--finetune is read only with --load or --pretrained-checkpoint",
    "--no-load-optim": "--no-load-optim is read only with --load or --pretrained-checkpoint",
    "--no-load-rng": "--no-load-rng is read only with --load or --pretrained-checkpoint",
    "--override-opt-param-scheduler": "is read only with --load",
    "--use-checkpoint-opt-param-scheduler": "is read only with --load",
    "--no-save-optim": "--no-save-optim is read only with --save",
    "--no-save-rng": "--no-save-rng is read only with --save",
    "--save-retain-interval 2": "--save-retain-interval 2 is read only with --save",
    "--kl-estimator k2": "--kl-estimator k2 is read only with --kl-coefficient above 0",
    "--kl-estimator k2 --kl-coefficient 0": "--kl-estimator k2 is read only with --kl-coefficient above 0",
    "--group-filter-retries 2": "is read only with --group-filter drop_uniform",
    "--eval-interval 2": "--eval-interval 2 is read only with --eval-data",
    "--eval-samples 64": "--eval-samples 64 is read only with --eval-data",  # the default, and given
    "--lr-wsd-decay-iters 2": "is read only with --lr-decay-style WSD",
    "--min-lr 1e-9": "is read only with an --lr-decay-style other than constant",
    "--lr-decay-iters 5": "is read only with an --lr-decay-style other than constant",
    "--lr-warmup-init 1e-9": "is read only with --lr-warmup-iters or --lr-warmup-fraction",
    "--lora-alpha 8": "--lora-alpha 8.0 is read only with --lora-rank above 0",
    "--lora-rank 4 --decoupled-lr 1e-3": "--decoupled-lr 0.001 is read only with --lora-rank 0, since LoRA freezes",
    "--lora-rank 4 --apply-wd-to-qk-layernorm": "is read only with --lora-rank 0, since LoRA freezes",
    "--decoupled-min-lr 1e-9": "is read only with --decoupled-lr",
    "--dsa-indexer-use-sparse-loss": "read only with --dsa-indexer-loss-coeff above 0",
    "--model-preset tiny-glm5.2 --dsa-indexer-use-sparse-loss": "read only with --dsa-indexer-loss-coeff above 0",
    "--wandb-entity e": "is read only with --wandb-project",
    "--reward-baseline-decay 0.9": "is read only with --advantage-estimator running_mean",
}


@pytest.mark.parametrize("flags", OUT_OF_RANGE | CONTRADICTING | IDLE)
def test_refused_in_one_sentence(flags):
    sentences = refusals(flags)
    assert len(sentences) == 1 and (OUT_OF_RANGE | CONTRADICTING | IDLE)[flags] in sentences[0], sentences
    assert "\n" not in sentences[0] and flags.split("--")[-1].replace("=", " ").split()[0] in sentences[0]


def test_each_wrong_flag_has_its_own_sentence():
    sentences = refusals("--lr nan --clip-grad nan --kv-channels 7 --no-save-optim --fp16 --group-size 1")
    assert len(sentences) == 6, sentences


@pytest.mark.parametrize(
    "flags",
    [
        "--lr 0 --clip-grad 0 --weight-decay 0 --adam-beta1 0 --seed 0 --rotary-percent 1 --lr-warmup-iters 0",
        f"--seed {2**63 - 1} --kv-channels 8 --linear-num-value-heads 4 --num-query-groups 1",
        "--linear-attention-freq [1]*3+[0] --recompute-granularity selective --recompute-modules mlp",
        "--load there --finetune --no-load-optim --no-load-rng --ckpt-step 0",
        "--pretrained-checkpoint there --finetune",
        "--save there --save-interval 2 --save-retain-interval 4 --no-save-optim --no-save-rng",
        "--eval-data held.jsonl --eval-interval 2 --kl-coefficient 0.1 --kl-estimator k2",
        "--lr-decay-style cosine --min-lr 1e-9 --lr-decay-iters 5 --lr-warmup-iters 2 --lr-warmup-init 1e-9",
        "--lr-warmup-fraction 0.5 --lr-decay-iters 5",
        "--model-preset tiny-glm5.2 --moe-router-topk 2 --dsa-indexer-topk 4 --q-lora-rank 16",
        "--model-preset tiny-glm5.2 --selection-residency host --index-page-residency host",
    ],
)
def test_what_is_read_is_taken(flags):
    parse_arguments(f"{REQUIRED} {flags}".split())


def test_a_run_that_names_no_interval_saves_at_its_end():
    args, _ = parse_arguments(f"{REQUIRED} --save there".split())
    assert args.save_interval == args.train_iters == 10


def test_the_tables_name_flags_that_exist():
    ours = {field.name for config_class, _ in CONFIG_GROUPS.values() for field in dataclasses.fields(config_class)}
    known = TAKEN | ours
    names = [name for each in RANGES for name in each.names.split()]
    assert set(names) <= known and len(names) == len(set(names)), set(names) - known
    for table in (_KINDS, _SWITCHES):
        first = [entry[1] if table is _KINDS else entry[0] for entry in table]
        assert {name for names in first for name in names.split() if not name.endswith("*")} <= known


def test_every_float_that_is_taken_has_a_range():
    in_table = {name for each in RANGES for name in each.names.split()}
    floats = {action.dest for action in build_parser("tiny-qwen3.6")._actions if action.type is float}
    assert floats & TAKEN <= in_table, floats & TAKEN - in_table


def test_no_preset_contradicts_itself():
    assert all(find_bad_sizes(preset) == [] for preset in PRESETS.values())
