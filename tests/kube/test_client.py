"""The client beside a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tandem.kube import ApiError, Client, KubeError, NoCluster, Object, Reflector, connect
from tandem.kube import client as kube_client
from tandem.kube.resources import CONFIG_MAP, DEPLOYMENT, NAMESPACE, POD

from ..api.conftest import ApiServer

ME = "tester"


def config_map(
    namespace: str, name: str = "a", data: dict[str, str] | None = None, **metadata: Any
) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "data": data or {},
    }


def version(found: Object) -> str:
    told: str = found["metadata"]["resourceVersion"]
    return told


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "PAGE", 3)


async def test_what_is_not_there_is_none(client: Client, namespace: str) -> None:
    assert await client.get(CONFIG_MAP, "a", namespace) is None


async def test_a_list_is_whole_however_many_pages_it_has(
    client: Client, namespace: str, small_pages: None
) -> None:
    for number in range(7):
        labels = {"odd": "yes" if number % 2 else "no"}
        await client.create(config_map(namespace, f"m{number}", labels=labels), CONFIG_MAP, manager=ME)
    before = client.sent.total()
    listing = await client.list(CONFIG_MAP, namespace)
    assert [item["metadata"]["name"] for item in listing.items] == [f"m{number}" for number in range(7)]
    assert client.sent.total() - before == 3
    assert {(item["apiVersion"], item["kind"]) for item in listing.items} == {("v1", "ConfigMap")}
    odd = await client.list(CONFIG_MAP, namespace, labels="odd=yes")
    assert [item["metadata"]["name"] for item in odd.items] == ["m1", "m3", "m5"]
    named = await client.list(CONFIG_MAP, namespace, fields="metadata.name=m4")
    assert [item["metadata"]["name"] for item in named.items] == ["m4"]
    before = client.sent.total()
    beginning = await client.list(CONFIG_MAP, namespace, whole=False)
    assert [item["metadata"]["name"] for item in beginning.items] == ["m0", "m1", "m2"]
    assert client.sent.total() - before == 1


async def test_metadata_alone_can_be_listed_and_watched(client: Client, namespace: str) -> None:
    await client.create(config_map(namespace, data={"k": "v"}), CONFIG_MAP, manager=ME)
    listing = await client.list(CONFIG_MAP, namespace, metadata_only=True)
    (item,) = listing.items
    assert "data" not in item
    async with aclosing(
        client.watch(CONFIG_MAP, namespace, version=listing.version, metadata_only=True)  # type: ignore[type-var]
    ) as watch:
        assert await anext(watch) == ("OPEN", {})
        await client.patch(CONFIG_MAP, "a", namespace, {"data": {"k": "w"}}, manager=ME)
        kind, found = await anext(watch)
    assert (kind, found["metadata"]["name"]) == ("MODIFIED", "a")
    assert "data" not in found


async def test_a_watch_tells_each_change_after_its_version(client: Client, namespace: str) -> None:
    await client.create(config_map(namespace, "old"), CONFIG_MAP, manager=ME)
    since = (await client.list(CONFIG_MAP, namespace)).version
    labels = {"seen": "yes"}
    await client.create(config_map(namespace, "new", labels=labels), CONFIG_MAP, manager=ME)
    await client.create(config_map(namespace, "unseen"), CONFIG_MAP, manager=ME)
    await client.patch(CONFIG_MAP, "new", namespace, {"data": {"k": "v"}}, manager=ME)
    await client.delete(CONFIG_MAP, "new", namespace)
    told = []
    async with aclosing(
        client.watch(CONFIG_MAP, namespace, version=since, labels="seen=yes")  # type: ignore[type-var]
    ) as watch:
        async for kind, found in watch:
            told.append((kind, found.get("metadata", {}).get("name"), found.get("data")))
            if kind == "DELETED":
                break
    assert told == [
        ("OPEN", None, None),
        ("ADDED", "new", None),
        ("MODIFIED", "new", {"k": "v"}),
        ("DELETED", "new", {"k": "v"}),
    ]


async def test_a_watch_of_one_name_tells_of_no_other(client: Client, namespace: str) -> None:
    since = (await client.list(CONFIG_MAP, namespace)).version
    await client.create(config_map(namespace, "another"), CONFIG_MAP, manager=ME)
    await client.create(config_map(namespace, "mine"), CONFIG_MAP, manager=ME)
    async with aclosing(
        client.watch(CONFIG_MAP, namespace, version=since, fields="metadata.name=mine")  # type: ignore[type-var]
    ) as watch:
        assert [await anext(watch) for _ in range(2)][1][1]["metadata"]["name"] == "mine"


async def test_applying_the_same_again_writes_nothing(client: Client, namespace: str) -> None:
    desired = config_map(namespace, data={"k": "v"})
    first = await client.apply(desired, CONFIG_MAP, manager=ME)
    assert version(await client.apply(desired, CONFIG_MAP, manager=ME)) == version(first)
    changed = await client.apply(config_map(namespace, data={"k": "w"}), CONFIG_MAP, manager=ME)
    assert version(changed) != version(first)
    assert changed["data"] == {"k": "w"}


async def test_applying_takes_back_what_another_wrote_unless_asked_not_to(
    client: Client, namespace: str
) -> None:
    desired = config_map(namespace, data={"k": "v"})
    await client.apply(desired, CONFIG_MAP, manager=ME)
    await client.patch(CONFIG_MAP, "a", namespace, {"data": {"k": "theirs", "l": "theirs"}}, manager="they")
    with pytest.raises(ApiError) as caught:
        await client.apply(desired, CONFIG_MAP, manager=ME, force=False)
    assert caught.value.conflict
    assert "they" in caught.value.message
    made = await client.apply(desired, CONFIG_MAP, manager=ME)
    assert made["data"] == {"k": "v", "l": "theirs"}


async def test_who_writes_an_older_version_is_told_of_the_conflict(client: Client, namespace: str) -> None:
    read = await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    await client.patch(CONFIG_MAP, "a", namespace, {"data": {"k": "theirs"}}, manager="they")
    with pytest.raises(ApiError) as replaced:
        await client.replace({**read, "data": {"k": "mine"}}, CONFIG_MAP, manager=ME)
    change = {"metadata": {"resourceVersion": version(read)}, "data": {"k": "mine"}}
    with pytest.raises(ApiError) as patched:
        await client.patch(CONFIG_MAP, "a", namespace, change, manager=ME)
    assert replaced.value.conflict
    assert patched.value.conflict
    found = await client.get(CONFIG_MAP, "a", namespace)
    assert found is not None
    assert found["data"] == {"k": "theirs"}
    mine = await client.replace({**found, "data": {"k": "mine"}}, CONFIG_MAP, manager=ME)
    assert mine["data"] == {"k": "mine"}


async def test_creating_what_is_there_is_a_conflict(client: Client, namespace: str) -> None:
    await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    with pytest.raises(ApiError) as caught:
        await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    assert (caught.value.conflict, caught.value.reason) == (True, "AlreadyExists")


async def test_only_the_object_that_is_meant_is_deleted(client: Client, namespace: str) -> None:
    first = await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    await client.delete(CONFIG_MAP, "a", namespace)
    await client.delete(CONFIG_MAP, "a", namespace)  # gone already
    second = await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    await client.delete(CONFIG_MAP, "a", namespace, uid=first["metadata"]["uid"])
    assert await client.get(CONFIG_MAP, "a", namespace) is not None
    await client.delete(CONFIG_MAP, "a", namespace, uid=second["metadata"]["uid"])
    assert await client.get(CONFIG_MAP, "a", namespace) is None


async def test_a_subresource_is_written_apart(client: Client, namespace: str) -> None:
    containers = [{"name": "c", "image": "i"}]
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": namespace},
        "spec": {"containers": containers},
    }
    await client.create(made, POD, manager=ME)
    status = {"status": {"podIP": "10.0.0.7", "podIPs": [{"ip": "10.0.0.7"}]}}
    found = await client.patch(POD, "p", namespace, status, manager=ME, subresource="status")
    assert found["status"]["podIP"] == "10.0.0.7"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"data": 7}, "data"), ({"metadata": {"labels": {"a b": "c"}}}, "a b")],
)
async def test_an_invalid_object_is_refused_for_good(
    client: Client, namespace: str, change: Object, said: str
) -> None:
    await client.create(config_map(namespace), CONFIG_MAP, manager=ME)
    with pytest.raises(ApiError, match=said) as caught:
        await client.patch(CONFIG_MAP, "a", namespace, change, manager=ME)
    assert caught.value.final


async def test_objects_of_the_whole_cluster_have_no_namespace(client: Client, namespace: str) -> None:
    found = await client.get(NAMESPACE, namespace)
    assert found is not None
    assert found["status"]["phase"] == "Active"


# The API server restarts


class Changes:
    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()

    def __call__(self, before: Object | None, after: Object | None) -> None:
        found = after or before
        assert found is not None
        data = found.get("data") if after is not None else "gone"
        self.told.put_nowait((found["metadata"]["name"], data))


@asynccontextmanager
async def reflecting(client: Client, namespace: str) -> AsyncIterator[tuple[Reflector, Changes]]:
    changes = Changes()
    reflector = Reflector(client, CONFIG_MAP, changes, namespace=namespace, longest_pause=1.0)
    task = asyncio.create_task(reflector.run())
    try:
        await reflector.synced.wait()
        yield reflector, changes
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_copy_outlives_the_api_server_and_misses_no_change(
    bare_api_server: ApiServer, client: Client, namespace: str
) -> None:
    await client.create(config_map(namespace, "stays"), CONFIG_MAP, manager=ME)
    await client.create(config_map(namespace, "goes"), CONFIG_MAP, manager=ME)
    async with reflecting(client, namespace) as (reflector, changes):
        assert {(await changes.told.get())[0] for _ in range(2)} == {"stays", "goes"}
        with bare_api_server.away():
            while reflector.trouble is None:
                await asyncio.sleep(0.05)
            assert len(reflector) == 2
            assert reflector.age > 0
        await client.create(config_map(namespace, "comes", {"k": "v"}), CONFIG_MAP, manager=ME)
        await client.delete(CONFIG_MAP, "goes", namespace)
        told = [await changes.told.get() for _ in range(2)]
        assert sorted(told) == [("comes", {"k": "v"}), ("goes", "gone")]
        assert reflector.trouble is None
        assert changes.told.empty(), "what stayed was not told again"
    # An API server knows no version from before it started.
    with pytest.raises(ApiError) as caught:
        async for _ in client.watch(CONFIG_MAP, namespace, version="1"):
            pass
    assert caught.value.gone


# Without an API server


def answering(*answers: httpx2.Response | Exception) -> Client:
    """A client of a server that answers this."""
    left = list(answers)

    def answer(request: httpx2.Request) -> httpx2.Response:
        given = left.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    return Client(httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://api"))


async def test_a_guarded_client_reads_but_sends_no_write_that_is_forbidden() -> None:
    def forbid() -> None:
        raise KubeError("not now")

    object_ = {"metadata": {"name": "a", "resourceVersion": "1"}}
    client = answering(httpx2.Response(200, json=object_), httpx2.Response(200, json={"metadata": {}}))
    guarded = client.guarded(forbid)
    assert await guarded.get(CONFIG_MAP, "a", "ns") == object_
    assert (await guarded.list(CONFIG_MAP, "ns")).items == []
    for write in (
        guarded.apply(object_, CONFIG_MAP, manager=ME),
        guarded.create(object_, CONFIG_MAP, manager=ME),
        guarded.replace(object_, CONFIG_MAP, manager=ME),
        guarded.patch(CONFIG_MAP, "a", "ns", {}, manager=ME),
        guarded.delete(CONFIG_MAP, "a", "ns"),
    ):
        with pytest.raises(KubeError, match="not now"):
            await write
    assert client.sent == {"get": 1, "list": 1}, "counted together"


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.ConnectError("refused"),
        httpx2.ReadTimeout(""),
        httpx2.Response(200, content=b"<html>"),
        httpx2.Response(200, json=[]),
        httpx2.Response(200, json={}),
        httpx2.Response(200, json={"metadata": {}, "items": {}}),
        httpx2.Response(200, json={"metadata": {}, "items": [{"metadata": {"name": "a"}}]}),
        httpx2.Response(200, json={"metadata": {}, "items": ["a"]}),
    ],
    ids=lambda answer: str(getattr(answer, "content", type(answer).__name__)),
)
async def test_what_is_no_answer_to_a_list_is_an_error(answer: Any) -> None:
    with pytest.raises(KubeError, match=r"^GET /apis/apps/v1/namespaces/ns/deployments: .") as caught:
        await answering(answer).list(DEPLOYMENT, "ns")
    assert not isinstance(caught.value, ApiError)


@pytest.mark.parametrize("answer", [{}, {"metadata": None}, {"metadata": {"name": "a"}}, {"kind": "Status"}])
async def test_what_is_no_object_is_no_answer_to_a_request_for_one(answer: Any) -> None:
    client = answering(*[httpx2.Response(200, json=answer)] * 5)
    made = {"metadata": {"name": "a", "namespace": "ns"}}
    asked = (
        client.get(DEPLOYMENT, "a", "ns"),
        client.apply(made, DEPLOYMENT, manager=ME),
        client.create(made, DEPLOYMENT, manager=ME),
        client.replace(made, DEPLOYMENT, manager=ME),
        client.patch(DEPLOYMENT, "a", "ns", {}, manager=ME),
    )
    for error in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(error, KubeError)
        assert not isinstance(error, ApiError)
        assert "the answer is no object" in str(error)


async def test_a_list_of_nothing_is_empty() -> None:
    """Some servers give null."""
    answer = httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": None})
    listing = await answering(answer).list(DEPLOYMENT)
    assert (listing.items, listing.version) == ([], "5")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"type": "ADDED", "object": null}',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}}',
        b'{"type": "BOOKMARK", "object": {}}',
        b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": 7}}}',
    ],
)
async def test_what_is_no_event_is_an_error(line: bytes) -> None:
    client = answering(httpx2.Response(200, content=line + b"\n"))
    with pytest.raises(KubeError, match="GET /api/v1/namespaces/ns/pods: ") as caught:
        async for _ in client.watch(POD, "ns", version="1"):
            pass
    assert not isinstance(caught.value, ApiError)


class Silent(httpx2.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}\n'
        raise httpx2.ReadTimeout("")


async def test_a_watch_that_falls_silent_ends_and_is_no_failure() -> None:
    """A server may have nothing to say. Whether it is there, opening the watch again tells."""
    client = answering(httpx2.Response(200, stream=Silent()))
    told = [kind async for kind, _ in client.watch(POD, "ns", version="1")]
    assert told == ["OPEN", "BOOKMARK"]


async def test_a_watch_that_is_not_answered_is_a_failure() -> None:
    client = answering(httpx2.ReadTimeout(""))
    with pytest.raises(KubeError, match="ReadTimeout"):
        async for _ in client.watch(POD, "ns", version="1"):
            pass


@pytest.mark.parametrize(
    ("answer", "reason", "message"),
    [
        (
            httpx2.Response(403, json={"reason": "Forbidden", "message": "you may not"}),
            "Forbidden",
            "you may not",
        ),
        (httpx2.Response(502, content=b"<html>bad gateway"), "", "<html>bad gateway"),
        (httpx2.Response(500, json=[]), "", "[]"),
    ],
)
async def test_a_refusal_has_the_servers_words(answer: httpx2.Response, reason: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        await answering(answer).get(POD, "a", "ns")
    assert (caught.value.reason, str(caught.value)) == (reason, message)
    assert caught.value.final is (reason == "Forbidden")


async def test_a_log_is_text_of_any_bytes() -> None:
    client = answering(httpx2.Response(200, content=b"a line\n\xff"))
    assert await client.log("a", "ns", "engine", most_bytes=10) == "a line\n\ufffd"


async def test_a_pod_that_is_on_no_node_has_no_log(client: Client, namespace: str) -> None:
    made: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a", "namespace": namespace},
        "spec": {"containers": [{"name": "engine", "image": "x"}]},
    }
    await client.create(made, POD, manager=ME)
    assert await client.log("a", namespace, "engine", most_bytes=10) == ""
    with pytest.raises(ApiError, match="other"):
        await client.log("a", namespace, "other", most_bytes=10)


async def test_a_configuration_that_names_no_cluster_is_told(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("apiVersion: v1\nkind: Config\n")
    (tmp_path / "text").write_text("a text")
    (tmp_path / "garbage").write_text("{")
    for path in (tmp_path / name for name in ("config", "text", "garbage", "none")):
        with pytest.raises(NoCluster):
            async with connect(path):
                pass
