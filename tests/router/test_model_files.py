"""A router without the model counts with the tokenizer files that its engines serve."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.config import RouterConfig
from tandem.http import Client, Origin
from tandem.operator.nginx import nginx_conf
from tandem.operator.routing import router_config
from tandem.prompt import FILES, MARKS
from tandem.router.app import running
from tandem.router.body import Body
from tandem.router.classify import Api
from tandem.router.counting import Counter
from tandem.router.counting_places import Place
from tandem.router.engines import Engine, EngineRole
from tandem.router.fleet import Fleet
from tandem.router.helper_process import Unavailable
from tandem.router.legs import Legs
from tandem.router.model_fetch import Bounds
from tandem.router.model_files import ModelFiles, Pauses
from tandem.sim import EngineSpec, parse
from tandem.sim import Fleet as SimFleet

from ..operator.endpoints import VARIANTS, planned
from ..operator.nginx import proxy
from .conftest import Endpoint, Start
from .fakes import FakeEngine, engines, eventually
from .model_fakes import LONGER, PATH, ModelPod, in_loop, make_model

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi, you"}], "max_tokens": 1}
CHAT_TOKENS = 8  # user h ##i , y ##o ##u <|end|>
BOUNDS = Bounds(silence=0.2, whole=5.0)


class Router:
    """A router, and the model pods that it fetches from."""

    def __init__(self, endpoint: Endpoint, pods: list[ModelPod]) -> None:
        self.endpoint = endpoint
        self.pods = pods

    async def told(self) -> dict[str, Any]:
        admin = self.endpoint.app.admin
        assert admin is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{admin.port}/engines")
        told: dict[str, Any] = answer.json()["modelFiles"]
        return told

    async def until(self, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        async def seen() -> bool:
            return bool(holds(await self.told()))

        await eventually(seen)
        return await self.told()

    async def here(self) -> None:
        await self.until(lambda told: told["countedHere"])

    async def tokens(self, body: dict[str, Any] | None = None) -> int:
        """How many tokens the router counts."""
        body = body or CHAT
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await self.endpoint.post(body, path, x_tandem_explain="1")
        assert answer.status_code == 200, answer.text
        return int(answer.headers["x-tandem-prompt-tokens"])

    async def asks(self, body: dict[str, Any] | None = None) -> int:
        """How many engines are asked to count a prompt."""
        before = sum(len(pod.engine.tokenized) for pod in self.pods)
        await self.tokens(body)
        return sum(len(pod.engine.tokenized) for pod in self.pods) - before

    def restart(self, pod: ModelPod) -> None:
        """The engine is another process, with what its folder holds now."""
        pod.restart()
        engine = self.endpoint.of(pod.engine)
        self.endpoint.app.fleet.lost(engine, "restarted")
        engine.alarm.set()


Fetching = Callable[..., Awaitable[Router]]


@pytest.fixture
def fetching(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetching:
    """`await fetching(decode=2, templates=[…], before=…)`: a router and pods, each with a folder of its own.

    `templates`: of prefillers, then decoders; one is for all. `before` may change the pods before the router
    sees them. The rest is for the router."""

    async def fetching_from(
        *,
        templates: Sequence[str] = (),
        before: Callable[[list[ModelPod]], None] = lambda pods: None,
        bounds: Bounds = BOUNDS,
        load: Callable[..., Awaitable[Place]] = in_loop,
        prefill: int = 0,
        **options: Any,
    ) -> Router:
        pods: list[ModelPod] = []

        def make(prefillers: list[FakeEngine], decoders: list[FakeEngine]) -> None:
            for i, fake in enumerate([*prefillers, *decoders]):
                template = [templates[i % len(templates)]] if templates else []
                pods.append(ModelPod(fake, make_model(tmp_path / fake.name, *template)))
            before(pods)

        impatient = partial(ModelFiles, bounds=bounds, pauses=Pauses(0.02, 0.1), start=load)
        monkeypatch.setattr("tandem.router.app.ModelFiles", impatient)
        endpoint = await start(
            prefill=prefill,
            before=make,
            model_files_path=PATH,
            admin_port=0,
            explain=True,
            routing_threshold=1000,
            **options,
        )
        return Router(endpoint, pods)

    return fetching_from


def said(caplog: pytest.LogCaptureFixture, text: str, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level and text in r.getMessage()]


async def test_engines_count_until_their_files_are_here_and_nobody_waits(fetching: Fetching) -> None:
    router = await fetching(before=lambda pods: pods[0].open.clear(), bounds=Bounds())
    (pod,) = router.pods
    assert not (await router.told())["countedHere"]
    assert await router.tokens() == CHAT_TOKENS
    assert await router.asks() == 1
    pod.open.set()
    await router.here()
    assert await router.asks() == 0
    assert await router.tokens() == CHAT_TOKENS
    assert await router.tokens({"model": "m", "prompt": "hi"}) == 2


async def test_only_names_of_a_fixed_list_are_asked_for_and_each_once(fetching: Fetching) -> None:
    router = await fetching(decode=2)
    await router.here()
    await router.until(lambda told: len(set(told["engines"].values())) == 1)
    wanted = sorted([*(("GET", name) for name in FILES), *(("HEAD", name) for name in MARKS)])
    assert [sorted(pod.asked) for pod in router.pods] == [wanted, wanted]


async def test_the_admin_port_tells_what_is_counted_with(fetching: Fetching) -> None:
    router = await fetching(decode=2)
    told = await router.until(lambda told: told["countedHere"] and len(set(told["engines"].values())) == 1)
    assert told["why"] is None
    assert set(told["engines"].values()) == {told["files"]}


FAILURES: dict[str, tuple[tuple[int, list[tuple[bytes, bytes]], bytes], str]] = {
    "none": ((404, [], b""), "there are none at /tandem/model/"),
    "larger than the limit": ((200, [], b"{" + b" " * 5000), "larger than 4000 bytes"),
    "a redirect": ((302, [(b"location", b"http://127.0.0.1:9/x")], b""), "HTTP 302"),
    "an error": ((500, [], b""), "HTTP 500"),
    "not changed, unasked": ((304, [], b""), "HTTP 304"),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_what_cannot_be_fetched_is_said_once_and_tried_again_and_requests_do_not_notice(
    kind: str, fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    answer, why = FAILURES[kind]

    def fail(pods: list[ModelPod]) -> None:
        pods[0].answer = answer

    router = await fetching(before=fail, bounds=Bounds(largest=4000))
    (pod,) = router.pods
    await router.until(lambda told: [each for each in told["engines"].values() if why in each])
    seen = len(pod.asked)

    async def again() -> bool:
        return len(pod.asked) > seen + 2

    await eventually(again)
    assert await router.asks() == 1
    assert len(said(caplog, "cannot be fetched")) == 1
    pod.answer = None
    # Of a model whose files are small enough.
    if kind != "larger than the limit":
        await router.here()
        assert await router.asks() == 0


async def test_a_server_that_hangs_is_left_and_does_not_keep_others_from_being_asked(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    router = await fetching(decode=2, before=lambda pods: pods[0].open.clear())
    hangs = router.pods[0].engine.url
    await router.until(lambda told: told["countedHere"] and "no response" in told["engines"][hangs])
    assert await router.asks() == 0
    router.pods[0].open.set()
    await router.until(lambda told: len(set(told["engines"].values())) == 1)
    assert len(said(caplog, "cannot be fetched")) == 1


async def test_a_server_that_is_slow_for_ever_is_left(fetching: Fetching) -> None:
    router = await fetching(before=lambda pods: pods[0].open.clear(), bounds=Bounds(silence=30, whole=0.1))
    told = await router.until(lambda told: "within 0.1 s" in next(iter(told["engines"].values())))
    assert not told["countedHere"]
    assert await router.asks() == 1


async def test_engines_that_serve_different_files_count_themselves_until_they_agree(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    """A rollout: the old engine is here until the new one has proved itself."""
    router = await fetching(decode=2)
    old, new = router.pods
    await router.here()
    make_model(new.folder, LONGER)
    router.restart(new)
    told = await router.until(lambda told: "different" in (told["why"] or ""))
    assert told["files"] is None
    assert len(set(told["engines"].values())) == 2
    assert await router.asks() == 1
    (error,) = said(caplog, "different model files", logging.ERROR)
    assert "(chat_template.jinja)" in error
    assert old.engine.url in error
    assert new.engine.url in error
    make_model(old.folder, LONGER)
    router.restart(old)
    await router.here()
    assert await router.asks() == 0
    assert await router.tokens() == CHAT_TOKENS + 1


async def test_engines_agree_again_when_the_other_has_left(fetching: Fetching) -> None:
    router = await fetching(decode=2, templates=["{{ messages[0].content }}", LONGER])
    await router.until(lambda told: "different" in (told["why"] or ""))
    fleet = router.endpoint.app.fleet
    fleet.remove(router.endpoint.of(router.pods[0].engine))
    await router.here()
    assert await router.tokens() == CHAT_TOKENS + 1


async def test_prefillers_have_a_say_for_they_render_the_same_prompts(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    router = await fetching(prefill=1, decode=1, templates=[LONGER, "{{ messages[0].content }}"])
    await router.until(lambda told: "different" in (told["why"] or ""))
    assert await router.asks() == 1


async def test_an_engine_that_comes_back_with_another_template_counts_by_it_and_sends_only_that(
    fetching: Fetching,
) -> None:
    router = await fetching(bounds=Bounds())
    (pod,) = router.pods
    await router.here()
    assert await router.tokens() == CHAT_TOKENS
    (pod.folder / "chat_template.jinja").write_text(LONGER)
    pod.sent.clear()
    pod.open.clear()
    first = (await router.told())["files"]
    router.restart(pod)
    await router.endpoint.ready()
    assert await router.tokens() == CHAT_TOKENS + 1, "also before the new files are here"
    pod.open.set()
    await router.until(lambda told: told["countedHere"] and told["files"] != first)
    assert await router.asks() == 0
    assert await router.tokens() == CHAT_TOKENS + 1
    assert pod.sent == ["chat_template.jinja"], "the rest is as its ETag says"


@pytest.mark.parametrize(
    ("tag", "sent"),
    [(b'"%d-%x"', 0), (b'W/"%d-%x"', 4), (b'"\xff%d-%x"', 4), (b"%d-%x", 4)],
    ids=["strong", "weak", "no text", "not quoted"],
)
async def test_an_engine_that_comes_back_as_it_was_changes_nothing(
    tag: bytes, sent: int, fetching: Fetching
) -> None:
    """With an ETag that does not promise equal bytes, files are fetched again, and are the same."""

    def tagged(pods: list[ModelPod]) -> None:
        pods[0].tag = tag

    router = await fetching(before=tagged)
    (pod,) = router.pods
    await router.here()
    first = await router.told()
    pod.sent.clear()
    pod.asked.clear()
    router.restart(pod)

    async def revalidated() -> bool:
        return len(pod.asked) == len(FILES) + len(MARKS)

    await eventually(revalidated)
    await router.until(lambda told: told == first)
    assert len(pod.sent) == sent


async def test_a_cache_that_cannot_be_made_leaves_counting_to_the_engines(
    fetching: Fetching, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    router = await fetching(model_files_cache=str(tmp_path / "file" / "cache"))
    await router.until(lambda told: "cannot be kept" in (told["why"] or ""))
    assert await router.asks() == 1
    assert len(said(caplog, "cannot be kept", logging.ERROR)) == 1


async def test_what_must_not_happen_ends_counting_here_and_not_the_router(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(config: RouterConfig, model: Path) -> Place:
        raise RuntimeError("a bug")

    router = await fetching(load=breaks)

    async def logged() -> bool:
        return bool(said(caplog, "following the engines' model files"))

    await eventually(logged)
    assert await router.asks() == 1


async def test_files_that_are_not_what_an_engine_counts_with_are_not_used(
    fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    def otherwise(pods: list[ModelPod]) -> None:
        pods[1].off = 1

    router = await fetching(decode=2, before=otherwise)
    liar = router.pods[1]
    told = await router.until(lambda told: "counts otherwise" in (told["why"] or ""))
    assert liar.engine.url in told["why"]
    assert await router.asks() == 1
    assert "--chat-template" in said(caplog, "token counts differ", logging.ERROR)[0]
    compared = len(said(caplog, "token counts differ"))
    router.restart(router.pods[0])  # which proves nothing of the other
    await router.endpoint.ready()
    assert len(said(caplog, "token counts differ")) == compared
    liar.off = 0
    router.restart(liar)
    await router.here()
    assert await router.asks() == 0


async def test_an_engine_that_joins_and_counts_otherwise_ends_counting_here(fetching: Fetching) -> None:
    router = await fetching(decode=2)
    await router.here()
    router.pods[1].off = 1
    router.restart(router.pods[1])
    await router.until(lambda told: "counts otherwise" in (told["why"] or ""))
    router.pods[1].off = 0
    router.restart(router.pods[1])
    await router.here()


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "Nonesuch"}}', "[]"])
async def test_files_that_cannot_be_used_leave_counting_to_the_engines(
    content: str, fetching: Fetching, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(pods: list[ModelPod]) -> None:
        (pods[0].folder / "tokenizer.json").write_text(content)

    router = await fetching(before=spoil)
    told = await router.until(lambda told: "tokenizer.json" in (told["why"] or ""))
    assert not told["countedHere"]
    assert await router.asks() == 1
    assert len(said(caplog, "engines count prompts")) == 1


async def test_what_fails_to_load_is_tried_again(fetching: Fetching) -> None:
    tries = 0

    async def fails_twice(config: RouterConfig, model: Path) -> Place:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Unavailable("no memory")
        return await in_loop(config, model)

    router = await fetching(load=fails_twice)
    await router.here()
    assert tries == 3


async def test_engines_of_other_models_are_not_asked(fetching: Fetching) -> None:
    router = await fetching(
        decode=2,
        templates=[LONGER, "{{ messages[0].content }}"],
        serves={"d0": ["m"], "d1": ["other"]},
        counted_model=("m",),
    )
    await router.here()
    other = router.pods[1]
    assert other.asked == []
    assert await router.asks() == 0
    assert await router.asks({**CHAT, "model": "other"}) == 1


@pytest.mark.parametrize("given", [True, False])
async def test_what_was_fetched_is_kept_in_the_folder_that_is_named_for_it(
    given: bool, fetching: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    loaded: list[Path] = []

    async def noted(config: RouterConfig, model: Path) -> Place:
        loaded.append(model)
        return await in_loop(config, model)

    cache = tmp_path / "kept" / "here"
    router = await fetching(load=noted, **({"model_files_cache": str(cache)} if given else {}))
    await router.here()
    (model,) = loaded
    assert (cache if given else tmp_path / "tmp") in model.parents
    names = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


# With nothing replaced: processes count, engines are simulated, the proxy is nginx.

TEXTS = [
    "hi, you",
    "",
    "a longer question, " * 40,
    "naïve Übung, 数える 🚲 <|end|> user\n\n\tplease",
    "x" * 3000,
]


def _bodies() -> list[dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    chats: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": text}]}
        for text in TEXTS
    ]
    chats.append(
        {"messages": [{"role": "user", "content": "and tools"}], "tools": tools, "tool_choice": "none"}
    )
    chats.append({"messages": [{"role": "user", "content": "cut"}], "truncate_prompt_tokens": 2})
    return [*chats, *({"prompt": text} for text in TEXTS if text), {"prompt": [1, 2, 3]}]


async def _agrees(config: RouterConfig, engine: str) -> None:
    """Every prompt counts here as the engine says that it did, and no engine is asked."""
    async with (
        running(config, None, waiting_interval=0.01) as (server, app),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False, timeout=30) as client,
    ):

        async def here() -> bool:
            assert app.admin is not None
            answer = await client.get(f"http://127.0.0.1:{app.admin.port}/engines")
            return bool(answer.json()["modelFiles"]["countedHere"])

        await eventually(here)
        asked = await _tokenize_calls(client, engine)
        for body in _bodies():
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            answer = await client.post(
                path, json={"model": "m", "max_tokens": 1, **body}, headers={"x-tandem-explain": "1"}
            )
            assert answer.status_code == 200, answer.text
            counted = int(answer.headers["x-tandem-prompt-tokens"])
            assert counted == answer.json()["usage"]["prompt_tokens"], body
        assert await _tokenize_calls(client, engine) == asked


async def _tokenize_calls(client: httpx.AsyncClient, engine: str) -> float:
    page = (await client.get(f"{engine}/metrics")).text
    lines = [
        line for line in page.splitlines() if line.startswith("http_requests_total") and "/tokenize" in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize("large", [0, 1000])
async def test_prompts_count_as_a_simulated_engine_computes_them(large: int, tmp_path: Path) -> None:
    args = ["--model", str(make_model(tmp_path / "m", LONGER)), "--served-model-name", "m"]
    spec = EngineSpec(parse([*args, "--max-model-len", "8192"]))
    async with SimFleet([spec], time_scale=1000, serves_model_files=True) as sim:
        config = RouterConfig(
            port=0,
            admin_port=0,
            engine=(sim.urls[0],),
            routing_threshold=1,
            explain=True,
            max_model_len=8192,
            model_files_path=PATH,
            count_in_process_bytes=large,
        )
        await _agrees(config, sim.urls[0])


async def test_a_simulated_engine_serves_nothing_but_its_tokenizers_files(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "model.safetensors").write_text("weights")
    specs = [EngineSpec(parse(["--model", str(folder)]))]
    async with (
        SimFleet(specs, serves_model_files=True) as sim,
        SimFleet(specs) as plain,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        reply = await client.get(f"{sim.urls[0]}{PATH}chat_template.jinja")
        assert reply.content == (folder / "chat_template.jinja").read_bytes()
        asked = {"if-none-match": reply.headers["etag"]}
        reply = await client.get(f"{sim.urls[0]}{PATH}chat_template.jinja", headers=asked)
        assert reply.status_code == 304
        assert (await client.head(f"{sim.urls[0]}{PATH}tokenizer.json")).status_code == 200
        assert (await client.head(f"{sim.urls[0]}{PATH}tekken.json")).status_code == 404
        for name in ("model.safetensors", "../m/config.json", ""):
            assert (await client.get(f"{sim.urls[0]}{PATH}{name}")).status_code == 404
        assert (await client.get(f"{plain.urls[0]}{PATH}config.json")).status_code == 404


async def test_prompts_count_with_what_a_model_pods_nginx_serves(tmp_path: Path) -> None:
    """The proxy's and the router's configuration are those of one endpoint on Kubernetes."""
    plan = planned(*VARIANTS["colocated-routing"])
    folder = make_model(tmp_path / "weights", LONGER)
    (tmp_path / "nginx").mkdir()
    args = ["--model", str(folder), "--served-model-name", "m", "--max-model-len", "8192"]
    async with (
        SimFleet([EngineSpec(parse(args))], time_scale=1000) as sim,
        proxy(nginx_conf(plan, plan.pools[0]), tmp_path / "nginx", sim.engines[0].port, folder) as front,
    ):
        rendered = router_config(plan)
        config = RouterConfig(
            port=0,
            admin_port=0,
            engine=(str(front.client.base_url).rstrip("/"),),
            routing_threshold=1,
            explain=True,
            max_model_len=8192,
            model_files_path=rendered.model_files_path,
        )
        await _agrees(config, sim.urls[0])


async def test_nothing_is_left_of_files_that_were_counted_with(
    no_task_left: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    pod = ModelPod(FakeEngine("d"), make_model(tmp_path / "m"))
    async with engines(pod.engine):
        config = RouterConfig(
            port=0, admin_port=0, decode=(pod.engine.url,), model_files_path=PATH, drain_timeout=1.0
        )
        async with running(config, None, waiting_interval=0.01) as (_, app):

            async def here() -> bool:
                assert app.admin is not None
                async with httpx.AsyncClient(trust_env=False) as client:
                    answer = await client.get(f"http://127.0.0.1:{app.admin.port}/engines")
                return bool(answer.json()["modelFiles"]["countedHere"])

            await eventually(here)
            assert list((tmp_path / "tmp").iterdir())
    assert list((tmp_path / "tmp").iterdir()) == []


class Late:
    """Counts a prompt's characters; while the first sample is counted, something happens."""

    advice = "check"
    closed = False

    def __init__(self, happens: Callable[[], None]) -> None:
        self._happens = happens

    async def count(self, api: Api, body: Body) -> list[int]:
        happens, self._happens = self._happens, lambda: None
        happens()
        prompt = body.get("prompt", body.get("messages"))
        return [7] * len(str(prompt))

    async def sample(self, api: Api, body: Body) -> list[int]:
        return await self.count(api, body)

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize("off", [0, 1])
async def test_an_engine_that_joins_while_others_are_compared_is_compared_too(off: int) -> None:
    first, second, client = FakeEngine("a"), FakeEngine("b"), Client()
    second.tokens = lambda body: len(str(body.get("prompt", body.get("messages")))) + off
    second.knows_ids = False
    async with engines(first, second):
        fleet = Fleet()
        counter = Counter(None, Legs(client, RouterConfig(decode=(first.url,))), fleet)
        known = [Engine(fake.url, EngineRole.DECODE, Origin.parse(fake.url)) for fake in (first, second)]
        for engine in known:
            fleet.add(engine)
        fleet.prove(known[0], [{"id": "m"}])
        place = Late(lambda: fleet.prove(known[1], [{"id": "m"}]))
        assert await counter.use(place) is (known[1] if off else None)
        assert (counter.here is None, place.closed) == (bool(off), bool(off))
        assert len(second.tokenized) > 0
        await client.aclose()
