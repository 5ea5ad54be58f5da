"""From a request's bytes to its answer: what `/v1/completions` and `/v1/chat/completions` do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from tandem.http import Request
from tandem.prompt import BadPrompt
from tandem.sim import faults, intake, invocations, protocol, schema
from tandem.sim.choice import Choice
from tandem.sim.engine import Engine, EngineDead
from tandem.sim.protocol import Wanted
from tandem.sim.refusal import Refused, internal_error
from tandem.sim.render import DONE, Piece, Renderer, Usage, error_event
from tandem.sim.request import Finish, Group, Output, SimRequest
from tandem.sim.vocabulary import Vocabulary
from tandem.sim.wire import Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What of vLLM's command line shapes answers."""

    names: tuple[str, ...]
    """Served model names; the first one is told."""
    root: str
    max_model_len: int
    fingerprint: str
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    max_logprobs: int = 20
    role: str = "assistant"
    prompt_tokens_details: bool = False
    force_include_usage: bool = False
    request_id_headers: bool = False
    auto_tool_choice: bool = False
    tokens_as_ids: bool = False
    api_keys: tuple[str, ...] = ()

    def model_list(self, now: int) -> dict[str, Any]:
        """The answer of /v1/models; `now` in seconds since 1970."""
        cards = [self._card(name, self.root, None, now) for name in self.names]
        cards += [self._card(name, path, self.names[0], now) for name, path in self.lora_modules.items()]
        return {"object": "list", "data": cards}

    def adapter(self, model: str | None) -> str | None:
        """The LoRA adapter that a request's `model` names, if it does."""
        return model if model in self.lora_modules else None

    def _card(self, name: str, root: str, parent: str | None, now: int) -> dict[str, Any]:
        permission = {
            "id": f"modelperm-{uuid4().hex[:16]}",
            "object": "model_permission",
            "created": now,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": now,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": self.max_model_len if parent is None else None,
            "permission": [permission],
        }


