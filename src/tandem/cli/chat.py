"""`tandem chat`: talks to an endpoint, and shows the path and the times of each answer."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import sys
from typing import TYPE_CHECKING

from tandem.cli import ENVIRONMENT, FAILURE, OK, USAGE, complain
from tandem.cli.flags import positive

if TYPE_CHECKING:
    import httpx

_KEY = "TANDEM_API_KEY"
_PATIENCE = 600.0  # seconds of silence: a long prompt computes for a minute before its first token
_LIST_SECONDS = 60.0  # for the whole list of models
_SHOWN = 8  # names of models in a message

_EPILOG = """\
On a terminal: lines with history, Ctrl-C ends the answer that is being written, Ctrl-D ends, /help lists the
commands. Else each line of stdin is a message of one chat, answers go to stdout, figures to stderr.

  tandem chat --system 'You are brief.'
  echo 'What is the capital of France?' | tandem chat --temperature 0 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="an endpoint that speaks OpenAI's API (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="NAME", help="served model name (default: the endpoint's first)")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told to be")
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="longest answer (default: the endpoint's)"
    )
    parser.add_argument(
        "--temperature", type=_temperature, metavar="X", help="0 for the likeliest (default: the endpoint's)"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"sent as a bearer token (default: ${_KEY})")
    parser.add_argument("--json", action="store_true", help="print an object for each answer on stdout")


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def run(arguments: argparse.Namespace) -> int:
    import httpx

    from tandem.bench.stream import RequestFailed

    url = arguments.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")) or not url.isprintable():
        complain(f"--url {arguments.url}: is not of the form http://HOST:PORT")
        return USAGE
    key = arguments.api_key or os.environ.get(_KEY)
    if key and not (key.isascii() and key.isprintable()):
        complain(f"--api-key or {_KEY}: a key has printable ASCII characters only")
        return USAGE
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        # A connection is given up sooner than vLLM closes it (5 s), so that no message meets a closing one.
        client = httpx.AsyncClient(
            timeout=httpx.Timeout(_PATIENCE, connect=5.0),
            limits=httpx.Limits(keepalive_expiry=2.0),
            headers=headers,
            trust_env=False,
        )
        with asyncio.Runner() as runner:
            try:
                return _chat(arguments, client, url, runner)
            finally:
                runner.run(client.aclose())
    except _Unusable as error:
        complain(error)
        return USAGE
    except _Silent as error:
        complain(error)
        return ENVIRONMENT
    except RequestFailed as error:
        complain(_in_words(error, url))
        return FAILURE
    except httpx.InvalidURL as error:
        complain(f"--url {arguments.url}: {error}")
        return USAGE
    except httpx.HTTPError as error:
        complain(_in_words(error, url))
        return ENVIRONMENT
    except BrokenPipeError:  # whoever read the answers has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE


def _chat(arguments: argparse.Namespace, client: httpx.AsyncClient, url: str, runner: asyncio.Runner) -> int:
    from tandem.bench.conversation import Conversation
    from tandem.cli.dialogue import Dialogue, Json, Plain, Terminal, piped, typed

    model = runner.run(_model(client, url, arguments.model))
    settings = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    conversation = Conversation(
        client,
        url,
        model,
        system=arguments.system,
        settings={name: value for name, value in settings.items() if value is not None},
        patience=_PATIENCE,
    )
    person = sys.stdin.isatty() and sys.stdout.isatty() and not arguments.json
    screen = Terminal() if person else Json() if arguments.json else Plain()
    dialogue = Dialogue(
        conversation, screen, runner.run, lambda error: _in_words(error, url), survives_interrupts=person
    )
    if person:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its editing and history
        screen.note(f"{model} at {url}; /help lists the commands, Ctrl-D ends")
    dialogue.hold(typed if person else piped)
    return FAILURE if dialogue.failures and not person else OK


class _Unusable(Exception):
    """What was asked for is not there."""


class _Silent(Exception):
    """There is no endpoint that answers."""


async def _model(client: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    """The model to talk to. An endpoint that lists no models is taken at its word about one that is named."""
    from tandem.bench.stream import RequestFailed, served_models

    try:
        async with asyncio.timeout(_LIST_SECONDS):  # httpx has limits for each piece of it only
            served = await served_models(client, url)
    except TimeoutError:
        raise _Silent(f"{url} has not listed its models within {_LIST_SECONDS:g} s") from None
    except RequestFailed as error:
        if wanted is None or error.status in (401, 403):
            raise
        return wanted
    if wanted is not None and wanted not in served:
        more = f" and {len(served) - _SHOWN:,} more" if len(served) > _SHOWN else ""
        raise _Unusable(f"--model {wanted}: {url} serves {', '.join(served[:_SHOWN])}{more}")
    return wanted or served[0]


def _in_words(error: Exception, url: str) -> str | None:
    """What went wrong with a request, and what to do; None: something else went wrong."""
    import httpx

    from tandem.bench.stream import RequestFailed

    match error:
        case RequestFailed(status=401 | 403):
            return f"{error}. Give the endpoint's key by --api-key."
        case RequestFailed():
            return str(error)
        case httpx.ConnectError() | httpx.ConnectTimeout():
            why = str(error) or type(error).__name__
            return f"{url} cannot be reached: {why}. Start an endpoint with `tandem up`, or correct --url."
        case httpx.TimeoutException():
            return f"{url} has been silent for {_PATIENCE:g} s; the request was given up."
        case httpx.HTTPError():
            return f"{url} broke its answer off: {str(error) or type(error).__name__}"
    return None
