"""An API server of Kubernetes in this process: real HTTP and watch streams, over objects in memory.

Objects are plain JSON. Versions, conflicts, merge patches, finalizers, pages of lists, watches with bookmarks, and the
scale subresource are as the real one has them. `Deployments` (kube_deployments.py) is its controllers. Nothing here
runs pods: tests do what a kubelet does, through the API.
"""

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import h11
from kube_definition import Definition

Json = dict[str, Any]
KINDS = {"pods": "Pod", "deployments": "Deployment", "nodes": "Node", "leases": "Lease", "events": "Event"}
CLUSTER_WIDE = {"nodes", "customresourcedefinitions", "selfsubjectaccessreviews", "namespaces"}
SELFLESS = {"selfsubjectaccessreviews"}  # that are answered and not kept


@dataclass(frozen=True)
class Call:
    """A request, as an account's rights name it."""

    verb: str
    group: str
    resource: str  # with its subresource, as in deployments/scale
    namespace: str
    name: str


@dataclass
class Fault:
    """What befalls requests that match, so many times."""

    method: str  # or WATCH
    part: str  # of the path
    status: int = 0  # answered instead of doing it
    headers: dict[str, str] = field(default_factory=dict)
    lose: str = ""  # request: the connection ends before it is done; answer: after; hang: nothing is answered
    times: int = 1_000_000
    until: asyncio.Event = field(default_factory=asyncio.Event)  # the end of a hanging request


