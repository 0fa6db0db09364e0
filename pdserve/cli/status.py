"""Show a cluster's state as a table or as JSON: all of it to its operator, little to everybody."""

import json

import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.cli.stream import naming, plain
from pdserve.measure.client import Access, connect
from pdserve.measure.tables import output
from pdserve.net.operator_client import AdminClient
from pdserve.proto.v1 import admin_pb2 as admin
from pdserve.proto.v1 import inference_pb2 as inference
from pdserve.proto.v1 import link_pb2 as link
from pdserve.proto.v1.inference_pb2_grpc import InferenceServiceStub
from pdserve.protocol.link import ROLES

SERVICE = inference.DESCRIPTOR.services_by_name["InferenceService"].full_name
CALL_TIMEOUT_S = 10.0
MAX_PAIRS = 8  # shown: the slowest
TEXTS, NUMBERS = ("worker", "role", "state"), ("pages", "sequences", "requests")  # columns
LEGEND = (
    "pages: free / cached, which are free too / held / granted / quarantined; sequences: running / waiting; "
    "requests: of this router"
)


async def show_status(client: AdminClient, *, watch: bool, as_json: bool) -> None:
    """Print the state once, or each change of it until interrupted."""
    with naming(client.address):
        if watch:
            await _follow(client, as_json=as_json)
        elif as_json:
            typer.echo(json.dumps(plain(await client.status()), indent=2))
        else:
            output().print(render(await client.status()))


async def _follow(client: AdminClient, *, as_json: bool) -> None:
    if as_json:
        async for status in client.watch():
            typer.echo(json.dumps(plain(status)))
        return
    with Live(auto_refresh=False) as live:
        async for status in client.watch():
            live.update(render(status), refresh=True)


def render(status: admin.ClusterStatus) -> Group:
    """Return the state as a table: one row a worker, pages and sequences in columns, requests below."""
    table = Table(box=None, pad_edge=False)
    for name in (*TEXTS, *NUMBERS):
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    for worker in status.workers:
        load = worker.load
        pages = load.pages_free, load.pages_cached, load.pages_held, load.pages_granted, load.pages_quarantined
        numbers = " / ".join(map(str, pages)), f"{load.num_running} / {load.num_waiting}", str(worker.num_assigned)
        role = str(ROLES.get(worker.registration.role, "?"))
        if worker.registration.role_epoch:
            role += f" (epoch {worker.registration.role_epoch})"
        table.add_row(*map(Text, (worker.registration.worker_id, role, _state(worker), *numbers)))
    ended = ", ".join(f"{count} {name}" for name, count in sorted(status.ended.items())) or "none"
    pairs = [(worker.registration.worker_id, pair) for worker in status.workers for pair in worker.pairs]
    requests = f"requests: {status.num_active} active, {status.num_held} held; ended: {ended}"
    because = ", ".join(f"{count} {cause}" for cause, count in sorted(status.refused_because.items()))
    lines = [f"refused because of: {because}"] if because else []
    lines += [_pair(*pair) for pair in sorted(pairs, key=lambda pair: pair[1].bytes_per_s)[:MAX_PAIRS]]
    lines += [
        f"{registration.worker_id} publishes KV events on {registration.kv_events_endpoint}"
        for registration in (worker.registration for worker in status.workers)
        if registration.kv_events_endpoint
    ]
    title = f"{status.model} on {status.router_id}"
    shown = map(Text, (f"{requests}; placed again: {status.num_replaced}", *lines))
    return Group(Text(title), table, Text(LEGEND, style="dim"), *shown)


def _pair(prefill: str, pair: link.PairMeasured) -> str:
    """Return one line: how fast pages travel from a prefill to a decode worker."""
    rate, slow = f"{pair.bytes_per_s / 1e6:.0f} MB/s", "SLOW " if pair.is_slow else ""
    return f"{slow}{prefill} -> {pair.decode_worker_id}: {rate}, a page in {pair.page_us} us, carrier: {pair.carrier}"


def _state(worker: admin.WorkerStatus) -> str:
    registration = worker.registration
    if not registration.ready:
        return f"loading {registration.load_progress:.0%}"
    if worker.load.draining:
        return f"draining: {worker.load.drain_reason}" if worker.load.drain_reason else "draining"
    if worker.load.failed_steps:
        return f"its last {worker.load.failed_steps} steps failed"
    if worker.load.pages_leaked:
        return f"{worker.load.pages_leaked} pages leaked"
    return f"unroutable: {worker.unroutable}" if worker.unroutable else "ready"


async def show_public_status(endpoint: str, access: Access | None, *, as_json: bool) -> None:
    """Print what a router shows everybody: whether it serves, and its models. CommandError where nobody answers."""
    async with connect(endpoint, access) as channel:
        with naming(endpoint):
            asked = health_pb2.HealthCheckRequest(service=SERVICE)
            check = health_pb2_grpc.HealthStub(channel).Check  # type: ignore[attr-defined]  # its stubs lack it
            health = await check(asked, timeout=CALL_TIMEOUT_S)
            stub = InferenceServiceStub(channel)
            models = (await stub.ListModels(inference.ListModelsRequest(), timeout=CALL_TIMEOUT_S)).models
    serving = health.status == health_pb2.HealthCheckResponse.SERVING
    if as_json:
        shown = {"endpoint": endpoint, "serving": serving, "models": [plain(model) for model in models]}
        typer.echo(json.dumps(shown, indent=2))
        return
    typer.echo(f"{endpoint}: " + ("serving" if serving else "up, but no pair of workers can serve a request"))
    for model in models:
        typer.echo(f"{model.name}: up to {model.max_model_len} tokens, prompt and answer together")
