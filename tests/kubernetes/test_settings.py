"""What a process finds, a pod's account or a KUBECONFIG, leads to the API with credentials that are renewed."""

import asyncio
import base64
import copy
import ssl
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kube_account import kubeconfig, write_kubeconfig
from kube_api import KubeApi
from kubernetes.aio.config import incluster_config

from pdserve.base.errors import ConfigError
from pdserve.kubernetes import client as client_module
from pdserve.kubernetes.client import Client, UnreachableError
from pdserve.launch.authority import Authority
from pdserve.net.certificates import IDENTITY_FILES

PODS = "/api/v1/namespaces/chat/pods"
DAY = timedelta(days=1)


async def connect() -> str:
    async with Client.connected() as client:
        return client.namespace


async def header(api: KubeApi) -> str:
    """Return what a client that connects now shows."""
    async with Client.connected() as client:
        assert client.namespace == "chat"
        await client.pods(PODS)
    return api.authorization


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """Have `ca.crt`, and the certificates `server` and `me` that it signed; return what a server on this machine takes.

    It asks clients for a certificate, and goes on with those that have none.
    """
    authority, context = Authority.new(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.write(tmp_path)
    for name in ("server", "me"):
        authority.write_public(tmp_path / name, ["127.0.0.1"], DAY)
    context.load_cert_chain(*(tmp_path / "server" / name for name in IDENTITY_FILES[:2]))
    context.load_verify_locations(tmp_path / "ca.crt")
    return context


async def test_a_pod_has_the_account_of_its_files_whose_token_is_read_again_each_minute(
    tls: ssl.SSLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("first", encoding="utf-8")
    (tmp_path / "namespace").write_text("ours", encoding="utf-8")
    now = [datetime.now(UTC)]
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: now[0]), timedelta=timedelta)
    monkeypatch.setattr(incluster_config, "datetime", clock)
    for module in (incluster_config, client_module):
        monkeypatch.setattr(module, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    async with KubeApi().serving(tls) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.address.rpartition(":")[2])
        async with Client.connected() as client:
            assert client.namespace == "ours"
            for wait_s, seen in ((0, "first"), (30, "first"), (30, "second")):
                now[0] += timedelta(seconds=wait_s)
                await client.pods(PODS)
                assert api.authorization.split() == ["bearer", seen]
                token.write_text("second", encoding="utf-8")
            token.unlink()
            now[0] += timedelta(seconds=60)
            with pytest.raises(UnreachableError, match="token"):
                await client.pods(PODS)


async def test_in_a_pod_without_a_usable_account_nothing_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("t", encoding="utf-8")
    monkeypatch.setattr(client_module, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="host/port is not set"):
        await connect()


def plugin(runs: Path, lifetime: timedelta) -> dict[str, Any]:
    """Return a user whose plugin writes one letter more at each run, and gives them as token."""
    expires = (datetime.now(UTC) + lifetime).strftime("%Y-%m-%dT%H:%M:%SZ")
    version = "client.authentication.k8s.io/v1"
    script = f"""
import json, os, pathlib
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
runs = pathlib.Path({str(runs)!r})
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
status = {{"token": runs.read_text(), "expirationTimestamp": {expires!r}}}
print(json.dumps({{"apiVersion": {version!r}, "kind": "ExecCredential", "status": status}}))
"""
    return {"exec": {"command": sys.executable, "args": ["-c", script], "apiVersion": version}}


async def test_a_kubeconfig_names_a_token_a_file_of_one_a_password_or_a_plugin(api: KubeApi, file: Path) -> None:
    file.with_name("token").write_text("of the file\n", encoding="utf-8")
    for user, seen in (
        ({"token": "given"}, "Bearer given"),
        ({"tokenFile": "token"}, "Bearer of the file"),
        ({"username": "u", "password": "p"}, "Basic " + base64.b64encode(b"u:p").decode()),
        (plugin(file.with_name("runs"), DAY), "Bearer x"),
    ):
        write_kubeconfig(file, {"server": api.address}, "chat", user)
        assert await header(api) == seen


