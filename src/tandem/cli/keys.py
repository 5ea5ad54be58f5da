"""`tandem keys`: API keys for the router, and the file that lists them."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tandem.cli import FAILURE, OK, USAGE, complain

if TYPE_CHECKING:
    from tandem.router.keys import ApiKey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser(
        "new",
        help="make a key: print it once, and the entry for the file of --api-keys-file",
        allow_abbrev=False,
    )
    new.add_argument("name", metavar="NAME", help="whose it is: what metrics and the log call it")
    new.add_argument(
        "--shared-cache",
        action="store_true",
        help="give it no cache salt of its own: it shares cached KV with the other keys that have none",
    )
    check = actions.add_parser(
        "check", help="find every mistake in such a file, and show what its keys may do", allow_abbrev=False
    )
    check.add_argument("file", metavar="FILE", help="as for --api-keys-file")
    for action in (new, check):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    return _new(arguments) if arguments.action == "new" else _check(arguments)


def _new(arguments: argparse.Namespace) -> int:
    from tandem.router.keys import ApiKey, digest, entry, name_mistake, new_key, new_salt

    if (mistake := name_mistake(arguments.name)) is not None:
        complain(f"NAME {mistake}")
        return USAGE
    key = new_key()
    salt = None if arguments.shared_cache else new_salt()
    made = entry(ApiKey(arguments.name, digest(key.encode()), cache_salt=salt))
    if arguments.json:
        print(json.dumps({"key": key, "entry": made}))
        return OK
    print(f"The key, which is kept nowhere and not shown again:\n\n{key}\n")
    print("Its entry in the file of --api-keys-file, below `keys:`:\n")
    for i, (name, value) in enumerate(made.items()):
        print(f"{' ' if i else '-'} {name}: {json.dumps(value)}")
    return OK


def _check(arguments: argparse.Namespace) -> int:
    from tandem.router.keys import keys_of

    try:
        keys = keys_of(arguments.file)
    except ValueError as error:
        complain(error)
        return FAILURE
    if arguments.json:
        print(json.dumps({"keys": [_told(key) for key in keys]}, indent=2))
        return OK
    for key in keys:
        print(f"{key.name}: {_words(key)}")
    counted = "1 key" if len(keys) == 1 else f"{len(keys)} keys"
    nobody = "" if keys else ": a router with this file refuses every request"
    print(f"{arguments.file}: {counted}{nobody}", file=sys.stderr)
    return OK


def _told(key: ApiKey) -> dict[str, Any]:
    """What a key may do, under the names of the file; neither its hash nor its salt."""
    limits = key.limits
    return {
        "name": key.name,
        "requestsPerSecond": limits.requests_per_second,
        "burst": limits.burst,
        "tokensPerMinute": limits.tokens_per_minute,
        "concurrentRequests": limits.concurrent_requests,
        "ownCache": key.cache_salt is not None,
        "models": None if key.models is None else sorted(key.models),
    }


def _words(key: ApiKey) -> str:
    limits = key.limits
    said = []
    if limits.requests_per_second is not None:
        said.append(f"{limits.requests_per_second:g} requests per second, {limits.burst:,} at once")
    if limits.tokens_per_minute is not None:
        said.append(f"{limits.tokens_per_minute:,} tokens per minute")
    if limits.concurrent_requests is not None:
        said.append(f"{limits.concurrent_requests:,} requests running")
    said = said or ["no limits"]
    said.append("all models" if key.models is None else f"models {', '.join(sorted(key.models))}")
    said.append("cached KV of its own" if key.cache_salt is not None else "cached KV shared")
    return "; ".join(said)
