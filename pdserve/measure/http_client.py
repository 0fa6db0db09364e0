"""Sends the requests of a measurement over HTTP: POST /v1/completions with token ids, streamed."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import msgspec
from google.protobuf.json_format import ParseDict

from pdserve.base.clock import Clock, MonotonicClock
from pdserve.base.errors import CommandError
from pdserve.measure.client import Access, OpenLoop, take_ledger
from pdserve.measure.outcomes import Outcome
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.protocol.refusal import ERROR_RESPONSES, Status

TIMEOUT_S = 600.0  # of silence, which comments break every 15 s
CONNECT_TIMEOUT_S = 10.0
_NAMES = {response.http: response.status.value for response in ERROR_RESPONSES.values()}
_EVENT = b"data: "


class HttpClient(OpenLoop):
    """Connections over which a measurement sends its requests: one for each that is under way."""

    def __init__(self, http: httpx2.AsyncClient, clock: Clock) -> None:
        super().__init__(clock)
        self._http = http

    async def vocab_size(self) -> int:
        """Return the size of the served model's vocabulary."""
        try:
            response = await self._http.get("/tokenizer_info")
            response.raise_for_status()
        except httpx2.HTTPError as error:
            raise CommandError(f"{self._http.base_url}: {error or type(error).__name__}") from error
        size: int = response.json()["vocab_size"]
        return size

    async def _receive(self, request: inference.GenerateRequest, outcome: Outcome, began_s: float) -> None:
        try:
            async with self._http.stream("POST", "/v1/completions", content=_body(request)) as response:
                if response.status_code == 200:
                    async for event in _events(response):
                        self._take_event(outcome, event, began_s)
                else:
                    _refuse(outcome, response, await response.aread())
        except (httpx2.HTTPError, ssl.SSLError) as error:
            outcome.status, outcome.detail = Status.UNAVAILABLE.value, str(error) or type(error).__name__

    def _take_event(self, outcome: Outcome, event: Any, began_s: float) -> None:  # noqa: ANN401 - JSON
        if error := event.get("error"):
            outcome.status, outcome.detail = Status.INTERNAL.value, error["message"]
            return
        self._take(outcome, [(each["index"], each.get("token_ids") or ()) for each in event["choices"]], began_s)
        if ledger := event.get("pdserve"):
            outcome.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            steps = [{"name": name, "at_ms": at_ms} for name, at_ms in ledger["timings_ms"].items()]
            take_ledger(outcome, ParseDict({**ledger, "steps": steps}, inference.Ledger(), ignore_unknown_fields=True))


def _body(request: inference.GenerateRequest) -> bytes:
    sampling, slo = request.sampling, request.slo
    objectives = {name: getattr(slo, name) for name in ("ttft_ms", "tpot_ms") if slo.HasField(name)}
    return msgspec.json.encode(
        {
            "prompt": list(request.token_ids.ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "tenant": request.tenant or None,
            "slo": objectives or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    )


async def _events(response: httpx2.Response) -> AsyncIterator[Any]:
    """Yield what the events of a stream hold, as they come."""
    rest = b""
    async for data in response.aiter_raw():
        *whole, rest = (rest + data).split(b"\n\n")
        for event in whole:
            if event.startswith(_EVENT + b"{"):
                yield msgspec.json.decode(event[len(_EVENT) :])


def _refuse(outcome: Outcome, response: httpx2.Response, body: bytes) -> None:
    """Take what a refusal says."""
    outcome.status = _NAMES.get(response.status_code, Status.INTERNAL.value)
    try:
        error = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, TypeError, KeyError):  # of something between here and the router
        outcome.detail = f"HTTP {response.status_code}"
        return
    outcome.detail = error["message"]
    if "predicted_ttft_ms" in error:
        outcome.predicted_ttft_s = error["predicted_ttft_ms"] / 1e3
    if "retry-after-ms" in response.headers:
        outcome.retry_after_s = float(response.headers["retry-after-ms"]) / 1e3


@asynccontextmanager
async def connected(url: str, access: Access | None = None) -> AsyncIterator[HttpClient]:
    """Be a client of a router's HTTP port, scheme://host:port, for the length of the block."""
    key = {"authorization": f"Bearer {access.api_key}"} if access is not None and access.api_key else {}
    async with httpx2.AsyncClient(
        base_url=url,
        headers={"content-type": "application/json", **key},
        verify=ssl.create_default_context(cafile=None if access is None else access.ca_file),
        timeout=httpx2.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,  # a proxy would be measured, too
    ) as http:
        yield HttpClient(http, MonotonicClock())
