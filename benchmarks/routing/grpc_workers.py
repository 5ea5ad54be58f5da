"""Engines that speak HTTP as gRPC workers of smg, which follows KV events over gRPC only.

    PEERS_PYTHON grpc_workers.py MODEL_FOLDER SERVED_NAME URL=PORT[=EVENTS=REPLAY] …

smg 1.13 keeps its event-driven index of what `SubscribeKvEvents` streams, which it asks of `grpc://`
workers alone; vLLM's are made by `vllm serve --grpc`, which loads smg's own servicer. This does that
servicer's part for engines that are reached over HTTP, with the servicer's own code for the relay of
vLLM's KV events from ZMQ and for the records of load (`smg_grpc_servicer.kv_relay`, `.vllm.loads`). What
it adds to a request is one more hop on this machine. One port for each engine; ready when it prints
"ready".
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_servicer.kv_relay import Engine, RankSource, relay
from smg_grpc_servicer.tokenizer_bundle import tokenizer_bundle, tokenizer_chunks
from smg_grpc_servicer.vllm.loads import LoadTracker, load_record, scheduler_load_fields

POLL_SECONDS = 0.05
"""How often an engine's queue is looked at; vLLM's servicer has it in the same process."""
MESSAGE_BYTES = 64 << 20


@dataclass
class Queue:
    running: int = 0
    waiting: int = 0
    usage: float = 0.0


class Worker(pb_grpc.VllmEngineServicer):
    """One engine. Answers are asked of it as completions of token ids."""

    def __init__(self, http: aiohttp.ClientSession, folder: Path, name: str, url: str, events: list[str]):
        self._http, self._folder, self._name, self._url = http, folder, name, url
        self._config = json.loads((folder / "config.json").read_text())
        self._sources = [RankSource(0, events[0], events[1])] if events else []
        self._loads = LoadTracker()
        self._queue = Queue()
        self._running: dict[str, asyncio.Task[Any]] = {}

    async def watch(self) -> None:
        """Keep the engine's queue up to date."""
        while True:
            try:
                async with self._http.get(f"{self._url}/sim/state") as response:
                    state = await response.json()
                used = 1 - state["free_blocks"] / state["blocks"]
                self._queue = Queue(state["running"], state["waiting"], used)
            except (aiohttp.ClientError, KeyError, ValueError):
                pass
            await asyncio.sleep(POLL_SECONDS)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        ids = list(request.tokenized.input_ids)
        params, number = request.sampling_params, request.request_id
        most = params.max_tokens if params.HasField("max_tokens") else 16
        body = {
            "model": self._name,
            "prompt": ids,
            "max_tokens": most,
            "min_tokens": min(params.min_tokens, most),
            "ignore_eos": params.ignore_eos,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        self._loads.submitted(number, len(ids), rank=0)
        task = asyncio.current_task()
        if task is not None:
            self._running[number] = task
        sent: list[int] = []
        cached, reason = 0, ""
        try:
            async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    await context.abort(grpc.StatusCode.INTERNAL, (await response.text())[:300])
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens") or cached
                    for choice in event.get("choices", ()):
                        new = choice.get("token_ids") or []
                        if new and not sent:
                            self._loads.first_output(number, len(ids), cached, rank=0)
                        sent += new
                        self._loads.generated(len(new), rank=0)
                        reason = choice.get("finish_reason") or reason
                        if request.stream and new:
                            yield _chunk(new, len(ids), cached)
        finally:
            self._loads.finished(number)
            self._running.pop(number, None)
        yield pb.GenerateResponse(
            complete=pb.GenerateComplete(
                output_ids=[] if request.stream else sent,
                finish_reason=reason or "stop",
                prompt_tokens=len(ids),
                completion_tokens=len(sent),
                cached_tokens=cached,
            )
        )

    async def Abort(self, request: Any, context: Any) -> Any:
        for number in request.request_ids:
            if task := self._running.get(number):
                task.cancel()
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        length = self._config["max_position_embeddings"]
        return pb.GetModelInfoResponse(
            model_path=str(self._folder),
            tokenizer_path=str(self._folder),
            served_model_name=self._name,
            is_generation=True,
            max_context_length=length,
            max_req_input_len=length,
            vocab_size=self._config["vocab_size"],
            model_type=self._config["model_type"],
            architectures=self._config["architectures"],
            eos_token_ids=[self._config["eos_token_id"]],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return pb.GetServerInfoResponse(server_type="vllm-grpc", data_parallel_size=1, max_num_seqs=128)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for chunk in tokenizer_chunks(*await tokenizer_bundle(self._folder)):
            yield chunk

    async def GetLoads(self, request: Any, context: Any) -> Any:
        queue = self._queue
        fields = scheduler_load_fields(
            queue.running,
            queue.waiting,
            queue.usage,
            self._loads.estimate(queue.waiting, rank=0),
            dp_rank=0,
            max_total_num_tokens=0,
            max_running_requests=128,
        )
        return pb.GetLoadsResponse(version="0.32.0", dp_rank_count=1, loads=[pb.SchedulerLoad(**fields)])

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:
        start = request.start_sequence_number
        async for batch in relay(self._sources, Engine.VLLM, start, context, load_source=self._record):
            yield batch

    def _record(self, rank: int | None) -> Any:
        queue = self._queue
        return load_record(
            queue.running,
            queue.waiting,
            queue.usage,
            self._loads.estimate(queue.waiting, rank=0),
            dp_rank=0,
            max_total_num_tokens=0,
            max_running_requests=128,
        )


def _chunk(ids: list[int], prompt: int, cached: int) -> Any:
    chunk = pb.GenerateStreamChunk(
        token_ids=ids, prompt_tokens=prompt, completion_tokens=len(ids), cached_tokens=cached
    )
    return pb.GenerateResponse(chunk=chunk)


async def main(folder: Path, name: str, engines: list[str]) -> None:
    limits = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
    ]
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        watching, servers = [], []
        for engine in engines:
            url, port, *events = engine.split("=")
            worker = Worker(http, folder, name, url, events)
            server = grpc.aio.server(options=limits)
            pb_grpc.add_VllmEngineServicer_to_server(worker, server)
            server.add_insecure_port(f"127.0.0.1:{port}")
            await server.start()
            servers.append(server)
            watching.append(asyncio.create_task(worker.watch()))
        print("ready", flush=True)
        await asyncio.gather(*(server.wait_for_termination() for server in servers))


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
