"""What a router's metrics say of the requests that it has served and refused."""

import asyncio

from router_fakes import RouterUnderTest, StartRouter, collect, error_of
from scraping import Scraped, scrape

from pdserve.proto.v1 import inference_pb2 as inference


async def scraped(router: RouterUnderTest) -> Scraped:
    return await asyncio.to_thread(scrape, router.addresses.metrics)


def slo(ttft_ms: float, tpot_ms: float) -> inference.Slo:
    return inference.Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms)


async def test_answered_refused_and_invalid_requests_are_counted(start_router: StartRouter) -> None:
    router = await start_router(pool_grace_s=0.0)
    await error_of(router.generate(text="nobody is there", max_tokens=6, slo=slo(1e6, 1e6)))
    prefill, _ = await router.pair()
    await collect(router.generate(text="hello", max_tokens=6, slo=slo(1e6, 1e6), priority=3))
    await collect(router.generate(text="hello", max_tokens=6, slo=slo(1e6, 1e-6), priority=3))
    await collect(router.generate(text="hello", max_tokens=6))
    await error_of(router.generate(text="hello", max_tokens=10**6))
    prefill.is_paused = True
    waiting = router.generate(text="wait", max_tokens=6)
    await router.until_status(lambda status: status.num_active == 1)
    found = await scraped(router)
    found.assert_complete("router")
    model = {"model_name": "tiny"}
    assert found.value("vllm:time_to_first_token_seconds_count", **model) == 3
    assert found.value("vllm:request_generation_tokens_sum", **model) == 18
    assert found.value("vllm:request_success_total", finished_reason="length", **model) == 3
    assert found.value("vllm:request_prompt_tokens_bucket", le="5.0", **model) == 3
    assert found.value("vllm:num_requests_waiting", **model) == 1
    assert found.value("vllm:num_requests_running", **model) == 0
    assert found.value("pdserve_requests_arrived_total") == 5
    assert found.value("pdserve_requests_ended_total", status="OK") == 3
    assert found.value("pdserve_requests_invalid_total", status="INVALID_ARGUMENT") == 1
    assert found.value("pdserve_requests_refused_total", cause="no_prefill") == 1
    assert found.value("pdserve_goodput_requests_total", priority_class="high") == 1
    assert found.value("pdserve_slo_attainment_ratio", objective="ttft", priority_class="high") == 1
    assert found.value("pdserve_slo_attainment_ratio", objective="tpot", priority_class="high") == 0.5
    assert found.value("pdserve_slo_attainment_ratio", objective="ttft", priority_class="normal") == 0
    assert found.value("pdserve_workers", role="prefill", state="ready") == 1
    assert found.value("pdserve_handoff_bytes_total") == 3 * 4096
    waiting.cancel()


async def test_a_client_that_leaves_is_no_missed_objective(start_router: StartRouter) -> None:
    router = await start_router()
    prefill, _ = await router.pair()
    prefill.is_paused = True
    call = router.generate(text="hello", max_tokens=6, slo=slo(1e6, 1e6))
    await router.until_status(lambda status: status.num_active == 1)
    call.cancel()
    await router.until_idle()
    found = await scraped(router)
    assert found.value("pdserve_requests_ended_total", status="CANCELLED") == 1
    assert found.total("pdserve_slo_requests_total") == 0


async def test_metrics_are_shown_on_loopback_alone_unless_asked_otherwise(start_router: StartRouter) -> None:
    router = await start_router()
    assert router.addresses.metrics.startswith("127.0.0.1:")
    await router.until_status(lambda status: status.metrics_address == router.addresses.metrics)
