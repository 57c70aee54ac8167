"""The dry run's command line: what it takes from the training program's, what it refuses, and which ways --fit tries."""

import json
import os

import pytest

from longstraw.dry_run.search import AXES
from megatron.grpo.arguments import ArgumentErrors
from megatron.grpo.dry_run.fit import make_axes, with_way
from megatron.grpo.dry_run.flags import parse_dry_run
from megatron.grpo.dry_run.program import write_report

TINY = "--model-preset tiny-qwen3.6 --prompt-length 100 --response-length 4"


def parse(flags: str):
    return parse_dry_run(f"{TINY} {flags}".split())


@pytest.mark.parametrize("flags, sentence", [
    ("--rank 2 --context-parallel-size 2", "--rank 2 is none of 2 ranks"),
    ("--ranks 0", "--ranks is at least 1, not 0"),
    ("--prompt-length 0", "--prompt-length is at least 1, not 0"),
    ("--prompt-length 100000000", "exceed --max-position-embeddings"),
    ("--json nowhere/report.json", "--json nowhere/report.json cannot be written: No such file or directory in "),
    ("--receipt nowhere/receipt.json", "--receipt nowhere/receipt.json cannot be written"),
    ("--json /proc/report.json", "--json /proc/report.json cannot be written"),
    ("--json /", "--json / is no file"),
    ("--receipt -", "--receipt - is no file"),
    ("--receipt /dev/null", "--receipt /dev/null is a device, a pipe or a link, whose place"),
    ("--receipt /dev/stdout", "--receipt /dev/stdout is a device, a pipe or a link"),
    ("--even-choices", "--even-choices is read only with --measure"),
    ("--hardware H20 --machine cpu", "--hardware H20: --machine cpu estimates no GPU's seconds"),
    ("--hardware H20 --measure", "--hardware H20: --measure estimates no GPU's seconds"),
    ("--prompt-length-limit 99", "--prompt-length 100 is more than --prompt-length-limit 99"),
    ("--max-response-length=3", "--response-length 4 is more than --max-response-length 3"),
    ("--fit --receipt receipt.json", "--receipt is of one step, and --fit tries many"),
    ("--fit-over chunk", "--fit-over is read only with --fit"),
    ("--fit --measure", "--measure is of one step, and --fit tries many"),
    ("--fit --rank 0", "--rank is of one step, and --fit tries many"),
    ("--fit prompt", "--fit prompt needs --device-memory"),
    ("--device-memory 96", "--device-memory: '96' is no size: write bytes with a unit"),
    ("--fit --host-memory lots", "--host-memory: 'lots' is no size"),
    ("--fit --fit-jobs 0", "--fit-jobs is at least 1, not 0"),
])
def test_refused_flags(flags, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse(flags)


@pytest.mark.parametrize("flags, sentence", [
    ("--group-size 0", "--group-size"),
    ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size"),
    ("--index-page-residency host", "has no sparse attention"),
    ("--no-such-flag 1", "--no-such-flag"),
])
def test_what_the_training_program_refuses_is_refused_in_its_words(flags, sentence):
    with pytest.raises(ArgumentErrors, match=sentence):
        parse(flags)


def test_the_ranks_are_those_of_one_replica_or_torchruns(monkeypatch):
    assert parse("--context-parallel-size 2").settings.ranks == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert parse("--context-parallel-size 2").settings.ranks == 4


def test_data_and_tokenizer_need_not_be_there():
    dry = parse("--prompt-data nowhere.jsonl --tokenizer-path nowhere")
    assert dry.fit is None and dry.settings.lengths.prompt == 100


def test_the_ways_that_fit_tries_are_others_than_the_given_one():
    dry = parse(
        "--fit --optimizer logra --logra-rank 32 --bf16 --context-parallel-size 2 --prompt-chunk-size 128 --page-residency host"
    )
    axes = make_axes(dry, AXES)
    assert [{"--page-residency": "device"}] in axes and [{"--logra-master-residency": "host"}] in axes
    (chunks,) = [axis for axis in axes if callable(axis)]
    assert chunks({}) == [{"--prompt-chunk-size": "64"}], "32 is less than a tile, 256 no less than the whole prompt twice"
    assert chunks({"--prompt-chunk-size": "64"}) == [], "128 was given"
    assert [{"--logra-rank": "8"}, {"--logra-rank": "16"}] in axes
    assert [{
        "--tensor-model-parallel-size": "2", "--context-parallel-size": "1", "--sequence-parallel": True,
    }] in axes


def test_a_report_goes_through_devices_and_links_and_replaces_neither(tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        write_report({"a": 1}, str(path))
    assert json.loads(os.read(reader, 100)) == json.loads(target.read_text()) == {"a": 1}
    os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()


def test_response_only_has_no_adjoints_to_place():
    axes = make_axes(parse("--fit --semantics response_only"), ("residency",))
    assert axes == [[{"--page-residency": "host"}], [{"--recurrent-state-residency": "host"}]]


def test_a_ways_flags_take_the_place_of_the_given_ones():
    argv = ["--a", "1", "--sequence-parallel", "--b=2", "--c", "3"]
    assert with_way(argv, {"--a": "5", "--b": "6", "--sequence-parallel": False}) == ["--c", "3", "--a", "5", "--b", "6"]
    assert with_way(["--a", "1"], {"--sequence-parallel": True}) == ["--a", "1", "--sequence-parallel"]
