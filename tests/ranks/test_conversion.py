"""Conversion at tensor parallel 2: one launch of two ranks converts, computes, saves, loads and exports every family.

This file is also the ranks' script.
"""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "conversion")]

from conversion_models import (  # noqa: E402
    CONFIGS, VOCABULARY, build_hf_model, build_pair, chunked_logits, draw_tokens, hf_logits, read_all, relative_error,
    same_bits, share_weights, whole_sequence_logits,
)  # fmt: skip

FAMILIES = tuple(CONFIGS)
TOKENS = (2, 70)


def convert_on_ranks(folder: Path) -> dict:
    """What a rank of two finds for every family: errors of its logits, and whether a checkpoint gave its weights back."""
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, leave_groups, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights, save_model_weights
    from megatron.grpo.conversion.weights import export_weights, import_weights

    groups, found, tokens = start_groups(tensor_parallel=2), {}, draw_tokens(*TOKENS)
    for family in FAMILIES:
        expected = torch.load(folder / f"{family}.pt")
        with HFReader(folder / family) as reader:
            preset = preset_from_hf_config(reader.config)
            stateful, conventional = build_pair(preset, groups)
            import_weights(stateful, reader, preset)
        share_weights(stateful, conventional)
        logits = {
            "whole": gather(whole_sequence_logits(conventional, tokens), groups),
            "chunks": chunked_logits(stateful, tokens, 17),
        }
        again = build_blank_model(preset, groups, dtype=torch.float32, vocab_divisible_by=40)
        load_model_weights(folder / f"{family}-tp1", again)  # written by one process, with another padding
        save_model_weights(folder / f"{family}-tp2", again, preset)
        export_weights(again, preset, folder / f"{family}-back", max_shard_bytes=40_000)
        found[family] = {
            "errors": {way: relative_error(value[..., :VOCABULARY], expected) for way, value in logits.items()},
            "padded": [way for way, value in logits.items() if value[..., VOCABULARY:].any()],
            "shapes": [value.shape[-1] for value in logits.values()],
        }
    rank = groups.tp.rank()
    leave_groups()
    return {"rank": rank, "found": found}


def gather(logits: torch.Tensor, groups) -> torch.Tensor:
    """Vocabulary-parallel logits, whole."""
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    return gather_from_tensor_model_parallel_region(logits.contiguous(), group=groups.tp)


@pytest.mark.ranks
def test_tensor_parallel_conversion(tmp_path):
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.build import build_blank_model, leave_groups, start_groups
    from megatron.grpo.conversion.hf_reader import HFReader
    from megatron.grpo.conversion.megatron_checkpoint import load_model_weights, save_model_weights
    from megatron.grpo.conversion.weights import hf_tensors, import_weights
    from tools.local_ranks import run_ranks

    groups, presets = start_groups(), {}
    try:
        for family in FAMILIES:
            model = build_hf_model(family)
            model.save_pretrained(tmp_path / family, max_shard_size="60KB")
            torch.save(hf_logits(model, draw_tokens(*TOKENS)), tmp_path / f"{family}.pt")
            with HFReader(tmp_path / family) as reader:
                presets[family] = preset_from_hf_config(reader.config)
                single = build_blank_model(presets[family], groups, dtype=torch.float32)
                import_weights(single, reader, presets[family])
            save_model_weights(tmp_path / f"{family}-tp1", single, presets[family])

        assert run_ranks(str(Path(__file__).resolve()), [str(tmp_path)], 2) == 0

        for family in FAMILIES:
            source, back = read_all(tmp_path / family), read_all(tmp_path / f"{family}-back")
            assert source.keys() == back.keys()
            assert [name for name in source if not same_bits(source[name], back[name])] == []
            single = build_blank_model(presets[family], groups, dtype=torch.float32)
            load_model_weights(tmp_path / f"{family}-tp2", single)
            assert all(same_bits(tensor, source[name]) for name, tensor in hf_tensors(single, presets[family]))
    finally:
        leave_groups()
    for rank in (0, 1):
        for family, found in torch.load(tmp_path / f"rank{rank}.pt")["found"].items():
            assert max(found["errors"].values()) <= 1e-5, (rank, family, found)
            assert (found["padded"], found["shapes"]) == ([], [256, 256]), (rank, family, found)


if __name__ == "__main__":
    results = convert_on_ranks(Path(sys.argv[1]))
    torch.save(results, Path(sys.argv[1]) / f"rank{results['rank']}.pt")
