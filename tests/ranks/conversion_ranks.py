"""Conversion at tensor parallel 2 and at expert parallel 2: two ranks convert, compute, save, load and export every family.

Three launches on one folder: `prepare` and `compare` alone, `convert` on two ranks between them.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.ranks import fork_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "conversion")]

from conversion_models import (  # noqa: E402
    CONFIGS, VOCABULARY, build_hf_model, build_pair, chunked_logits, draw_tokens, hf_logits, read_all, relative_error,
    same_bits, share_weights, whole_sequence_logits,
)  # fmt: skip

FAMILIES = tuple(CONFIGS)
SPARSE_EXPERTS = "glm_moe_dsa"
TOKENS = (2, 70)


def prepare(folder: Path) -> None:
    """Every family's HF folder, its logits, and its checkpoint as one process converts it."""
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, leave_groups, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.megatron_checkpoint import save_model_weights
    from megatron.grpo.conversion.weights import import_weights

    groups = start_groups()
    for family in (*FAMILIES, SPARSE_EXPERTS):
        model = build_hf_model(family)
        model.save_pretrained(folder / family, max_shard_size="60KB")
        torch.save(hf_logits(model, draw_tokens(*TOKENS)), folder / f"{family}.pt")
        with HFReader(folder / family) as reader:
            preset = preset_from_hf_config(reader.config)
            single = build_blank_model(preset, groups, dtype=torch.float32)
            import_weights(single, reader, preset)
        save_model_weights(folder / f"{family}-tp1", single, preset)
    for name, parameter in model.named_parameters():
        if not name.endswith("gate.weight"):
            parameter.data = parameter.data.bfloat16()
    model.save_pretrained(folder / f"{SPARSE_EXPERTS}-bf16")
    leave_groups()


def convert_on_ranks(rank: int, ranks: int, arguments: list[str]) -> None:
    """What a rank of two finds for every family: errors and shapes of its logits. It leaves checkpoints and HF folders."""
    from megatron.core import parallel_state

    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights, save_model_weights
    from megatron.grpo.conversion.weights import export_weights, import_weights

    folder = Path(arguments[0])
    groups, found, tokens = start_groups(tensor_parallel=2), {}, draw_tokens(*TOKENS)
    for family in FAMILIES:
        expected = torch.load(folder / f"{family}.pt")
        with HFReader(folder / family) as reader:
            preset = preset_from_hf_config(reader.config)
            stateful, conventional = build_pair(preset, groups)
            import_weights(stateful, reader, preset)
        found[family] = compare_logits(stateful, conventional, tokens, expected, groups)
        again = build_blank_model(preset, groups, dtype=torch.float32, vocab_divisible_by=40)
        load_model_weights(folder / f"{family}-tp1", again)  # written by one process, with another padding
        save_model_weights(folder / f"{family}-tp2", again, preset)
        export_weights(again, preset, folder / f"{family}-back", max_shard_bytes=40_000)
    parallel_state.destroy_model_parallel()
    found[SPARSE_EXPERTS] = share_experts_on_ranks(folder, tokens)
    for family, result in found.items():
        assert max(result["errors"].values()) <= 1e-5, (rank, family, result)
        width = 128 if family == SPARSE_EXPERTS else 256
        assert (result["padded"], result["shapes"]) == ([], [width, width]), (rank, family, result)


def share_experts_on_ranks(folder: Path, tokens: torch.Tensor) -> dict:
    """The same at expert parallel 2, the HF folder in bfloat16 imported by the tool as under torchrun."""
    from megatron.grpo.conversion.build import start_groups
    from megatron.grpo.presets import read_preset
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights
    from megatron.grpo.conversion.weights import export_weights
    from tools.convert_checkpoint import convert, parse_arguments

    source, groups = folder / SPARSE_EXPERTS, start_groups(expert_parallel=2)
    os.environ["RANK"] = str(dist.get_rank())  # as torchrun says it; the tool would start ranks of its own
    arguments = ["--hf-to-megatron", "--load", f"{source}-bf16", "--save", f"{source}-bf16-ep2"]
    assert convert(parse_arguments([*arguments, "--expert-model-parallel-size", "2"])) == 0
    preset = read_preset(f"{source}-tp1")
    stateful, conventional = build_pair(preset, groups)
    load_model_weights(f"{source}-tp1", stateful)  # written by one process
    export_weights(stateful, preset, f"{source}-back", max_shard_bytes=40_000)
    return compare_logits(stateful, conventional, tokens, torch.load(f"{source}.pt"), groups)


def compare_logits(stateful, conventional, tokens, expected, groups) -> dict:
    """Errors, columns of the padding that are not zero, and width of the logits, whole and chunk by chunk."""
    share_weights(stateful, conventional)
    logits = {
        "whole": gather(whole_sequence_logits(conventional, tokens), groups),
        "chunks": chunked_logits(stateful, tokens, 17),
    }
    return {
        "errors": {way: relative_error(value[..., :VOCABULARY], expected) for way, value in logits.items()},
        "padded": [way for way, value in logits.items() if value[..., VOCABULARY:].any()],
        "shapes": [value.shape[-1] for value in logits.values()],
    }


def gather(logits: torch.Tensor, groups) -> torch.Tensor:
    """Vocabulary-parallel logits, whole."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits.contiguous(), group=groups.tp)


def compare(folder: Path) -> None:
    """What the ranks exported is what was there before, and one process reads their checkpoints."""
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, leave_groups, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights
    from megatron.grpo.conversion.weights import hf_tensors
    from tools.convert_checkpoint import convert, parse_arguments

    groups = start_groups()
    one, two = (f"{folder}/{SPARSE_EXPERTS}-bf16-{name}" for name in ("ep2", "back"))
    assert convert(parse_arguments(["--megatron-to-hf", "--load", one, "--save", two])) == 0
    for name in (*FAMILIES, SPARSE_EXPERTS, f"{SPARSE_EXPERTS}-bf16"):
        check_same_tensors(folder / name, folder / f"{name}-back")
    for family in FAMILIES:
        source = read_all(folder / family)
        with HFReader(folder / family) as reader:
            preset = preset_from_hf_config(reader.config)
        single = build_blank_model(preset, groups, dtype=torch.float32)
        load_model_weights(folder / f"{family}-tp2", single)
        assert all(same_bits(tensor, source[name]) for name, tensor in hf_tensors(single, preset))
    leave_groups()


def check_same_tensors(one: Path, other: Path) -> None:
    """Every tensor of an HF folder, experts' biases included, is in the other with the same bits, and no other tensor is."""
    source, back = read_all(one), read_all(other)
    assert source.keys() == back.keys()
    assert [name for name in source if not same_bits(source[name], back[name])] == []
    assert all(tensor.any() for name, tensor in source.items() if name.endswith("e_score_correction_bias"))


if __name__ == "__main__":
    if sys.argv[4] == "convert":
        fork_ranks(convert_on_ranks)
    else:
        {"prepare": prepare, "compare": compare}[sys.argv[4]](Path(sys.argv[3]))
