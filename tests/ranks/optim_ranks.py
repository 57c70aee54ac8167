"""The ranks of `test_optim_ranks.py`: sketches, RowAdam and predicted KL equal one rank's, float64, no Megatron."""

import torch
import torch.distributed as dist

from longstraw.optim.projection import project_columns
from longstraw.optim.row_adam import row_scales, row_squares, update_row_moment
from longstraw.optim.sketch import BlockLimits, all_reduce_sketches, naive_sketch, open_sketch, sketched_linear
from longstraw.optim.step_control import StepControlError, kl_rate, naive_kl, naive_variance, sum_kl, sum_logit_variance
from longstraw.optim.update import naive_update, projection_gram, update_square_norm
from tests.support.ranks import fork_ranks
from tests.support.sketches import draw, projection

F64 = torch.float64
CLOSE = dict(rtol=1e-12, atol=1e-12)


def cut(whole: int, rank: int, ranks: int, first: int) -> slice:
    """Uneven shards of `whole`: the first rank has `first`, the others share the rest."""
    bounds = [0, *(first + (whole - first) * i // (ranks - 1) for i in range(ranks))]
    return slice(bounds[rank], bounds[rank + 1])


def check_tokens_and_columns(rank, ranks):
    """Row-parallel columns, then context-parallel tokens, of which a rank may have none."""
    drawn, weight, x, grad = projection(4, 70), draw(6, 70), draw(11, 70, seed=1), draw(11, 6, seed=2)
    expected = naive_sketch(grad, x, drawn)
    for first in (0, 1, 33, 70):
        columns = cut(70, rank, ranks, first)
        part = open_sketch(
            weight[:, columns], drawn, column_start=columns.start, limits=BlockLimits(tokens=4, entries=1)
        )
        sketched_linear(x[:, columns], weight[:, columns], part).backward(grad)
        all_reduce_sketches([part.sketch], dist.group.WORLD)
        torch.testing.assert_close(part.sketch, expected, **CLOSE)
        gram = projection_gram(drawn, dtype=F64, column_start=columns.start, columns=columns.stop - columns.start)
        all_reduce_sketches([gram], dist.group.WORLD)
        change = naive_update(torch.zeros(6, 70, dtype=F64), expected, project_columns(drawn, 0, 70, dtype=F64), 1.0)
        torch.testing.assert_close(update_square_norm(part.sketch, gram), change.square().sum(), **CLOSE)
    for first in (0, 3, 11):
        tokens = cut(11, rank, ranks, first)
        part = open_sketch(weight, drawn)
        sketched_linear(x[tokens], weight, part).backward(grad[tokens])
        idle = open_sketch(weight, projection(4, 70, name="an expert without tokens"))
        all_reduce_sketches([part.sketch, idle.sketch], dist.group.WORLD)
        torch.testing.assert_close(part.sketch, expected, **CLOSE)
        assert idle.sketch.eq(0).all()


def check_row_adam(rank, ranks):
    """Column-parallel rows: the norm that RowAdam keeps is the whole weight's."""
    sketch = draw(9, 5) * torch.logspace(-2, 2, 9, dtype=F64)[:, None]
    for first in (0, 2, 9):
        rows = cut(9, rank, ranks, first)
        results = []
        for part, group in ((sketch, None), (sketch[rows], dist.group.WORLD)):
            moment = torch.zeros(len(part), dtype=F64)
            for step in (1, 2):
                squares = row_squares(step * part)
                moment = update_row_moment(moment, squares, 5)
                scales = row_scales(moment, squares, step, group=group)
            results.append(scales)
        torch.testing.assert_close(results[1], results[0][rows], **CLOSE)


def check_vocabulary(rank, ranks):
    """Logits split over the vocabulary, a rank of nothing but padding, no contexts, maxima far apart."""
    for contexts in (0, 1, 7):
        for first in (0, 4, 13):
            z, zdot = draw(contexts, 13) * 3, draw(contexts, 13, seed=1)
            z[:, :2] += 500
            mine = cut(13, rank, ranks, first)
            for temperature in (1.0, 0.6):
                given = dict(temperature=temperature, group=dist.group.WORLD)
                got = sum_logit_variance(z[:, mine], zdot[:, mine], **given)
                torch.testing.assert_close(got, naive_variance(z, zdot, temperature), rtol=1e-10, atol=1e-12)
                got = sum_kl(z[:, mine], (z + zdot)[:, mine], **given)
                torch.testing.assert_close(got, naive_kl(z, z + zdot, temperature), rtol=1e-10, atol=1e-12)


def check_nan_of_one_rank(rank, ranks):
    """Every rank refuses the step, not only the one that has the NaN."""
    zdot = torch.full((2, 3), torch.nan if rank == 1 else 1.0)
    try:
        kl_rate(sum_logit_variance(torch.zeros(2, 3), zdot, group=dist.group.WORLD), 2)
    except StepControlError:
        return
    raise AssertionError("the NaN of one rank was hidden from another")


def main(rank, ranks, _arguments):
    for check in (check_tokens_and_columns, check_row_adam, check_vocabulary, check_nan_of_one_rank):
        check(rank, ranks)


if __name__ == "__main__":
    fork_ranks(main)
