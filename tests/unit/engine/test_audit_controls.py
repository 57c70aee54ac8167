"""Break the engine in one place at a time: the audit must see it, in the parameters where it has to show.

The audit's own functions run in this process, DDP and gradient finalization included; each control breaks one step of the
algorithm. The unbroken engine comes first.
"""

import pytest
import torch

from longstraw.adapters import decoder
from longstraw.adapters.full_attention import FullAttentionAdapter
from longstraw.adapters.gated_delta_net import GatedDeltaNetAdapter
from longstraw.patches.float64 import lift_float64
from longstraw.prompt_state.pages import PageArena
from longstraw.prompt_state.recurrent import RecurrentStates
from longstraw.sweeps import ReplayEngine
from tests.support.models import one_rank
from tools import audit_gradients as audit

FLAGS = "--model-preset tiny-qwen3.6 --prompt-length 43 --chunk-size 16 --response-lengths 5,1 --block-size 3".split()


@pytest.fixture(scope="module")
def dense():
    """The audit's reference and tokens, once."""
    args, groups = audit.parse_arguments(FLAGS), one_rank()
    with lift_float64():
        plain, model = audit.build_pair(args, groups)
        tokens = audit.draw_tokens(args, plain.vocab_size)
        _, reference = audit.dense_gradients(plain, *tokens)
    return args, groups, model, tokens, reference


def run_audit(dense):
    args, groups, model, tokens, reference = dense
    model.zero_grad()
    with lift_float64():
        _, found = audit.engine_gradients(args, model, groups, model.vocab_size, *tokens)
    return audit.compare(reference, found)


def drop_page_adjoints(patch):
    patch.setattr(PageArena, "add_adjoint", lambda self, rows, dk, dv: None)


def drop_key_adjoints(patch):
    original = PageArena.add_adjoint
    patch.setattr(PageArena, "add_adjoint", lambda self, rows, dk, dv: original(self, rows, torch.zeros_like(dk), dv))


def forget_page_roots(patch):
    patch.setattr(FullAttentionAdapter, "replay_roots", lambda self, run, segment, block: [])


def keep_roots(patch, keep):
    """Drop the roots of a GDN block that `keep` does not name: 0 the recurrent state, 1 the conv state."""
    original = GatedDeltaNetAdapter.replay_roots

    def some_roots(self, run, segment, block):
        roots = original(self, run, segment, block)
        return [root for index, root in enumerate(roots) if index in keep]

    patch.setattr(GatedDeltaNetAdapter, "replay_roots", some_roots)


def drop_recurrent_adjoint(patch):
    keep_roots(patch, {1})


def drop_conv_adjoint(patch):
    keep_roots(patch, {0})


def drop_childrens_recurrent_adjoint(patch):
    """Only what responses hand to the prompt is lost; within a segment all is well."""
    patch.setattr(RecurrentStates, "add_adjoint", lambda self, adjoint: None)


def skip_prompt_sweep(patch):
    original = ReplayEngine.reverse_sweep

    def only_responses(self, segment, state):
        return original(self, segment, state) if segment.loss is not None else 0.0

    patch.setattr(ReplayEngine, "reverse_sweep", only_responses)


def start_rotary_at_zero(patch):
    patch.setattr(decoder, "rotary_rows", lambda model, layout: model.rotary_pos_emb.get_emb(layout.rows, offset=0))


def keep_old_adjoints(patch):
    """The adjoint of a differentiated boundary is not cleared but added to the next one's."""
    original = GatedDeltaNetAdapter.pass_adjoint

    def accumulate(self, run, segment, block):
        before = segment.layers[self.layer_number].adjoint
        original(self, run, segment, block)
        if before is not None and segment.layers[self.layer_number].adjoint is not None:
            segment.layers[self.layer_number].add_adjoint(before)

    patch.setattr(GatedDeltaNetAdapter, "pass_adjoint", accumulate)


