"""The search over ways to run a step, on costs written down here instead of dry runs."""

import pytest

from longstraw.dry_run.search import NEAR, WORTH, Limits, Tried, find_longest, find_smallest
from longstraw.dry_run.sizes import read_size

PAGES = [{"--page-residency": "device"}, {"--page-residency": "host"}]
CHUNKS = [{"--chunk": "64"}, {"--chunk": "256"}, {"--chunk": "512"}]


class Costs:
    """1,000 fixed bytes, 3 a token on the device or 1 there and 4 on the host, and 2 a token of a chunk; counts its measures."""

    def __init__(self, refused: str = ""):
        self.refused, self.measured = refused, []

    def __call__(self, pairs):
        return [self._measure(way, prompt) for way, prompt in pairs]

    def _measure(self, way, prompt):
        self.measured.append((dict(way), prompt))
        if self.refused and self.refused in way.values():
            return Tried(way=way, prompt=prompt, refusal=f"{self.refused} is refused")
        host = way.get("--page-residency") == "host"
        chunk = 2 * int(way.get("--chunk", "128"))
        return Tried(way=way, prompt=prompt, device=1000 + (1 if host else 3) * prompt + chunk, host=4 * prompt if host else 0)


def test_each_axis_goes_on_from_the_best_of_the_one_before():
    costs = Costs()
    best = find_smallest(costs, [PAGES, CHUNKS], 1000, Limits())
    assert dict(best.way) == {"--page-residency": "host", "--chunk": "64"} and best.device == 1000 + 1000 + 128
    assert len(costs.measured) == 1 + 2 + 3
    assert all(way["--page-residency"] == "host" for way, _ in costs.measured[-3:])


def test_an_axis_that_follows_the_best_goes_on_while_it_gets_better():
    costs = Costs()

    def halves(best):
        size = int(best.get("--chunk", "128"))
        return [{"--chunk": str(size // 2)}] if size > 8 else []

    assert find_smallest(costs, [halves], 10, Limits()).way == {"--chunk": "8"}
    assert [way.get("--chunk") for way, _ in costs.measured] == [None, "64", "32", "16", "8"]


def test_a_host_limit_comes_before_the_smallest_device_peak():
    best = find_smallest(Costs(), [PAGES], 1000, Limits(host=3999))
    assert not best.way and best.host == 0
    assert find_smallest(Costs(), [PAGES], 1000, Limits(host=4000)).host == 4000


def test_a_change_that_saves_next_to_nothing_is_left():
    best = find_smallest(Costs(), [[{"--chunk": "127"}]], 10**6, Limits())
    assert not best.way, "2 bytes of 3,001,256"


def test_a_change_that_saves_next_to_nothing_is_taken_where_it_makes_the_step_fit():
    limits = Limits(device=3_001_254)
    best = find_smallest(Costs(), [[{"--chunk": "127"}]], 10**6, limits)
    assert best.way and best.load(limits) <= 1, "3,001,254 of 3,001,256 bytes"


def test_refused_ways_are_passed_over_and_refused_only_is_an_error():
    best = find_smallest(Costs(refused="host"), [PAGES, CHUNKS], 1000, Limits())
    assert "--page-residency" not in best.way
    with pytest.raises(ValueError, match="is refused"):
        find_smallest(lambda pairs: [Tried(way=w, prompt=p, refusal="it is refused") for w, p in pairs], [], 1000, Limits())


def longest(costs, limits, axes=(PAGES,), start=1000, longest=10**9):
    return find_longest(costs, axes, start=start, longest=longest, limits=limits, unit=64)


@pytest.mark.parametrize("start", [64, 1000, 10**6])
def test_the_longest_prompt_fills_the_limit(start):
    costs = Costs()
    best = longest(costs, Limits(device=500_000, host=10**9), start=start)
    right = (500_000 - 1000 - 256) // 64 * 64
    assert best.way == {"--page-residency": "host"} and best.load(Limits(device=500_000)) <= 1
    assert (1 - NEAR) * right - 64 <= best.prompt <= right
    assert len(costs.measured) <= 14


def test_the_host_bounds_the_prompt_too():
    limits = Limits(device=500_000, host=800_000)
    best = longest(Costs(), limits)
    assert best.prompt * 4 <= 800_000 and best.prompt > 0.99 * 200_000


def test_no_prompt_is_longer_than_the_positions():
    best = longest(Costs(), Limits(device=10**9), longest=12_345)
    assert best.prompt == 12_345


def test_what_does_not_fit_comes_back_at_its_shortest():
    limits = Limits(device=1100)
    best = longest(Costs(), limits)
    assert best.prompt == 64 and best.load(limits) > 1


KINKED = {
    "device full of weights, host growing": (lambda n: 80e9 + 100 * n, lambda n: 1e9 + 60e3 * n),
    "device nearly at its limit": (lambda n: 90e9 + 10 * n, lambda n: 1e9 + 100e3 * n),
    "another phase becomes the largest": (lambda n: max(50e9 + 100 * n, 20e9 + 400e3 * n), lambda n: 0.0),
    "quadratic": (lambda n: 10e9 + 1e-2 * n * n, lambda n: 0.0),
    "nearly full of weights": (lambda n: 91.9e9 + 10 * n, lambda n: 0.0),
    "a root": (lambda n: 30e6 * n**0.5, lambda n: 0.0),
    "a step": (lambda n: 10e9 if n < 1_234_567 else 200e9, lambda n: 0.0),
}


@pytest.mark.parametrize("start", [4096, 131_072, 2_088_960, 8_388_608])
@pytest.mark.parametrize("kind", KINKED)
def test_the_longest_prompt_where_growth_changes(kind, start):
    """The length found fits, and one that is 1 % and a chunk longer does not."""
    limits, (device, host), measured = Limits(device=92 * 10**9, host=192 * 10**9), KINKED[kind], []

    def measure(pairs):
        measured.extend(pairs)
        return [Tried(way=way, prompt=n, device=int(device(n)), host=int(host(n))) for way, n in pairs]

    best = find_longest(measure, [], start=start, longest=2**24, limits=limits, unit=1024)
    (longer,) = measure([({}, int(best.prompt * (1 + NEAR)) + 1024)])
    assert best.load(limits) <= 1 < longer.load(limits) or best.prompt == 2**24
    assert len(measured) <= 32


def test_a_refused_length_is_no_longer_than_any_that_fits():
    def measure(pairs):
        return [Tried(way=w, prompt=n, device=n, refusal="too long" if n > 50_000 else "") for w, n in pairs]

    best = find_longest(measure, [], start=1024, longest=10**6, limits=Limits(device=10**6), unit=64)
    assert (1 - NEAR) * 50_000 - 64 <= best.prompt <= 50_000


@pytest.mark.parametrize("text, size", [("96GB", 96 * 10**9), ("80GiB", 80 * 2**30), ("1.5 tb", 15 * 10**11), ("1000 b", 1000)])
def test_sizes(text, size):
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "96", "0GB", "-1GB", "96 gigabytes", "1e9", "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="no size: write bytes with a unit"):
        read_size(text)
