from ortserve.listening import draw_age_s


def test_connection_ages_have_ten_percent_jitter() -> None:
    ages = [draw_age_s(100.0) for _ in range(1000)]
    assert all(90.0 <= age <= 110.0 for age in ages)
    assert min(ages) < 95.0
    assert max(ages) > 105.0
