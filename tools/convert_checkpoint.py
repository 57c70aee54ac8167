"""Convert checkpoints between Hugging Face folders and Megatron's distributed checkpoints.

    python tools/convert_checkpoint.py --from-gguf MODEL.gguf --to-hf HFDIR
    python tools/convert_checkpoint.py --hf-to-megatron --load HFDIR --save DIR
    python tools/convert_checkpoint.py --megatron-to-hf --load DIR --save HFDIR

Families: Llama, Qwen3, Qwen3.5 and 3.6 (the text model), GLM-5.x, DeepSeek-V3.2 (without YaRN). Safetensors only, read
and written tensor by tensor. Every tensor is accounted for: an unmapped, missing or wrongly shaped one is an error that
names it, and what is left out on purpose is listed. `--check` does everything but write. Values keep their bits unless
--dtype says otherwise; low-rank pairs (--lora-rank) are exported merged into their weights.

An import starts its own ranks on this machine. A model that exceeds one machine's memory is imported under torchrun, on
as many machines as hold it, which share the folders: torchrun ... tools/convert_checkpoint.py --hf-to-megatron ...
"""

import argparse
import json
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.tool_flags import check_report_path  # noqa: E402

# What is heavy is imported where it is needed: bad input is refused at once.

DTYPES = {"bf16": "bfloat16", "float32": "float32"}
UNITS = {"MB": 10**6, "GB": 10**9}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The tool's flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--hf-to-megatron", action="store_true", help="HF folder --load -> Megatron checkpoint --save")
    direction.add_argument("--megatron-to-hf", action="store_true", help="Megatron checkpoint --load -> HF folder --save")
    direction.add_argument("--from-gguf", metavar="FILE", help="GGUF file -> HF folder --to-hf, dequantised")
    add("--load", metavar="DIR", help="what to convert")
    add("--save", metavar="DIR", help="where to write it: a new or empty folder")
    add("--to-hf", metavar="DIR", help="with --from-gguf: where to write the HF folder")
    add("--check", action="store_true", help="verify names, shapes and that every tensor survives; write nothing")
    add("--dtype", choices=tuple(DTYPES), help="dtype of all weights; default: each tensor keeps its own")
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share the work, each with its part of the model")
    add("--expert-model-parallel-size", type=int, default=1, help="ranks that share the experts, each with its own of them")
    add("--make-vocab-size-divisible-by", type=int, default=128, help="pad the vocabulary to a multiple of this x TP, as in training")
    add("--max-shard-size", default="5GB", help="largest safetensors file of an export, e.g. 500MB or 5GB")
    add("--tokenizer-path", metavar="HFDIR", help="where an export takes tokenizer, chat template and token ids from; "
        "default: what --hf-to-megatron kept beside the checkpoint")  # fmt: skip
    add("--ckpt-step", type=int, help="step of a training run's checkpoint to export; default: the latest")
    add("--model-preset", help="architecture of a checkpoint that has no longstraw_model.json")
    add("--ignore-config-keys", default="", metavar="A,B", help="unknown keys of config.json that change nothing")
    add("--json", metavar="PATH", help="also write the report as JSON; - is standard output")
    args = parser.parse_args(argv)
    if args.from_gguf and not args.to_hf:
        parser.error("--from-gguf needs --to-hf")
    if not args.from_gguf and not (args.load and (args.save or args.check)):
        parser.error("--load and --save are needed (--save not with --check)")
    for kind in ("tensor", "expert"):
        if getattr(args, f"{kind}_model_parallel_size") > 1 and not args.hf_to_megatron:
            parser.error(f"--{kind}-model-parallel-size is for --hf-to-megatron; a checkpoint is exported by one process")
    size, unit = args.max_shard_size[:-2], args.max_shard_size[-2:].upper()
    if unit not in UNITS or not size.isdigit() or int(size) == 0:
        parser.error(f"--max-shard-size {args.max_shard_size} is not a size like 500MB or 5GB")
    args.max_shard_bytes = int(size) * UNITS[unit]
    if args.json:
        check_report_path(parser, args.json)
    return args


def read_source(args):
    """(reader, preset) of the HF folder --load."""
    from megatron.grpo.conversion.architecture import preset_from_hf_config
    from megatron.grpo.conversion.hf_reader import HFReader

    reader = HFReader(args.load)
    name, ignore = Path(args.load).resolve().name, tuple(filter(None, args.ignore_config_keys.split(",")))
    return reader, preset_from_hf_config(reader.config, name=name, ignore=ignore)


def pick_dtype(args):
    """The torch dtype of --dtype, or None."""
    import torch

    return getattr(torch, DTYPES[args.dtype]) if args.dtype else None


def check_hf(args) -> dict:
    """The report of an import, from the folder's headers and, under --check, its every tensor."""
    from megatron.grpo.conversion.architecture import left_out_of_config
    from megatron.grpo.conversion.plan import check_parallel_sizes, plan_import, verify_layouts

    reader, preset = read_source(args)
    with reader:
        check_parallel_sizes(preset, tensor=args.tensor_model_parallel_size, expert=args.expert_model_parallel_size)
        maps, report = plan_import(reader, preset, dtype=pick_dtype(args))
        if args.check:
            verify_layouts(reader, maps, dtype=pick_dtype(args))
        return {"preset": asdict(preset), **asdict(report), "left_out_of_config": left_out_of_config(reader.config)}


