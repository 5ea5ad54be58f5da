"""The keys that are known, and what each has used. Nothing here waits or reads; time is passed in.

Keys are looked up by their hash. How long that takes may tell something of a hash, never of a key: who would
have to find a key by its hash has to guess 256 bits.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from tandem.router.body import Body
from tandem.router.errors import ApiError, OverLimit, Unauthorized
from tandem.router.keys.bucket import Bucket
from tandem.router.keys.key import LONGEST, ApiKey, Limits, digest


class Refused(StrEnum):
    """Why a request is refused."""

    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"
    MODEL = "model"
    SALT = "salt"


class Account:
    """One key at work. It outlives changes of the file, as long as a key of its name is there."""

    def __init__(self, key: ApiKey, clock: Callable[[], float]) -> None:
        self.key = key
        self.running = 0
        """Requests that were let in and have not ended."""
        self.requests = 0
        """Requests that were let in."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.refused: Counter[Refused] = Counter()
        self._clock = clock
        self.request_bucket: Bucket | None = None
        self.token_bucket: Bucket | None = None
        self.change(key)

    def change(self, key: ApiKey) -> None:
        """What the file says of it now. What it has used, it has used."""
        limits, self.key = key.limits, key
        per_minute = limits.tokens_per_minute
        self.request_bucket = self._bucket(self.request_bucket, limits.requests_per_second, limits.burst or 0)
        self.token_bucket = self._bucket(
            self.token_bucket, None if per_minute is None else per_minute / 60, per_minute or 0
        )

    def _bucket(self, before: Bucket | None, per_second: float | None, size: float) -> Bucket | None:
        if per_second is None:
            return None
        if before is None:
            return Bucket(per_second, size, self._clock)
        before.resize(per_second, size)
        return before

    @property
    def limits(self) -> Limits:
        return self.key.limits


class KeyStore:
    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._accounts: dict[bytes, Account] = {}
        self._salts: frozenset[str] = frozenset()
        self.refused: Counter[Refused] = Counter()
        """Requests without a key that is known."""
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """These are known from now on, and no others. Requests that run go on."""
        before = {account.key.name: account for account in self}
        accounts = {}
        for key in keys:
            account = before.get(key.name)
            if account is None:
                account = Account(key, self._clock)
            else:
                account.change(key)
            accounts[key.digest] = account
        self._accounts = accounts
        self._salts = frozenset(a.key.cache_salt for a in self if a.key.cache_salt is not None)

    def caller(self, authorization: bytes | None) -> Caller:
        """Whose request it is, by its header `Authorization`. Raises Unauthorized."""
        if authorization is None:
            self.refused[Refused.NO_KEY] += 1
            message = "There is no API key in the request: it goes into the header Authorization: Bearer KEY."
            raise Unauthorized(message, given=False)
        scheme, _, key = authorization.partition(b" ")
        key = key.strip()
        if scheme.lower() == b"bearer" and len(key) <= LONGEST:
            account = self._accounts.get(digest(key))
            if account is not None:
                return Caller(self, account)
        self.refused[Refused.UNKNOWN_KEY] += 1
        raise Unauthorized("The API key of the request is not known here.", given=True)

    def has_salt(self, salt: str) -> bool:
        """Whether a key's KV is kept apart by it."""
        return salt in self._salts


class Caller:
    """One request of one key: `begin`, `prompt` once that is counted, and whatever happens `end`."""

    __slots__ = ("_account", "_began", "_charged", "_key", "_store")

    def __init__(self, store: KeyStore, account: Account) -> None:
        self._store = store
        self._account = account
        self._key = account.key  # as it is now, whatever the file says while the request runs
        self._began = False
        self._charged = 0

    @property
    def name(self) -> str:
        return self._key.name

    @property
    def metered(self) -> bool:
        """Whether its tokens have to be known."""
        return self._account.token_bucket is not None

    def begin(self) -> None:
        """Let it in. Raises OverLimit."""
        account, limits = self._account, self._account.limits
        if limits.concurrent_requests is not None and account.running >= limits.concurrent_requests:
            what = f"{limits.concurrent_requests} requests of it run, as many as may at once"
            raise self._over(Refused.CONCURRENT, what, 1.0)
        if account.token_bucket is not None and (wait := account.token_bucket.wait(1)):
            raise self._over_tokens(wait)
        if account.request_bucket is not None:
            if wait := account.request_bucket.wait(1):
                what = f"it may send {limits.requests_per_second:g} requests per second"
                raise self._over(Refused.REQUESTS, what, wait)
            account.request_bucket.take(1)
        self._began = True
        account.running += 1
        account.requests += 1

    def prompt(self, tokens: int | None) -> None:
        """Its prompt has so many tokens; None: they are not known before its end. Raises OverLimit."""
        account = self._account
        if tokens is None:
            return
        if account.token_bucket is not None:
            if wait := account.token_bucket.wait(tokens):
                if account.request_bucket is not None:
                    account.request_bucket.take(-1)
                raise self._over_tokens(wait)
            account.token_bucket.take(tokens)
        self._charged = tokens

    def end(self, prompt: int, generated: int) -> None:
        """It is over, and in all so many tokens count."""
        account = self._account
        if not self._began:
            return
        self._began = False
        account.running -= 1
        account.prompt_tokens += prompt
        account.generated_tokens += generated
        if account.token_bucket is not None:
            account.token_bucket.take(prompt + generated - self._charged)

    def may_use(self, model: object) -> bool:
        """Whether it may use a model of this name."""
        return self._key.models is None or model in self._key.models

    def check_model(self, model: str | None) -> None:
        """Raises ApiError for a model that it may not use: as for one that there is not."""
        models = self._key.models
        if models is None or model in models:
            return
        self._account.refused[Refused.MODEL] += 1
        known = ", ".join(sorted(models))
        if model is None:
            message = f"The field 'model' is missing; your key may use: {known}."
            raise ApiError(400, message, param="model")
        raise ApiError(
            404,
            f"The model {model[:100]!r} does not exist here, or your key may not use it. It may use: "
            f"{known}.",
            kind="not_found_error",
            param="model",
            code="model_not_found",
        )

    def salted(self, body: Body) -> Body:
        """Its body with the key's own cache salt. Raises ApiError for another key's salt: by the time that an
        answer takes it could be found out what that one has sent."""
        if self._key.cache_salt is not None:
            return body.replaced("cache_salt", self._key.cache_salt)
        salt = body.get("cache_salt")
        if isinstance(salt, str) and self._store.has_salt(salt):
            self._account.refused[Refused.SALT] += 1
            raise ApiError(
                400, "The field 'cache_salt' has a value that your key may not use.", param="cache_salt"
            )
        return body

    def _over_tokens(self, wait: float) -> OverLimit:
        what = f"it may use {self._account.limits.tokens_per_minute:,} tokens per minute"
        return self._over(Refused.TOKENS, what, wait)

    def _over(self, why: Refused, what: str, wait: float) -> OverLimit:
        self._account.refused[why] += 1
        kind = "tokens" if why is Refused.TOKENS else "requests"
        seconds = max(1, math.ceil(wait))
        message = f"Your key has reached its limit: {what}. Try again in {seconds} s."
        return OverLimit(message, kind=kind, retry_after_s=seconds)
