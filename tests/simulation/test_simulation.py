"""The batcher reaches its figures in the most critical cells of ``loadtests/batching_simulation.py``.

Virtual time and seeded arrivals give the same numbers in every run.
"""

import random
from dataclasses import replace

import pytest

from simulation_world import (
    CPU,
    GPU,
    Machine,
    closed_loop,
    ideal_closed_loop,
    open_loop,
    poisson_ns,
    share_device,
)

MACHINES = [pytest.param(GPU, id="gpu"), pytest.param(CPU, id="cpu")]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_mean_latency_of_poisson_arrivals_stays_near_the_bound(machine: Machine, load: float) -> None:
    per_s = load * machine.capacity_per_s
    outcome = open_loop(machine, poisson_ns(per_s, 6_000, seed=1))
    assert None not in outcome.latency_ns
    assert outcome.mean_ns <= 1.10 * machine.bound_ns(per_s)
    assert outcome.mean_ns >= machine.latency_ns(1)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("load", [0.2, 0.5, 0.9])
def test_no_fixed_delay_beats_dispatch_when_idle(machine: Machine, load: float) -> None:
    arrivals_ns = poisson_ns(load * machine.capacity_per_s, 3_000, seed=1)
    ours = open_loop(machine, arrivals_ns)
    for delay_ns in (500_000, 1_000_000, 2_000_000, 10_000_000):
        delayed = open_loop(machine, arrivals_ns, queue_delay_ns=delay_ns, closed_loop_wait=False)
        assert ours.mean_ns <= 1.03 * delayed.mean_ns


@pytest.mark.parametrize(
    ("machine", "most"),
    [
        (Machine("no gain", 2_000_000, 0, 1, noise=0.25), 1.1),
        (Machine("right maximum", 1_000_000, 1_000_000, 16, noise=0.25), 1.1),
        (Machine("maximum too small", 1_000_000, 10_000_000, 2, noise=0.25), 0.5),
    ],
    ids=lambda value: value.name if isinstance(value, Machine) else "",
)
def test_correcting_the_maximum_rows_hardly_lengthens_and_often_shortens_the_99th_percentile(
    machine: Machine, most: float
) -> None:
    ratios = []
    for seed in range(3):
        arrivals_ns = poisson_ns(0.8 * machine.capacity_per_s, 5_000, seed)
        kept, corrected = open_loop(machine, arrivals_ns), open_loop(machine, arrivals_ns, most_rows=64)
        ratios.append(corrected.quantile_ns(0.99) / kept.quantile_ns(0.99))
    assert max(ratios) <= most


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("load", [1.2, 2.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_overloaded_server_keeps_its_goodput(machine: Machine, load: float, noise: float) -> None:
    slo_ns = 5 * machine.latency_ns(machine.max_rows)
    arrivals_ns = poisson_ns(load * machine.capacity_per_s, 8_000, seed=1)
    outcome = open_loop(replace(machine, noise=noise), arrivals_ns, slo_ns=slo_ns)
    assert outcome.goodput_per_s(slo_ns) >= 0.95 * machine.capacity_per_s
    assert outcome.quantile_ns(0.99) <= slo_ns


@pytest.mark.parametrize("machine", MACHINES)
def test_tight_deadlines_halve_batches_but_not_throughput(machine: Machine) -> None:
    slo_ns = round(1.2 * machine.latency_ns(machine.max_rows))
    # A request that arrives just after a dispatch waits for that batch and its own, so a batch may take half of the
    # time.
    rows = max(rows for rows in range(1, machine.max_rows + 1) if machine.latency_ns(rows) <= slo_ns / 2)
    reachable_per_s = rows / machine.latency_ns(rows) * 1e9
    outcome = open_loop(machine, poisson_ns(2 * machine.capacity_per_s, 15_000, seed=1), slo_ns=slo_ns)
    assert outcome.goodput_per_s(slo_ns) >= 0.95 * reachable_per_s
    assert outcome.quantile_ns(0.99) <= slo_ns


def test_overload_without_deadlines_answers_no_request_in_time() -> None:
    slo_ns = 5 * GPU.latency_ns(GPU.max_rows)
    outcome = open_loop(GPU, poisson_ns(2 * GPU.capacity_per_s, 8_000, seed=1))
    assert outcome.goodput_per_s(slo_ns) < 0.2 * GPU.capacity_per_s


@pytest.mark.parametrize("machine", MACHINES)
def test_light_load_with_deadlines_rejects_no_request(machine: Machine) -> None:
    slo_ns = 2 * machine.latency_ns(machine.max_rows)
    outcome = open_loop(machine, poisson_ns(0.5 * machine.capacity_per_s, 6_000, seed=1), slo_ns=slo_ns)
    assert None not in outcome.latency_ns


@pytest.mark.parametrize("clients", [4, 16])
def test_echo_wait_gains_most_of_the_closed_loop_optimum(clients: int) -> None:
    def think(draw: random.Random) -> float:
        return draw.expovariate(1 / 200_000)

    plain = closed_loop(GPU, clients, think, closed_loop_wait=False, requests=4_000)
    waiting = closed_loop(GPU, clients, think, closed_loop_wait=True, requests=4_000)
    ideal_per_s = ideal_closed_loop(GPU, clients, think, requests=4_000)
    assert waiting.per_s >= 1.15 * plain.per_s
    assert 0.85 * ideal_per_s <= waiting.per_s <= 1.01 * ideal_per_s


def test_model_of_long_batches_gets_no_more_of_the_device() -> None:
    short, long = Machine("1 ms", 0, 1_000_000, 16), Machine("20 ms", 0, 20_000_000, 16)
    shared = share_device([short, long], seconds=4.0)
    assert shared.shares == pytest.approx([0.5, 0.5], abs=0.02)