class RefusalError(Exception):
    def __init__(self, status: int, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def body(self) -> Json:
        text = str(self) or self.reason
        return {"kind": "Status", "apiVersion": "v1", "code": self.status, "reason": self.reason, "message": text}


class KubeApi:
    """The server. `changed` is called after each change of an object, with the event's type and the object."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}  # by resource, namespace and name
        self.calls: set[Call] = set()
        self.faults: list[Fault] = []
        self.changed: list[Callable[[], None]] = []
        self.allowed: Callable[[Json], bool] = lambda _: True  # of access reviews
        self.address = ""
        self.definitions: dict[str, Definition] = {}  # of custom resources, by their plural
        self.oldest = 0  # version from which a watch may begin
        self.num_watches = 0  # at this moment
        self.authorization = ""  # of the last request
        self._version = 1
        self._events: deque[tuple[int, str, str, Json]] = deque(maxlen=10_000)
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._cut: asyncio.Event = asyncio.Event()

    # Objects

    def items(self, resource: str, namespace: str = "", selector: str = "") -> list[Json]:
        found = [o for (r, ns, _), o in self.objects.items() if r == resource and namespace in ("", ns)]
        return [o for o in found if matches(o, selector)]

    def store(self, resource: str, item: Json, kind: str = "MODIFIED") -> Json:
        """Keep an object as its next version; one that is deleted and has no finalizer is removed."""
        self._version += 1
        meta = item["metadata"]
        meta["resourceVersion"] = str(self._version)
        key = (resource, meta.get("namespace", ""), meta["name"])
        if "deletionTimestamp" in meta and not meta.get("finalizers"):
            kind = "DELETED"
            self.objects.pop(key, None)
        else:
            self.objects[key] = item
        self._events.append((self._version, kind, resource, json.loads(json.dumps(item))))
        for call in self.changed:
            call()
        task = asyncio.get_running_loop().create_task(self._wake())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return item

    def create(self, resource: str, namespace: str, item: Json) -> Json:
        meta = item.setdefault("metadata", {})
        if "name" not in meta:
            meta["name"] = f"{meta['generateName']}{uuid4().hex[:5]}"
        if (resource, namespace, meta["name"]) in self.objects:
            raise RefusalError(409, "AlreadyExists")
        meta |= {"uid": str(uuid4()), "creationTimestamp": now(), "generation": 1}
        if namespace:
            meta["namespace"] = namespace
        item.setdefault("kind", KINDS.get(resource, resource))
        if resource == "customresourcedefinitions":
            self.definitions[item["spec"]["names"]["plural"]] = Definition(item)
        return self.store(resource, self._defined(resource, item), "ADDED")

    def delete(self, resource: str, namespace: str, name: str) -> Json:
        item = self.find(resource, namespace, name)
        if "deletionTimestamp" not in item["metadata"]:
            item["metadata"]["deletionTimestamp"] = now()
            self.store(resource, item)
        return item

    def find(self, resource: str, namespace: str, name: str) -> Json:
        try:
            return self.objects[resource, namespace, name]
        except KeyError as error:
            raise RefusalError(404, "NotFound", f"{resource} {name} not found") from error

    def _defined(self, resource: str, item: Json) -> Json:
        """Return what is kept of an object, where its definition allows it."""
        if resource not in self.definitions:
            return item
        kept = self.definitions[resource].pruned(item)
        problems = self.definitions[resource].problems(kept)
        if problems:
            raise RefusalError(422, "Invalid", f"{item['metadata']['name']} is invalid: {', '.join(problems)}")
        return kept

    def expire(self) -> None:
        """Forget all versions before this one, so that a watch cannot begin there."""
        self.oldest = self._version

    def set_back(self, version: int) -> None:
        """Go on from a version that has been before, as after a restore of a backup; objects stay as they are."""
        self._version = version
        self._events.clear()

    async def cut_watches(self) -> None:
        """End all watches in the middle of a line."""
        self._cut.set()
        await self._wake()

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()

    # HTTP

    @asynccontextmanager
    async def serving(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[Self]:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=tls)
        host, port = server.sockets[0].getsockname()
        self.address = f"{'http' if tls is None else 'https'}://{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            for fault in self.faults:
                fault.until.set()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except (ConnectionError, asyncio.CancelledError, h11.ProtocolError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http = h11.Connection(h11.SERVER)
        while True:
            request, body = None, b""
            while not isinstance(event := http.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    http.receive_data(await reader.read(65_536))
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return
            assert request is not None
            if not await self._answer(http, writer, request, body):
                return
            if http.our_state is h11.MUST_CLOSE:
                return
            http.start_next_cycle()

    async def _answer(
        self, http: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
    ) -> bool:
        """Answer a request; False where the connection is to end."""
        url = urlsplit(request.target.decode())
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.authorization = dict(request.headers).get(b"authorization", b"").decode()
        method = "WATCH" if query.get("watch") == "true" else request.method.decode()
        fault = self._fault(method, url.path)
        if fault is not None and fault.lose == "hang":
            await fault.until.wait()
            return False
        if fault is not None and fault.lose == "request":
            return False
        try:
            if fault is not None and fault.status:
                raise RefusalError(fault.status, "Fault", f"fault {fault.status}")
            if method == "WATCH":
                await self._watch(http, writer, url.path, query)
                return False
            answer, status = self._do(method, url.path, query, body), 201 if method == "POST" else 200
        except RefusalError as refusal:
            answer, status = refusal.body, refusal.status
        if fault is not None and fault.lose == "answer":
            return False
        content = json.dumps(answer).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        headers |= fault.headers if fault is not None else {}
        writer.write(http.send(h11.Response(status_code=status, headers=list(headers.items()))) or b"")
        writer.write(http.send(h11.Data(data=content)) or b"")
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()
        return True

    def _fault(self, method: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.method in (method, "ANY") and fault.part in path and fault.times > 0:
                fault.times -= 1
                return fault
        return None

    def _do(self, method: str, path: str, query: dict[str, str], body: bytes) -> Json:
        verbs = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
        group, resource, namespace, name, sub = parsed(path)
        verb = "list" if method == "GET" and not name else verbs[method]
        self.calls.add(Call(verb, group, f"{resource}/{sub}" if sub else resource, namespace, name))
        given: Json = json.loads(body) if body else {}
        match verb:
            case "list":
                return self._list(resource, namespace, query)
            case "create" if resource in SELFLESS:
                allowed = self.allowed(given["spec"]["resourceAttributes"])
                return {**given, "status": {"allowed": allowed}}
            case "create":
                return self.create(resource, namespace, given)
            case "delete":
                return self.delete(resource, namespace, name)
        item = self.find(resource, namespace, name)
        if verb == "get":
            return scale_of(item) if sub == "scale" else item
        wanted = given["metadata"].get("resourceVersion") if "metadata" in given else None
        if wanted and wanted != item["metadata"]["resourceVersion"]:
            raise RefusalError(409, "Conflict", "the object has been modified")
        if (uid := given.get("metadata", {}).get("uid")) and uid != item["metadata"]["uid"]:
            raise RefusalError(422, "Invalid", "metadata.uid: field is immutable")
        if sub == "scale":
            item["spec"]["replicas"] = given["spec"]["replicas"]
            item["metadata"]["generation"] += 1
            return scale_of(self.store(resource, item))
        if verb == "update":
            kept = {key: item["metadata"][key] for key in ("uid", "creationTimestamp", "generation")}
            given["metadata"] |= kept
            return self.store(resource, given)
        changed = deepcopy(item)
        merge(changed, {"status": given.get("status")} if sub == "status" else given)
        changed = self._defined(resource, changed)
        return item if changed == item else self.store(resource, changed)

    def _list(self, resource: str, namespace: str, query: dict[str, str]) -> Json:
        items = self.items(resource, namespace, query.get("labelSelector", ""))
        start, limit = int(query.get("continue", "0")), int(query.get("limit", "0")) or len(items)
        meta = {"resourceVersion": str(self._version)}
        if len(items) > start + limit:
            meta["continue"] = str(start + limit)
        return {"kind": "List", "apiVersion": "v1", "metadata": meta, "items": items[start : start + limit]}

    async def _watch(
        self, http: h11.Connection, writer: asyncio.StreamWriter, path: str, query: dict[str, str]
    ) -> None:
        group, resource, namespace, _, _ = parsed(path)
        self.calls.add(Call("watch", group, resource, namespace, ""))
        version = int(query["resourceVersion"])
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        writer.write(http.send(h11.Response(status_code=200, headers=headers)) or b"")

        def line(kind: str, item: Json, end: str = "\n") -> None:
            text = json.dumps({"type": kind, "object": item}) + end
            writer.write(http.send(h11.Data(data=text.encode() if end else text[: len(text) // 2].encode())) or b"")

        if version < self.oldest:
            line("ERROR", RefusalError(410, "Expired", "too old resource version").body)
            writer.write(http.send(h11.EndOfMessage()) or b"")
            return await writer.drain()
        self._cut.clear()
        self.num_watches += 1
        try:
            while True:
                for at, kind, of, item in list(self._events):
                    here = of == resource and namespace in ("", item["metadata"].get("namespace", ""))
                    if at > version and here and matches(item, query.get("labelSelector", "")):
                        line(kind, item)
                if self._version > version and query.get("allowWatchBookmarks") == "true":
                    line("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})
                version = max(version, self._version)  # one of the future is silent until it is reached
                await writer.drain()
                async with self._news:
                    while self._version <= version and not self._cut.is_set():
                        await self._news.wait()
                if self._cut.is_set():
                    line("ADDED", {"metadata": {"name": "cut"}}, end="")
                    await writer.drain()
                    return None
        finally:
            self.num_watches -= 1


def parsed(path: str) -> tuple[str, str, str, str, str]:
    """Return group, resource, namespace, name and subresource of a path."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    group, parts = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    namespace = ""
    if parts[0] == "namespaces" and len(parts) > 2:
        namespace, parts = parts[1], parts[2:]
    resource, name, sub = (*parts, "", "")[:3]
    return group, resource, namespace, name, sub


def scale_of(item: Json) -> Json:
    meta = {key: item["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
    labels = item["spec"]["selector"]["matchLabels"]
    status = {"replicas": item.get("status", {}).get("replicas", 0)}
    status["selector"] = ",".join(f"{key}={value}" for key, value in labels.items())
    return {"kind": "Scale", "metadata": meta, "spec": {"replicas": item["spec"]["replicas"]}, "status": status}


def matches(item: Json, selector: str) -> bool:
    labels = item["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, _, value in pairs(selector))


def pairs(selector: str) -> Iterator[tuple[str, str, str]]:
    for each in filter(None, selector.split(",")):
        yield each.partition("=")


def merge(into: Json, change: Json) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = value


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
