"""A file of requests against a real router's HTTP door."""

import json
from pathlib import Path

from http_door import StartHttp
from router_fakes import TOKENIZER, tokens_of

from pdserve.cli.batch import Tally, check, client, run_batch


async def test_a_batch_has_its_answers_and_its_refusals(start_http: StartHttp, tmp_path: Path) -> None:
    door = await start_http()
    source, out = tmp_path / "in", tmp_path / "out"
    bodies = {"good": {"prompt": "hello", "max_tokens": 5}, "bad": {"prompt": "hello", "max_tokens": -5}}
    lines = [{"custom_id": each, "method": "POST", "url": "/v1/completions", "body": bodies[each]} for each in bodies]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check(source) == 2
    async with client(door.router.addresses.http) as http:
        tally = await run_batch(source, out, http, 2, 0, lambda: None)
    assert tally == Tally(num_done=1, num_failed=1)
    results = {line["custom_id"]: line["response"] for line in map(json.loads, out.read_text().splitlines())}
    prompt = TOKENIZER.encode("hello", add_special=False)
    assert results["good"]["status_code"] == 200
    assert results["good"]["body"]["choices"][0]["text"] == TOKENIZER.decode(tokens_of(prompt, 5))
    assert results["bad"]["status_code"] == 400
    assert results["bad"]["body"]["error"]["param"] == "max_tokens"


async def test_a_batch_of_texts_has_their_vectors(start_http: StartHttp, tmp_path: Path) -> None:
    door = await start_http()
    source, out = tmp_path / "in", tmp_path / "out"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": [[3, 4], [5]]}}
    source.write_text(json.dumps(line) + "\n")
    async with client(door.router.addresses.http) as http:
        assert await run_batch(source, out, http, 1, 0, lambda: None) == Tally(num_done=1, num_failed=0)
    body = json.loads(out.read_text())["response"]["body"]
    assert [each["embedding"] for each in body["data"]] == [[2, 3, 4, 1], [1, 5, 5, 1]]