ATTENTION, RECURRENT = "decoder.layers.3.self_attention", "decoder.layers.0.self_attention"
CONTROLS = [  # what is broken, a parameter that must show it, and by how much at least
    (drop_page_adjoints, f"{ATTENTION}.linear_qkv.weight", 1e-2),
    (drop_key_adjoints, f"{ATTENTION}.k_layernorm.weight", 1e-2),
    (forget_page_roots, f"{ATTENTION}.linear_qkv.weight", 1e-2),
    (drop_recurrent_adjoint, f"{RECURRENT}.A_log", 1e-2),
    (drop_childrens_recurrent_adjoint, f"{RECURRENT}.in_proj.weight", 1e-2),
    (drop_conv_adjoint, f"{RECURRENT}.conv1d.weight", 1e-3),
    (skip_prompt_sweep, "embedding.word_embeddings.weight", 1e-1),
    (start_rotary_at_zero, f"{ATTENTION}.linear_qkv.weight", 1e-2),
    (keep_old_adjoints, f"{RECURRENT}.in_proj.weight", 1e-3),
]


def test_the_unbroken_engine_passes(dense):
    report = run_audit(dense)
    assert report["global_relative_error"] <= 1e-12 and report["max_relative_error"] <= 1e-11
    assert report["cosine"] == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("break_it, parameter, least", CONTROLS, ids=lambda x: getattr(x, "__name__", None))
def test_the_audit_sees_it(dense, monkeypatch, break_it, parameter, least):
    with monkeypatch.context() as patch:
        break_it(patch)
        report = run_audit(dense)
    assert report["parameters"][parameter]["relative_error"] > least, report["parameters"][parameter]
    assert report["global_relative_error"] > 1e-4, report["global_relative_error"]


def test_response_only_is_measured_and_not_judged():
    """The same loss, another gradient: the distance is reported, however large."""
    args = audit.parse_arguments([*FLAGS, "--semantics", "response_only", "--model-preset", "tiny-llama"])
    with lift_float64():
        plain, model = audit.build_pair(args, one_rank())
        tokens = audit.draw_tokens(args, plain.vocab_size)
        loss, found = audit.engine_gradients(args, model, one_rank(), model.vocab_size, *tokens)
        reference_loss, reference = audit.dense_gradients(plain, *tokens)
    report = audit.compare(reference, found)
    assert report["global_relative_error"] > 1e-2 and report["cosine"] < 0.999
    assert loss == pytest.approx(reference_loss, rel=1e-12)


def test_comparison_of_known_gradients():
    """Relative error and cosine by hand: one right, one doubled, one of zeros on both sides, one missing."""
    ones, zeros = torch.ones(4).double(), torch.zeros(3).double()
    report = audit.compare(
        {"right": ones, "doubled": ones, "zeros": zeros, "missing": ones},
        {"right": ones, "doubled": 2 * ones, "zeros": zeros, "missing": 0 * ones},
    )
    assert {name: p["relative_error"] for name, p in report["parameters"].items()} == {
        "right": 0, "doubled": 1, "zeros": 0, "missing": 1
    }
    assert [report["parameters"][n]["cosine"] for n in ("right", "doubled", "zeros", "missing")] == [1, 1, 1, 0]
    assert report["max_relative_error"] == 1
    assert report["global_relative_error"] == pytest.approx((8 / 12) ** 0.5)
    assert report["cosine"] == pytest.approx(12 / (12 * 20) ** 0.5)


@pytest.mark.parametrize("flags, message", [
    (["--prompt-length", "0"], "--prompt-length is at least 1, not 0"),
    (["--response-lengths", "3,0"], "each of --response-lengths is at least 1, not 0"),
    (["--sequence-parallel"], "--sequence-parallel needs --tensor-model-parallel-size above 1"),
    (["--model-preset", "gpt-5"], "--model-preset gpt-5 is not known; known are tiny-qwen3.6"),
    (["--context-parallel-size", "3"], "--tensor-model-parallel-size 1 x --context-parallel-size 3 does not divide the 4"),
    (["--tensor-model-parallel-size", "4"], "--tensor-model-parallel-size 4 does not divide the 4 query heads and 2 key"),
])
def test_bad_flags_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit):
        audit.parse_arguments(flags)
    assert message in capsys.readouterr().err
