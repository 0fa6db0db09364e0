"""The benchmark copies between two real processes and reports what each page cost."""

from handoff_cost import measure


def test_the_benchmark_reports_the_cost_of_a_page_for_each_number_of_pages() -> None:
    costs = measure(4096, [1, 40], repeats=3, tcp=False)
    assert [cost.name for cost in costs] == ["1 x 4096", "40 x 4096"]
    for cost in costs:
        assert 0 < cost.post_us < cost.landed_us
        assert 0 < cost.digest_us < cost.landed_us
        assert cost.ask_us > 0
        assert cost.post_cpu_us > 0
        assert cost.bytes_per_s > 0
