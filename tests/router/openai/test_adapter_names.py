"""Adapters are models to clients: listed with their parent, asked for by name, and unknown once none has them."""

from http_door import StartHttp
from router_fakes import MODEL, collect, error_of

from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link

GOLD = link.Adapter(name="gold", digest=b"gold" * 8)
OF_THE_MODELS_NAME = link.Adapter(name=MODEL, digest=b"oops" * 8)


async def test_an_adapter_is_a_model_to_clients_while_a_worker_has_it(start_http: StartHttp) -> None:
    door = await start_http(pair=False)
    router, adapters = door.router, [GOLD, OF_THE_MODELS_NAME]
    prefill = await router.worker(link.ROLE_PREFILL, "p0", adapters=adapters)
    decode = await router.worker(link.ROLE_DECODE, "d0", adapters=adapters)
    await router.until_status(lambda status: sum(not w.unroutable for w in status.workers) == 2)
    listed = await router.inference.ListModels(inference.ListModelsRequest())
    assert [model.name for model in listed.models] == [MODEL, "gold"]
    cards = {card.id: card.to_dict() async for card in door.client.models.list()}
    assert {name: card["parent"] for name, card in cards.items()} == {MODEL: None, "gold": MODEL}
    assert (await door.client.models.retrieve("gold")).to_dict() == cards["gold"]

    for name, digest in (("gold", GOLD.digest), (MODEL, b"")):
        answer = await door.client.completions.create(model=name, prompt="a", max_tokens=2)
        await collect(router.generate(model=name, text="a", max_tokens=2))
        assert answer.model == name
        placed = [*prefill.prefills[-2:], *decode.decodes[-2:]]
        assert [place.spec.adapter for place in placed] == [digest] * 4

    for worker in (prefill, decode):
        del worker.registration.adapters[:]
        await worker.say(register=worker.registration)
    await router.until_status(lambda status: not any(w.registration.adapters for w in status.workers))
    _, text = await error_of(router.generate(model="gold", text="a"))
    assert text == f"model: 'gold' is not served here; {MODEL!r} is"


async def test_adapters_cannot_be_loaded_yet(start_http: StartHttp) -> None:
    door = await start_http()
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        refused = await door.post(path, lora_name="a", lora_path="/b")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == f"POST {path}: LoRA adapters are not served yet"
