"""The command line: what it gives, what wins, and what is refused in one sentence."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.grpo.arguments import ArgumentErrors, build_parser, parse_arguments, parse_command_line, resolve_preset
from megatron.grpo.flag_policy import TAKEN, WORKING_VALUES, explain
from megatron.grpo.model_setup import transformer_config
from megatron.grpo.presets import PRESETS, get_preset
from megatron.grpo.run_config import CONFIG_GROUPS, TrainConfig

REQUIRED = "--model-preset tiny-qwen3.6 --prompt-data data.jsonl --tokenizer-path tok --train-iters 10"


def parse(flags: str = ""):
    return parse_arguments(f"{REQUIRED} {flags}".split())


def refusals(flags: str, required: str = REQUIRED) -> list[str]:
    with pytest.raises(ArgumentErrors) as caught:
        parse_arguments(f"{required} {flags}".split())
    assert all(sentence and "\n" not in sentence for sentence in caught.value.sentences)
    return caught.value.sentences


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ranks(monkeypatch):
    """Sets the number of ranks that torchrun would tell of."""
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


def test_a_minimal_command_line():
    args, config = parse()
    assert isinstance(config, TrainConfig)
    assert config.data.prompt_data == "data.jsonl" and config.objective.group_size == 8
    assert (args.train_iters, args.lr, args.lr_decay_style) == (10, 1e-6, "constant")
    assert (args.micro_batch_size, args.calculate_per_token_loss, args.world_size) == (1, True, 1)
    assert args.output_dir == "runs/tiny-qwen3.6" and args.tensorboard_dir == "runs/tiny-qwen3.6/tensorboard"


def test_every_field_of_ours_is_a_flag_and_comes_back():
    flags = (
        "--output-dir out --eval-samples 3 --responses-per-replay 2 --mask-truncated --weights-checksum run --kl-coefficient 0.1 "
        "--reference-checkpoint ref "
        "--eval-data held.jsonl --prompt-column q --answer-column a --prompt-length-limit 100 --apply-chat-template "
        "--prompts-per-step 4 --no-shuffle-prompts --prompt-order-seed 5 --sampling-temperature 0.5 --sampling-top-p 0.9 "
        "--sampling-top-k 7 --max-response-length 32 --reward exact_match math_verify --reward-weights 1 0.5 "
        "--reward-timeout 3 --reward-workers 2 --reward-failure stop --group-size 4 --advantage-estimator leave_one_out "
        "--no-advantage-std-normalization --clip-range-low 0.1 --clip-range-high 0.3 --importance-level sequence "
        "--loss-aggregation group_constant --loss-constant 32 --kl-estimator k2 --group-filter drop_uniform "
        "--group-filter-retries 1 --logprob-chunk-tokens 64 --rollout-is sequence --rollout-is-cap 3 --rollout-mask-above 0.1 "
        "--semantics response_only --prompt-chunk-size 256 "
        "--response-block-size 128 --page-residency host --adjoint-residency host --attention-output-residency host "
        "--index-page-residency host --selection-residency host --query-rows-at-once 99 --attention-exchange keys "
        "--model-preset tiny-glm5.2"  # index pages and selections are sparse attention's
    )
    _, config = parse(flags)
    # the first excludes --semantics response_only, the second needs gated delta nets
    _, live = parse("--live-chunks 2 --recurrent-state-residency host")
    _, adapted = parse("--lora-rank 4 --lora-alpha 8")  # excludes --optimizer logra, and with it its group
    _, alone = parse("--group-size 1 --advantage-estimator running_mean --no-advantage-std-normalization "
                     "--reward-baseline-decay 0.9")  # excludes --group-filter
    assert alone.objective.group_size == 1 and alone.objective.advantage_estimator == "running_mean"
    _, sampled = parse("--rollout-engine vllm --rollout-server ready.json --rollout-store rollouts --rollout-only "
                       "--rollout-steps 2")
    _, stored = parse("--rollouts-from rollouts --rollout-router-replay --model-preset tiny-glm5.2")  # exclude sampling
    _, synced = parse("--optimizer logra --weight-sync delta --weight-sync-dir weights --weight-sync-full-interval 3 "
                      "--weight-sync-keep 4 --weight-sync-only --load there")
    _, default = parse()
    for name, (config_class, _) in CONFIG_GROUPS.items():
        if name == "logra":  # excludes LoRA: test_logra_flags.py
            continue
        plain = getattr(default, name)
        for field in dataclasses.fields(config_class):
            others = {"reward_baseline_decay": alone, "rollouts_from": stored, "rollout_router_replay": stored, "live_chunks": live, "recurrent_state_residency": live}
            given = getattr({"lora": adapted, "rollouts": sampled, "weight_sync": synced}.get(name, config), name)
            given = getattr(others[field.name], name) if field.name in others else given
            if field.name not in ("model_preset", "prompt_data", "tokenizer_path"):
                assert getattr(given, field.name) != getattr(plain, field.name), field.name
    assert config.rewards.reward == ["exact_match", "math_verify"] and config.rewards.reward_weights == [1.0, 0.5]
    assert config.data.shuffle_prompts is False and config.run.output_folder == "out"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_flags_and_the_flags_give_the_preset(name):
    args, _ = parse_arguments(f"{REQUIRED} --model-preset {name}".split())
    preset = get_preset(name)
    assert resolve_preset(args) == preset
    found, wanted = transformer_config(args), preset.transformer_config()
    # These follow from the launch, or are read by neither the modules nor the engine.
    launch = {
        "use_cpu_initialization", "pipeline_dtype", "deallocate_pipeline_outputs", "cp_comm_type",
        "inference_sampling_seed", "attention_softmax_in_fp32", "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards", "init_method", "output_layer_init_method", "embedding_init_method",
    }
    different = {
        field.name: (getattr(found, field.name), getattr(wanted, field.name))
        for field in dataclasses.fields(found)
        if field.name not in launch and getattr(found, field.name) != getattr(wanted, field.name)
    }
    assert not different


def test_an_explicit_flag_wins_over_the_preset():
    args, _ = parse("--num-layers 8 --rotary-base 500 --vocab-size 200 --lr-decay-style cosine --num-query-groups 4")
    preset = resolve_preset(args)
    assert (preset.num_layers, preset.rotary_base, preset.vocab_size, preset.hidden_size) == (8, 500, 200, 128)
    assert args.padded_vocab_size == 256 and args.lr_decay_style == "cosine"
    assert preset.num_query_groups == 4 and transformer_config(args).num_query_groups == 4


def test_the_embedding_has_the_same_rows_at_every_tensor_parallel_size(ranks):
    ranks(2)
    one, _ = parse("--vocab-size 101 --context-parallel-size 2")
    two, _ = parse("--vocab-size 101 --tensor-model-parallel-size 2")
    assert one.padded_vocab_size == two.padded_vocab_size == 128
    assert refusals("--vocab-size 101 --make-vocab-size-divisible-by 1 --tensor-model-parallel-size 2") == [
        "--tensor-model-parallel-size 2 does not divide the padded vocabulary of 101 rows: set "
        "--make-vocab-size-divisible-by to a multiple of it"
    ]


REFUSED = {
    "--pipeline-model-parallel-size 2": "pipeline parallelism",
    "--num-layers-per-virtual-pipeline-stage 1": "no pipeline",
    "--num-virtual-stages-per-pipeline-rank 2": "no pipeline",
    "--hidden-dropout 0.1": "dropout must be 0",
    "--attention-dropout 0.1": "dropout must be 0",
    "--overlap-grad-reduce": "reduce a bucket too early",
    "--overlap-param-gather": "--overlap-grad-reduce",
    "--recompute-granularity full": "--recompute-modules mlp",
    "--recompute-granularity selective": "--recompute-modules mlp",
    "--recompute-granularity selective --recompute-modules core_attn": "--recompute-modules mlp",
    "--recompute-activations": "--recompute-modules mlp",
    "--num-experts 4": "a --model-preset with experts",
    "--model-preset tiny-glm5.2 --moe-grouped-gemm": "--transformer-impl transformer_engine",
    "--expert-model-parallel-size 2": "does not divide the 1 ranks",
    "--expert-model-parallel-size 0": "at least 1",
    "--expert-tensor-parallel-size 2": "--expert-model-parallel-size",
    "--multi-latent-attention": "--model-preset",
    "--model-preset tiny-glm5.2 --moe-router-fusion": "anew",
    "--model-preset tiny-glm5.2 --moe-router-load-balancing-type sinkhorn": "sinkhorn",
    "--model-preset tiny-glm5.2 --moe-router-load-balancing-type quantile_balancing": "quantile",
    "--model-preset tiny-glm5.2 --moe-router-load-balancing-type aux_loss": "no part of GRPO's loss",
    "--model-preset tiny-glm5.2 --moe-aux-loss-coeff 0.01": "no part of GRPO's loss",
    "--model-preset tiny-glm5.2 --moe-z-loss-coeff 0.001": "no part of GRPO's loss",
    "--model-preset tiny-glm5.2 --moe-expert-capacity-factor 1.5": "dropped tokens",
    "--model-preset tiny-glm5.2 --moe-pad-expert-input-to-capacity": "dropped tokens",
    "--model-preset tiny-glm5.2 --moe-token-drop-policy position": "dropped tokens",
    "--model-preset tiny-glm5.2 --moe-layer-recompute": "--recompute-modules mlp",
    "--model-preset tiny-glm5.2 --recompute-granularity selective --recompute-modules moe": "--recompute-modules mlp",
    "--model-preset tiny-glm5.2 --moe-enable-routing-replay": "always recorded",
    "--model-preset tiny-glm5.2 --moe-router-bias-update-rate 0.1": "frozen",
    "--model-preset tiny-glm5.2 --moe-token-dispatcher-type allgather": "all-to-all",
    "--model-preset tiny-glm5.2 --moe-input-jitter-eps 0.1": "other noise",
    "--model-preset tiny-glm5.2 --moe-permute-fusion": "setting of experts",
    "--model-preset tiny-glm5.2 --dsa-indexer-loss-coeff 0.1": "--dsa-indexer-use-sparse-loss",
    "--model-preset tiny-glm5.2 --dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff -1": "at least 0",
    "--dsa-indexer-use-sparse-loss --dsa-indexer-loss-coeff 0.1": "sparse attention, unlike",
    "--model-preset tiny-glm5.2 --dsa-kernel-backend tilelang": "setting of sparse attention",
    "--model-preset tiny-glm5.2 --rope-type yarn": "--model-preset",
    "--model-preset tiny-glm5.2 --num-layers 6": "--moe-layer-freq names 8 layers",
    "--model-preset tiny-glm5.2 --moe-router-topk 20": "--num-experts 16",
    "--experimental-attention-variant dsa": "--experimental-attention-variant",
    "--mtp-num-layers 1": "multi-token prediction",
    "--fp16": "--bf16",
    "--loss-scale 2": "not scaled",
    "--grad-reduce-in-bf16 --bf16": "float32",
    "--ddp-bucket-size -1": "in one bucket",
    "--ddp-num-buckets 2": "in one bucket",
    "--use-distributed-optimizer": "needs a GPU",
    "--transformer-impl transformer_engine": "needs a GPU",
    "--transformer-impl inference_optimized": "--transformer-impl local",
    "--distributed-backend nccl": "needs a GPU",
    "--position-embedding-type yarn": "--position-embedding-type rope",
    "--normalization LayerNorm": "--normalization RMSNorm",
    "--rl-use-sequence-packing": "Megatron's own RL loop",
    "--max-seqlen-per-dp-cp-rank 8": "does not read",
    "--cuda-graph-impl local": "CUDA graphs",
    "--enable-cuda-graph": "CUDA graphs",
    "--fp8-format hybrid": "fp8",
    "--fp4-format e2m1": "fp4",
    "--use-megatron-fsdp": "fully sharded",
    "--use-torch-fsdp2": "fully sharded",
    "--cp-comm-type a2a": "its own way",
    "--hierarchical-context-parallel-sizes 2 2": "one level",
    "--hybrid-context-parallel": "contiguous chunks",
    "--micro-batch-size 2": "--responses-per-replay",
    "--global-batch-size 16": "--prompts-per-step times --group-size",
    "--rampup-batch-size 1 1 8": "--prompts-per-step times --group-size",
    "--train-samples 100": "--train-iters",
    "--data-path corpus": "--prompt-data",
    "--valid-data-path corpus": "--eval-data",
    "--mock-data": "--prompt-data",
    "--seq-length 4096": "--max-response-length",
    "--eval-iters 7": "--eval-samples",
    "--tokenizer-type HuggingFaceTokenizer": "--tokenizer-path",
    "--grpo-group-size 16": "Megatron's own RL loop",
    "--grpo-kl-beta 0.1": "Megatron's own RL loop",
    "--rl-default-temperature 0.5": "Megatron's own RL loop",
    "--perform-rl-step": "RL",
    "--yaml-cfg run.yaml": "YAML",
    "--async-save": "synchronously",
    "--ckpt-format torch": "torch_dist",
    "--use-checkpoint-args": "--model-preset",
    "--window-size 8,0": "sliding windows",
    "--rotary-interleaved": "halves of a head",
    "--use-rope-scaling": "not rescaled",
    "--optimizer sgd": "--optimizer adam",
    "--data-parallel-random-init": "same weights",
    "--freeze-all-layers": "nothing to train",
    "--batch-size 3": "does not read",
    "--save ckpt --save-interval 0": "--save-interval",
    "--save-interval 2": "--save",
    "--save ckpt --save-interval 2 --save-retain-interval 3": "multiple of --save-interval",
    "--ckpt-step 3": "--load",
    "--exit-on-missing-checkpoint": "--load",
    "--lr 1e-3 --min-lr 1e-2 --lr-decay-style cosine": "--min-lr",
    "--lr 1e-3 --lr-warmup-init 1e-2 --lr-warmup-iters 2": "--lr-warmup-init",
    "--lr-warmup-iters 10": "must be below --lr-decay-iters 10",
    "--lr-warmup-iters 2 --lr-warmup-fraction 0.1": "exclude each other",
    "--lr-warmup-fraction 1": "--lr-warmup-fraction",
    "--lr-decay-style WSD": "--lr-wsd-decay-iters",
    "--weight-decay-incr-style linear": "--start-weight-decay",
    "--start-weight-decay 0.1": "--weight-decay-incr-style",
    "--clip-grad -1": "--clip-grad",
    "--eval-data e --eval-interval 0": "--eval-interval",
    "--train-iters 0": "--train-iters",
    "--wandb-project p": "--wandb-exp-name",
    "--sequence-parallel": "--tensor-model-parallel-size above 1",
    "--context-parallel-size 2": "does not divide the 1 ranks",
    "--context-parallel-size 0": "at least 1",
    "--prompt-length-limit 65530 --max-response-length 8": "--max-position-embeddings 65536",
    "--sampling-temperature 0": "--sampling-temperature",
    "--responses-per-replay 9": "--group-size 8",
    "--reference-checkpoint there": "--kl-coefficient",
    "--group-size 1": "--group-size 1 leaves --advantage-estimator group no other response",
    "--group-size 0": "--group-size must be at least 1",
    "--advantage-estimator running_mean": "running_mean is not divided by a standard deviation",
    "--advantage-estimator running_mean --no-advantage-std-normalization --group-filter drop_uniform":
        "--group-filter drop_uniform drops groups",
    "--eval-data e --eval-samples 0": "--eval-samples",
    "--prompt-chunk-size 0": "--prompt-chunk-size",
    "--not-a-flag": "unrecognized arguments",
    "--lr fast": "--lr",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_refused_in_one_sentence_that_says_why(flags):
    sentences = refusals(flags)
    assert len(sentences) == 1 and REFUSED[flags] in sentences[0], sentences


def test_wandb_has_to_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refusals("--wandb-project p --wandb-exp-name e") == [
        "--wandb-project needs the wandb package: pip install wandb"
    ]


@pytest.mark.parametrize(
    ("ranks_there", "flags", "fragment"),
    [
        (3, "--context-parallel-size 3", "4 gated delta net key heads"),
        (8, "--context-parallel-size 4 --tensor-model-parallel-size 2", "4 gated delta net key heads"),
        (4, "--tensor-model-parallel-size 4", "2 key/value heads"),
        (2, "--tensor-model-parallel-size 2 --ffn-hidden-size 255", "--ffn-hidden-size 255"),
    ],
)
def test_parallel_sizes_that_do_not_divide_the_model(ranks, ranks_there, flags, fragment):
    ranks(ranks_there)
    sentences = refusals(flags)
    assert len(sentences) == 1 and fragment in sentences[0] and "parallel-size" in sentences[0], sentences


def test_everything_wrong_is_said_at_once():
    sentences = refusals("--pipeline-model-parallel-size 2 --fp16 --group-size 1 --optimizer sgd --ckpt-step 1")
    assert len(sentences) == 5


def test_required_flags_are_asked_for():
    assert "--model-preset is required" in refusals("", "--prompt-data d --tokenizer-path t --train-iters 1")[0]
    assert "known are" in refusals("", "--model-preset gpt-5")[0]
    assert "--prompt-data is required" in refusals("", "--model-preset tiny-llama --train-iters 1 --tokenizer-path t")[0]
    assert "--train-iters is required" in refusals("", "--model-preset tiny-llama --prompt-data d --tokenizer-path t")[0]


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 1 --micro-batch-size 1 --calculate-per-token-loss --attention-dropout 0.0",
        "--no-gradient-accumulation-fusion --no-rope-fusion --no-masked-softmax-fusion --eval-iters 100",
        "--recompute-granularity selective --recompute-modules mlp --deterministic-mode",
        "--bf16 --accumulate-allreduce-grads-in-fp32 --seed 3 --weight-decay 0.1",
    ],
)
def test_repeating_what_is_in_force_is_harmless(flags, monkeypatch):
    import torch

    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)
    parse(flags)


def test_every_megatron_flag_is_taken_hidden_or_explained():
    parser = build_parser("tiny-qwen3.6")
    ours = {field.name for config_class, _ in CONFIG_GROUPS.values() for field in dataclasses.fields(config_class)}
    megatrons = {action.dest for action in parser._actions} - ours - {"help"}
    assert TAKEN <= megatrons, TAKEN - megatrons
    assert set(WORKING_VALUES) <= megatrons
    assert all(explain(name) for name in megatrons - TAKEN)


def test_help_starts_with_our_groups_and_hides_what_is_refused():
    text = build_parser("tiny-qwen3.6").format_help()
    titles = [title for _, title in CONFIG_GROUPS.values()]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places) and places[-1] < text.index("--tensor-model-parallel-size TENSOR")
    for hidden in ("--moe-router-fusion", "--moe-aux", "--rl-", "--grpo-", "--fp16", "--micro-batch-size"):
        assert hidden not in text
    for line in ("--group-size", "--semantics", "--save-interval", "--context-parallel-size"):
        assert line in text


def test_the_command_line_ends_with_2_and_rank_0_speaks(monkeypatch, capsys):
    for rank, spoken in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as ended:
            parse_command_line(f"{REQUIRED} --fp16 --group-size 1".split())
        assert ended.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert any(line.startswith("train: error: --fp16") for line in lines) == spoken
        assert any(line.startswith("train: error: --group-size") for line in lines) == spoken


def test_pure_modules_do_not_import_megatron_core():
    code = "import sys, megatron.grpo.flag_policy, megatron.grpo.checkpoint_folders, megatron.grpo.checkpoint_check\n" \
           "assert not [n for n in sys.modules if n.startswith(('megatron.core', 'megatron.training', 'torch'))]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
