"""Several names of the one model that a router serves."""

from http_door import StartHttp
from router_fakes import MODEL, collect, error_of

from pdserve.proto.v1 import inference_pb2 as inference


async def test_a_model_answers_to_each_of_its_names_and_to_no_other(start_http: StartHttp) -> None:
    door = await start_http(served_model_aliases=["gpt-4o", "org/model"])
    router = door.router
    names = [MODEL, "gpt-4o", "org/model"]
    listed = await router.inference.ListModels(inference.ListModelsRequest())
    assert [model.name for model in listed.models] == names
    assert [model.id async for model in door.client.models.list()] == names
    assert (await door.client.models.retrieve("org/model")).id == "org/model"
    for name in names:
        await collect(router.generate(model=name, text="a", max_tokens=2))
        answer = await door.client.completions.create(model=name, prompt="a", max_tokens=2)
        assert answer.model == MODEL
    _, text = await error_of(router.generate(model="gpt-5", text="a"))
    assert "'gpt-5' is not served here" in text
