"""Every end without an answer has one cause, and what clients are told follows from the cause."""

from pathlib import Path

import pytest

from pdserve.protocol.refusal import _TABLE, ERROR_RESPONSES, Cause, Refused
from pdserve.router.frontend.grpc_endpoint import CODES
from pdserve.router.frontend.openai.errors import body_of, headers_for

DOCS = (Path(__file__).parents[2] / "docs" / "use.md").read_text()
WORDS = (Path(__file__).parents[2] / "router" / "frontend" / "static" / "words.js").read_text()
OF_HTTP = [*Cause][[*Cause].index(Cause.NO_ROUTE) :]


def test_each_cause_stands_in_the_table_once() -> None:
    assert sorted(cause for _, causes in _TABLE for cause in causes) == sorted(Cause)


@pytest.mark.parametrize("cause", Cause)
def test_each_cause_is_told_by_each_protocol_and_explained(cause: Cause) -> None:
    refused = Refused(cause, "n: 9 is over the limit of 8")
    assert CODES[refused.status].name == refused.status.value
    assert f'"refused_because":"{cause.value}"'.encode() in body_of(refused)
    assert f"`{cause.value}`" in DOCS
    assert cause in OF_HTTP or f"  {cause.value}: " in WORDS or f" {cause.value}: " in WORDS


@pytest.mark.parametrize("cause", Cause)
def test_clients_of_openais_api_try_again_only_where_that_may_help(cause: Cause) -> None:
    """They do so by themselves after 408, 409, 429 and 5xx."""
    response, headers = ERROR_RESPONSES[cause], dict(headers_for(Refused(cause, "")))
    may_help = response.http in (429, 503) and cause is not Cause.IDLE_CLUSTER
    assert (headers.get(b"x-should-retry") == b"true") is may_help
    assert (b"retry-after-ms" in headers) is (response.http in (429, 503))
    if response.http in (408, 409, 429) or response.http >= 500:
        assert b"x-should-retry" in headers
    assert dict(headers_for(Refused(cause, "", retry_after_s=2.5))).get(b"retry-after-ms", b"2500") == b"2500"
