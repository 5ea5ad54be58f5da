"""What exact counting costs, and what makes it cheap: medians and ratios for models given by folder.

    python benchmarks/counting/run.py MODEL_DIR [MODEL_DIR …] [--json]

Takes about 20 s a model. Four questions, each answered with pseudo-random text that no cache has seen:
1. library: 16 KB with `tokenizers`, and with the library that `tandem.prompt` takes for this model;
2. cache: the last request of a chat of 20 turns whose other requests were counted before, and the same from
   scratch, with that library and with `tokenizers`;
3. loop: the longest gap of a 10 ms ticker while 100,000 tokens are counted, in the loop and by the counting
   process, beside its longest gap while nothing happens;
4. process: seconds to start it, and its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tandem.config import RouterConfig
from tandem.prompt import PromptCounter, load
from tandem.prompt.fast import fastest
from tandem.prompt.tokenizer_files import read
from tandem.router.classify import Api
from tandem.router.counting_process import CountingProcess

SYLLABLES = """
    an be ca do el fi go hu in ka lo mi no or pa qui re so ti um va we xi yo za str ough tion ment
"""
ROUNDS = 9
LONG = 100_000


class Writer:
    """Words, numbers and marks from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._syllables = SYLLABLES.split()

    def text(self, characters: int) -> str:
        words: list[str] = []
        length = 0
        while length < characters:
            word = "".join(self._random.choices(self._syllables, k=self._random.randint(1, 4)))
            word += self._random.choice((" ", " ", " ", ", ", ".\n", f" {self._random.randint(0, 9999)} "))
            words.append(word)
            length += len(word)
        return "".join(words)


def median_ms(work: Callable[[int], object]) -> float:
    """The median time of `work(round)` in milliseconds."""
    took = []
    for i in range(ROUNDS):
        start = time.perf_counter()
        work(i)
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took)


def library(model: Path, writer: Writer) -> dict[str, Any]:
    reference = read(model).encoder
    assert reference is not None, f"{model} is not counted here"
    encoder, name = fastest(reference)
    texts = [writer.text(16_000) for _ in range(2 * ROUNDS)]
    slow = median_ms(lambda i: reference.encode(texts[i], False))
    fast = median_ms(lambda i: encoder.encode(texts[ROUNDS + i], False))
    return {"library": name, "tokenizers_ms": slow, "library_ms": fast, "library_ratio": slow / fast}


def cache(model: Path, writer: Writer, *, fast: bool) -> dict[str, Any]:
    remembers, scratch = load(model, fast=fast), load(model, cache_bytes=0, fast=fast)

    def chat() -> list[dict[str, Any]]:
        """Its requests before the last one, and the last one."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": writer.text(1_600)} for i in range(41)]
        return [{"messages": messages[:-2]}, {"messages": messages}]

    chats = [chat() for _ in range(ROUNDS)]
    for before, _ in chats:
        remembers.chat(before)
    again = median_ms(lambda i: remembers.chat(chats[i][1]))
    whole = median_ms(lambda i: scratch.chat(chats[i][1]))
    tokens = scratch.chat(chats[0][1]).count
    found = {"chat_tokens": tokens, "scratch_ms": whole, "cached_ms": again, "cache_ratio": whole / again}
    return found if fast else {f"tokenizers_{name}": value for name, value in found.items()}


async def longest_gap(work: Callable[[], Awaitable[object]]) -> float:
    """The longest gap of a 10 ms ticker during `work`, and for half a second at least; in milliseconds."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work())
    start = last = loop.time()
    gaps = []
    while not task.done() or last - start < 0.5:
        await asyncio.sleep(0.01)
        now = loop.time()
        gaps.append(1e3 * (now - last))
        last = now
    await task
    return max(gaps)


async def stalls(model: Path, counter: PromptCounter, writer: Writer) -> dict[str, Any]:
    per_token = 16_000 / counter.completion({"prompt": writer.text(16_000)}).count
    prompts = [writer.text(int(LONG * per_token)) for _ in range(6)]
    config = RouterConfig(decode=("http://127.0.0.1:1",), model_path=str(model))
    start = time.perf_counter()
    async with CountingProcess(config) as process:
        await process.count(Api.COMPLETIONS, b'{"prompt": "a"}')
        started = time.perf_counter() - start

        async def nothing() -> None: ...

        async def in_loop() -> None:
            counter.completion({"prompt": prompts.pop()})

        async def by_process() -> None:
            await process.count(Api.COMPLETIONS, json.dumps({"prompt": prompts.pop()}).encode())

        found = {
            name: statistics.median([await longest_gap(work) for _ in range(3)])
            for name, work in (("idle", nothing), ("process", by_process), ("loop", in_loop))
        }
        memory = resident_mib(process.pid)
    return {f"{name}_gap_ms": gap for name, gap in found.items()} | {
        "process_start_s": started,
        "process_mib": memory,
    }


def resident_mib(pid: int | None) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


def measure(model: Path) -> dict[str, Any]:
    writer = Writer(7)
    found = library(model, writer) | cache(model, writer, fast=True) | cache(model, writer, fast=False)
    return {"model": model.name} | found | asyncio.run(stalls(model, load(model), writer))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--json", action="store_true", help="one JSON object a model")
    arguments = parser.parse_args()
    for model in arguments.models:
        found = measure(model)
        if arguments.json:
            print(json.dumps(found), flush=True)
            continue
        print(f"{found.pop('model')}:", flush=True)
        for name, value in found.items():
            print(f"  {name:24} {value if isinstance(value, str | int) else format(value, '.2f')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