async def test_a_token_file_and_an_expired_token_of_a_plugin_are_renewed(
    api: KubeApi, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "RENEW_S", 0.0)
    token = file.with_name("token")
    for user, seen in (
        ({"tokenFile": "token"}, "second"),
        (plugin(file.with_name("lasting"), DAY), "x"),
        (plugin(file.with_name("expired"), -DAY), "xx"),
    ):
        write_kubeconfig(file, {"server": api.address}, "chat", user)
        token.write_text("first", encoding="utf-8")
        async with Client.connected() as client:
            token.write_text("second", encoding="utf-8")
            await client.pods(PODS)
            assert api.authorization == f"Bearer {seen}"


async def test_a_kubeconfig_names_certificates_by_relative_path_or_as_data(
    tls: ssl.SSLContext, tmp_path: Path, file: Path
) -> None:
    def data(name: str) -> str:
        return base64.b64encode((tmp_path / name).read_bytes()).decode()

    tls.verify_mode = ssl.CERT_REQUIRED
    by_path = {"client-certificate": "me/tls.crt", "client-key": "me/tls.key"}
    as_data = {"client-certificate-data": data("me/tls.crt"), "client-key-data": data("me/tls.key")}
    async with KubeApi().serving(tls) as api:
        for user, cluster in (
            (by_path, {"certificate-authority": "ca.crt"}),
            (as_data, {"certificate-authority-data": data("ca.crt")}),
            (as_data, {"insecure-skip-tls-verify": True}),
        ):
            write_kubeconfig(file, {"server": api.address, **cluster}, "chat", user)
            assert await header(api) == ""
        write_kubeconfig(file, {"server": api.address}, "chat", as_data)  # nothing says which authority to trust
        with pytest.raises(UnreachableError, match="certificate"):
            await header(api)
        write_kubeconfig(file, {"server": api.address}, "chat", {})
        with pytest.raises(ConfigError, match="its user has no credentials"):
            await connect()


async def test_requests_take_the_proxy_that_the_kubeconfig_or_the_environment_names(
    api: KubeApi, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_kubeconfig(file, {"server": "http://api.invalid", "proxy-url": api.address}, "chat")
    assert await header(api) == "Bearer test"
    write_kubeconfig(file, {"server": "http://api.invalid"}, "chat")
    with pytest.raises(UnreachableError, match="invalid"):
        await header(api)
    monkeypatch.setenv("http_proxy", api.address)
    assert await header(api) == "Bearer test"


async def test_several_files_make_one_kubeconfig(api: KubeApi, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = kubeconfig({"server": api.address}, "chat", {"token": "t"})
    second = file.with_name("second")
    for path, content in ((file, {"users": rest.pop("users")}), (second, rest)):
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
    monkeypatch.setenv("KUBECONFIG", f"{file}:{second}")
    assert await header(api) == "Bearer t"


SERVER = {"server": "https://127.0.0.1:1", "certificate-authority-data": "none"}
WRONG = kubeconfig(SERVER, "chat", {"tokenFile": "none"})
JUNK = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from([[], {}, [{}], [1]])


def places(node: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [above, *(place for key, child in children for place in places(child, (*above, key)))]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(places(WRONG)), st.just("drop") | JUNK)
def test_a_kubeconfig_that_is_wrong_anywhere_is_an_error_of_the_operator(
    file: Path,
    place: tuple[Any, ...],
    junk: Any,  # noqa: ANN401
) -> None:
    root = {"": copy.deepcopy(WRONG)}
    *way, last = ("", *place)
    node: Any = root
    for key in way:
        node = node[key]
    if junk == "drop":
        del node[last]
    else:
        node[last] = junk
    file.write_text(yaml.safe_dump(root.get("")), encoding="utf-8")
    with pytest.raises(ConfigError, match="usable KUBECONFIG"):
        asyncio.run(connect())


@pytest.mark.parametrize("text", [None, "", "{", "a: b: c", "\x00", "[]", "text"])
def test_a_kubeconfig_that_is_none_is_an_error_of_the_operator(file: Path, text: str | None) -> None:
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="usable KUBECONFIG"):
        asyncio.run(connect())
