from ortserve.listening import draw_age_s


def test_ages_of_connections_are_spread_over_a_tenth_to_both_sides() -> None:
    ages = [draw_age_s(100.0) for _ in range(1000)]
    assert all(90.0 <= age <= 110.0 for age in ages)
    assert min(ages) < 95.0
    assert max(ages) > 105.0
