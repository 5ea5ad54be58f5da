"""A request's prompt as the model sees it: chat template, tokenizer, exact token ids.

    counter = load(Path("/models/qwen"))
    tokens = counter.chat({"messages": [{"role": "user", "content": "Hello"}]})
    tokens.count, tokens.ids

The ids are those of vLLM 0.32 for the same request. Where local work cannot promise that, `NotExact` says
why, and the caller asks the engine. This package knows nothing of HTTP, routing or the rest of Tandem.
"""

from tandem.prompt.counter import MOST_TEXT, PromptCounter, Tokens, load
from tandem.prompt.errors import BadPrompt, LoadError, NotExact, TooLong
from tandem.prompt.tokenizer import Encoder
from tandem.prompt.tokenizer_files import FILES, MARKS

__all__ = [
    "FILES",
    "MARKS",
    "MOST_TEXT",
    "BadPrompt",
    "Encoder",
    "LoadError",
    "NotExact",
    "PromptCounter",
    "Tokens",
    "TooLong",
    "load",
]