class Generation:
    """Answers generation and tokenization requests of one engine."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary, options: ServingOptions) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._options = options

    async def answer(self, request: Request, wire: Wire, *, chat: bool | None) -> None:
        """`chat`: None where the body says whether it is one. Raises Refused for an error answer, and
        `wire.Broken` where a fault ended it."""
        own = self._own_faults(request)
        if chat is None:
            chat, body = invocations.read(request)
        else:
            body = protocol.decode(request.body, request.header(b"content-type"))
        try:
            wanted, prompts, max_tokens = self._read(body, chat=chat)
        except Refused as refused:
            if isinstance(params := isinstance(body, dict) and body.get("kv_transfer_params"), dict):
                self._engine.handoff.refused(params)
            if not (refused.late and body.get("stream")):
                raise
            wire.start()
            wire.end(error_event(refused.body()) + DONE)
            return
        asked_id = request.header(b"x-request-id")
        base = asked_id.decode("latin-1") if asked_id else wanted.request_id or uuid4().hex[:16]
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{base}"
        requests = self._requests(answer_id, wanted, prompts, max_tokens, own)
        leg = faults.leg_of(wanted.kv_params)
        self._engine.faults.bring(answer_id, own)
        try:
            if self._engine.profile.request:
                await self._engine.clock.sleep(self._engine.profile.request)
            await wire.begin(self._engine.faults.of(answer_id, leg), stream=wanted.stream)
            answering = _Answering(self._engine, self._vocabulary, self._options, wire, wanted, answer_id)
            await answering.run(requests)
        finally:
            self._engine.faults.forget(answer_id)
            for one in requests:
                self._engine.faults.forget(one.id)
                self._engine.abort(one)

    def tokenize(self, body: Any) -> dict[str, Any]:
        """The answer of /tokenize to a decoded body. Raises Refused."""
        asked, body = protocol.read_tokenize(body)
        self._check_model(asked.model)
        chat = isinstance(asked, schema.TokenizeChat)
        ids = self._encode(body, chat=chat) if chat or body["prompt"] else []
        strings = [self._vocabulary.spelling(i) for i in ids] if asked.return_token_strs else None
        length = self._options.max_model_len
        return {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": strings}

    def detokenize(self, body: Any) -> dict[str, Any]:
        """The answer of /detokenize to a decoded body. Raises Refused."""
        asked = schema.check(schema.DETOKENIZE, body)
        self._check_model(asked.model)
        ids = [i for i in asked.tokens if i < self._vocabulary.size]
        return {"prompt": self._vocabulary.decode(ids, skip_special=False)}

    def _own_faults(self, request: Request) -> list[faults.Fault]:
        text = request.header(b"x-sim-fault")
        try:
            return faults.parse(text.decode("latin-1"), whole_engine=False) if text else []
        except faults.FaultError as error:
            raise Refused(f"x-sim-fault: {error}") from None

    def _read(self, body: Any, *, chat: bool) -> tuple[Wanted, list[list[int]], list[int]]:
        """What is wanted, token ids of each prompt, and how many tokens each answer may have. Raises
        Refused."""
        length = self._options.max_model_len
        request: schema.Chat | schema.Completion
        if chat:
            request, body, wanted = protocol.read_chat(body)
            self._check_model(wanted.model)
            self._check_tools(body)
            intake.check_max_tokens(wanted, length)
            texts, prompts = True, [self._encode(body, chat=True)]
        else:
            request, body, wanted = protocol.read_completion(body)
            self._check_model(wanted.model)
            given = intake.prompts_of(body["prompt"])
            intake.check_max_tokens(wanted, length)
            texts = isinstance(given[0], str)
            prompts = [self._encode({**body, "prompt": p}, chat=False) if p else [] for p in given]
        room = []
        for ids in prompts:
            intake.check_length(len(ids), length, counted=not texts)
            left = length - len(ids)
            asked = 1 if wanted.echo_only else wanted.max_tokens
            room.append(left if asked is None else min(left, asked))
            intake.check_sampling(request, wanted, room[-1])
        for ids in prompts:
            intake.check_intake(request, wanted, ids, self._vocabulary.size, self._options.max_logprobs)
        return wanted, prompts, room

    def _check_model(self, name: object) -> None:
        known = (*self._options.names, *self._options.lora_modules)
        if name and name not in known:
            raise Refused(
                f"The model `{name}` does not exist. Valid aliases: {', '.join(self._options.names)}.",
                404,
                "NotFoundError",
                "model",
            )

    def _check_tools(self, body: Mapping[str, Any]) -> None:
        choice = body.get("tool_choice")
        if choice in (None, "none") or self._options.auto_tool_choice:
            return
        if choice == "auto":
            raise Refused(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        told = f'function "{choice["function"]["name"]}"' if isinstance(choice, dict) else f'"{choice}"'
        raise Refused(f"tool_choice={told} requires --tool-call-parser to be set")

    def _encode(self, body: dict[str, Any], *, chat: bool) -> list[int]:
        try:
            if chat:
                return self._vocabulary.chat(body)
            return self._vocabulary.completion(body)
        except BadPrompt as error:
            raise Refused(error.message, param=error.param) from None

    def _requests(
        self,
        answer_id: str,
        wanted: Wanted,
        prompts: list[list[int]],
        max_tokens: list[int],
        own: list[faults.Fault],
    ) -> list[SimRequest]:
        """One for each choice of each prompt, named as vLLM names them."""
        lora = self._options.adapter(wanted.model)
        requests = []
        for i, (ids, room) in enumerate(zip(prompts, max_tokens, strict=True)):
            name = answer_id if wanted.chat else f"{answer_id}-{i}"
            group = Group(wanted.n)
            for choice in range(wanted.n):
                child = f"{choice}_" if wanted.n > 1 else ""
                one = SimRequest(
                    id=f"{child}{name}-{uuid4().hex[:8]}",
                    prompt=ids,
                    sampling=wanted.sampling(room, choice),
                    sink=_nowhere,
                    arrival=self._engine.clock.now(),
                    salt=wanted.salt,
                    lora=lora,
                    priority=wanted.priority,
                    group=group,
                    kv_params=None if wanted.kv_params is None else dict(wanted.kv_params),
                )
                self._engine.faults.bring(one.id, own)
                requests.append(one)
        return requests


class _Answering:
    """One answer under way."""

    def __init__(
        self,
        engine: Engine,
        vocabulary: Vocabulary,
        options: ServingOptions,
        wire: Wire,
        wanted: Wanted,
        answer_id: str,
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._options = options
        self._wire = wire
        self._wanted = wanted
        self._usage = Usage()
        self._renderer = Renderer(
            wanted,
            vocabulary,
            id=answer_id,
            # The first name, whichever of them was asked for; an adapter has its own.
            model=options.adapter(wanted.model) or options.names[0],
            created=int(engine.clock.wall()),
            fingerprint=options.fingerprint,
            role=options.role,
            details=options.prompt_tokens_details,
            force_usage=options.force_include_usage,
            tokens_as_ids=options.tokens_as_ids,
        )
        self._choices: dict[str, Choice] = {}
        self._begun = False
        self._left = 0
        self._failed = False

    async def run(self, requests: list[SimRequest]) -> None:
        """Returns when the answer was sent. Raises Refused for an engine that is dead."""
        self._left = len(requests)
        sink = self._stream if self._wanted.stream else self._collect
        prompts = {id(one.prompt): one.prompt for one in requests}
        self._usage.prompt = sum(map(len, prompts.values()))
        for i, one in enumerate(requests):
            one.sink = sink
            self._choices[one.id] = Choice(i, one, self._wanted, self._vocabulary)
        try:
            for one in requests:
                self._engine.add(one)
        except EngineDead as error:
            raise internal_error(str(error)) from None
        if self._wanted.stream:
            self._wire.start()
        await self._wire.over

    def _stream(self, request: SimRequest, output: Output) -> None:
        choice = self._choices[request.id]
        if choice.done or self._failed:
            return
        if not self._begun:
            self._begin_stream(request)
        if output.finish in (Finish.ERROR, Finish.ABORT):
            self._fail(output.finish)
            return
        piece = choice.feed(output)
        if len(choice.tokens) == 1 and not self._wanted.chat:
            if self._wanted.token_ids or self._wanted.echo:
                piece.prompt = request.prompt
            if self._wanted.echo:
                self._echo(piece, request)
        self._usage.completion += len(piece.tokens)
        usage = self._usage
        if self._wanted.continuous_usage:
            usage = Usage(request.prompt_length, len(choice.tokens))
        self._wire.write(self._renderer.event(piece, usage))
        if piece.finish is not None:
            self._ended(choice)
            if self._left == 0:
                self._wire.end(self._renderer.end(self._usage))

    def _begin_stream(self, request: SimRequest) -> None:
        self._begun = True
        self._cached(request)
        if self._wanted.chat:
            for choice in self._choices.values():
                self._wire.write(self._renderer.role_event(choice.index, request.prompt))

    def _collect(self, request: SimRequest, output: Output) -> None:
        choice = self._choices[request.id]
        if choice.done or self._failed:
            return
        if output.finish in (Finish.ERROR, Finish.ABORT):
            self._fail(output.finish)
            return
        self._cached(request)
        if choice.feed(output).finish is not None:
            self._ended(choice)
            if self._left == 0:
                self._send_whole()

    def _send_whole(self) -> None:
        choices = list(self._choices.values())
        pieces = [choice.whole() for choice in choices]
        self._usage.completion = sum(len(choice.tokens) for choice in choices)
        if self._wanted.echo and not self._wanted.chat:
            for choice, piece in zip(choices, pieces, strict=True):
                self._echo(piece, choice.request)
        params = choices[0].request.kv_reply
        self._wire.send(200, self._renderer.whole(pieces, self._usage, params))

    def _ended(self, choice: Choice) -> None:
        self._left -= 1
        if choice.stopped:
            self._engine.stop(choice.request)

    def _echo(self, piece: Piece, request: SimRequest) -> None:
        prompt = self._vocabulary.decode(request.prompt, skip_special=True)
        piece.text = prompt if self._wanted.echo_only else prompt + piece.text

    def _cached(self, request: SimRequest) -> None:
        """What usage tells of the cache: of the request that came last, as vLLM has it."""
        cached = request.reported_cached or 0
        size = self._engine.pool.block_size
        stored = request.prompt_length // size * size if self._engine.pool.caching else 0
        self._usage.cached = cached
        self._usage.created = max(0, stored - request.local_hit - request.external)

    def _fail(self, finish: Finish) -> None:
        error = internal_error()
        if finish is Finish.ABORT:
            error = internal_error(str(EngineDead()))
        self._failed = True
        if self._wanted.stream:
            self._wire.end(error_event(error.body()) + b"data: [DONE]\n\n")
        else:
            self._wire.send(error.status, error.body())


def _nowhere(request: SimRequest, output: Output) -> None:
    raise AssertionError("no one takes this request's tokens yet")
