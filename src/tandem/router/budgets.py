"""What hand-offs have reserved on engines. All claims of a hand-off are taken at once or none is, so nobody
holds one thing while waiting for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tandem.router.connectors import Claim
from tandem.router.engines import Engine


class Reservation:
    """Claims that are held until `release`; a second release does nothing."""

    __slots__ = ("_budgets", "_claims")

    def __init__(self, budgets: Budgets, claims: Sequence[Claim]) -> None:
        self._budgets = budgets
        self._claims = claims

    def release(self) -> None:
        claims, self._claims = self._claims, ()
        self._budgets.give_back(claims)


class Budgets:
    def __init__(self, on_free: Callable[[], None] = lambda: None) -> None:
        """`on_free` is called when something was given back."""
        self._used: Counter[tuple[Engine, str]] = Counter()
        self._shares: dict[Engine, dict[str, float]] = {}
        self._on_free = on_free

    def fit(self, claims: Sequence[Claim]) -> bool:
        """Whether all claims can be held now, beside what is."""
        return _fit(claims, self._used)

    def take(self, claims: Sequence[Claim]) -> Reservation:
        """Hold claims. ValueError unless they fit."""
        if not self.fit(claims):
            raise ValueError("the claims do not fit")
        for claim in claims:
            self._used[claim.engine, claim.resource] += claim.amount
            self._note(claim)
        return Reservation(self, claims)

    def give_back(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            key = claim.engine, claim.resource
            self._used[key] -= claim.amount
            if not self._used[key]:
                del self._used[key]
            self._note(claim)
        if claims:
            self._on_free()

    def share(self, engine: Engine) -> float:
        """How much of an engine is held: of its fullest resource, 0 to 1."""
        return max(self._shares.get(engine, {}).values(), default=0.0)

    def _note(self, claim: Claim) -> None:
        shares = self._shares.setdefault(claim.engine, {})
        shares[claim.resource] = self._used.get((claim.engine, claim.resource), 0) / claim.capacity
        if not any(shares.values()):
            del self._shares[claim.engine]

    @property
    def used(self) -> dict[tuple[Engine, str], int]:
        """What is held, by engine and resource; nothing that is zero."""
        return {key: amount for key, amount in self._used.items() if amount}


def possible(claims: Sequence[Claim]) -> bool:
    """Whether claims would fit if nothing else were held."""
    return _fit(claims, {})


def _fit(claims: Sequence[Claim], used: Mapping[tuple[Engine, str], int]) -> bool:
    wanted: Counter[tuple[Engine, str]] = Counter()
    for claim in claims:
        key = claim.engine, claim.resource
        wanted[key] += claim.amount
        if used.get(key, 0) + wanted[key] > claim.capacity:
            return False
    return True