def write_megatron(args) -> None:
    """Import on the ranks of this job, each its part."""
    import torch
    import torch.distributed as dist

    from megatron.grpo.conversion.build import build_blank_model, start_groups
    from megatron.grpo.conversion.checkpoint_folder import keep_hf_files
    from megatron.grpo.conversion.megatron_checkpoint import save_model_weights
    from megatron.grpo.conversion.weights import import_weights
    from megatron.grpo.quiet_logs import quiet_logs

    quiet_logs()
    groups = start_groups(
        tensor_parallel=args.tensor_model_parallel_size, expert_parallel=args.expert_model_parallel_size
    )
    reader, preset = read_source(args)
    with reader:
        model = build_blank_model(
            preset, groups, dtype=pick_dtype(args) or torch.float32, vocab_divisible_by=args.make_vocab_size_divisible_by
        )
        import_weights(model, reader, preset, dtype=pick_dtype(args))
    if dist.get_rank() == 0:
        keep_hf_files(args.save, args.load)
    save_model_weights(args.save, model, preset)


def export_megatron(args) -> dict:
    """Export a checkpoint; the report."""
    from megatron.grpo.conversion.checkpoint_folder import HF_FOLDER, find_iteration
    from megatron.grpo.conversion.hf_reader import read_config
    from megatron.grpo.presets import get_preset, read_preset

    iteration = find_iteration(args.load, args.ckpt_step)
    preset = get_preset(args.model_preset) if args.model_preset else read_preset(args.load)
    kept = Path(args.tokenizer_path or Path(args.load) / HF_FOLDER)
    if args.tokenizer_path and not kept.is_dir():
        raise ValueError(f"--tokenizer-path {kept}: no such folder")
    source_config = read_config(kept) if (kept / "config.json").is_file() else None

    import torch

    from longstraw.patches.lora import merge_pairs
    from megatron.grpo.conversion.build import build_blank_model, start_groups
    from megatron.grpo.conversion.megatron_checkpoint import adopt_checkpoint_dtypes, load_model_weights
    from megatron.grpo.conversion.weights import export_weights, plan_export
    from megatron.grpo.lora import open_stored_pairs
    from megatron.grpo.quiet_logs import quiet_logs

    quiet_logs()
    model = build_blank_model(preset, start_groups(), dtype=pick_dtype(args) or torch.float32)
    open_stored_pairs(iteration, model)
    if args.dtype is None:
        adopt_checkpoint_dtypes(args.load, model, step=args.ckpt_step)
    load_model_weights(args.load, model, preset, step=args.ckpt_step)
    merged = merge_pairs(model)
    files, total = plan_export(model, preset, args.max_shard_bytes)
    report = {"iteration": iteration.name, "preset": asdict(preset), "tensors": len(files), "bytes": total}
    report |= {"merged_pairs": merged} if merged else {}
    if args.check:
        return report
    copied = export_weights(
        model, preset, args.save, tokenizer_folder=kept if kept.is_dir() else None, source_config=source_config,
        max_shard_bytes=args.max_shard_bytes,
    )
    return report | {"files": sorted(set(files.values())), "copied": copied}


def print_report(args, report: dict) -> None:
    """A few lines for people, and JSON where asked."""
    preset = report["preset"]
    verb = "checked" if args.check else "wrote"
    print(f"{preset['name']}: {preset['num_layers']} layers, hidden {preset['hidden_size']}, vocabulary {preset['vocab_size']}")
    if "tensors" in report:
        print(f"{verb} {report['tensors']} tensors" + ("" if args.check else f" to {args.save}"))
    if "merged_pairs" in report:
        print(f"merged {report['merged_pairs']} low-rank pairs into their weights")
    for reason, names in report.get("left_out", {}).items():
        shown = ", ".join(names["names"][:3]) + (", ..." if names["tensors"] > 3 else "")
        print(f"left out on purpose: {names['tensors']} tensors, {reason} ({shown})")
    for key, reason in report.get("left_out_of_config", {}).items():
        print(f"left out on purpose: {key} of config.json, {reason}")
    if "copied" in report:
        print(f"copied {', '.join(report['copied'])}" if report["copied"] else "copied no tokenizer: none was kept; see --tokenizer-path")
    if args.json == "-":
        print(json.dumps(report, indent=1))
    elif args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def convert(args) -> int:
    """Run the conversion that the flags name; returns the exit code. Raises ValueError for bad input."""
    from tools.local_ranks import is_rank, run_ranks

    if is_rank():
        write_megatron(args)
        return 0
    if args.from_gguf:
        from megatron.grpo.conversion.gguf import convert_gguf

        preset = convert_gguf(args.from_gguf, args.to_hf, dtype=DTYPES[args.dtype or "float32"])
        args.save = args.to_hf
        print_report(args, {"preset": asdict(preset)})
        return 0
    if args.megatron_to_hf:
        print_report(args, export_megatron(args))
        return 0
    report = check_hf(args)
    started_by_torchrun, first = "RANK" in os.environ, int(os.environ.get("RANK", 0)) == 0
    if not args.check:
        from megatron.grpo.conversion.hf_writer import make_empty_folder, write_json

        if first:
            make_empty_folder(args.save)
        ranks = args.tensor_model_parallel_size * args.expert_model_parallel_size
        if ranks == 1 or started_by_torchrun:
            write_megatron(args)
        elif code := run_ranks(str(Path(__file__).resolve()), sys.argv[1:], ranks):
            return code
        if first:
            write_json(Path(args.save) / "conversion_report.json", report)
    if first:
        print_report(args, report)
    return 0


def main() -> int:
    """Convert, or say in one sentence why not."""
    warnings.simplefilter("ignore")
    args = parse_arguments()
    try:
        return convert(args)
    except ValueError as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 1


def leave_job() -> None:
    """Leave the process groups, where the conversion made any."""
    if "megatron.grpo.conversion.build" in sys.modules:
        from megatron.grpo.conversion.build import leave_groups

        leave_groups()


if __name__ == "__main__":
    code = main()
    leave_job()
    sys.exit(code)
