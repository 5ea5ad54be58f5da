"""Whose request it is, and what is kept apart between keys."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.body import Body
from tandem.router.errors import ApiError, Unauthorized
from tandem.router.keys import ApiKey, KeyStore, Refused, digest, new_key

from .key_fakes import A, B

KEY_A = ApiKey("a", digest(A.encode()))
KEY_B = ApiKey("b", digest(B.encode()), cache_salt="b's own")


def body(**fields: object) -> Body:
    return Body.parse(json.dumps(fields).encode())


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("space", [" ", "  "])
def test_a_key_is_known_by_its_hash(scheme: str, space: str) -> None:
    store = KeyStore([KEY_A, KEY_B])
    assert store.caller(f"{scheme}{space}{A}".encode()).name == "a"
    assert store.caller(f"{scheme}{space}{B}".encode()).name == "b"


@pytest.mark.parametrize(
    "given_header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        A.encode(),
        b"Basic " + A.encode(),
        b"Bearer " + A[:-1].encode(),
        b"Bearer " + A.encode() + b"x",
        b"Bearer " + A.encode() + b", Bearer " + B.encode(),  # two headers
        b"Bearer " + digest(A.encode()),
        b"Bearer " + digest(A.encode()).hex().encode(),
        b"Bearer \xff\xfe",
        b"Bearer " + b"x" * 60_000,
    ],
)
def test_what_is_no_key_is_not_known(given_header: bytes) -> None:
    store = KeyStore([KEY_A, KEY_B])
    with pytest.raises(Unauthorized) as refused:
        store.caller(given_header)
    assert store.refused == {Refused.UNKNOWN_KEY: 1}
    error = json.loads(refused.value.body())["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert dict(refused.value.headers())[b"www-authenticate"] == b'Bearer error="invalid_token"'


def test_a_request_without_a_key_is_told_how_to_give_one() -> None:
    store = KeyStore([KEY_A])
    with pytest.raises(Unauthorized, match="Authorization: Bearer KEY") as refused:
        store.caller(None)
    assert store.refused == {Refused.NO_KEY: 1}
    assert dict(refused.value.headers())[b"www-authenticate"] == b"Bearer"


@given(st.binary(max_size=100))
def test_nothing_but_a_key_lets_in(header: bytes) -> None:
    with pytest.raises(Unauthorized):
        KeyStore([KEY_A]).caller(header)


def test_keys_are_new_each_time_and_long_enough_not_to_be_guessed() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("sk-tandem-") and len(key) - len("sk-tandem-") == 43 for key in made)


def test_a_key_that_leaves_lets_nobody_in_and_what_it_runs_goes_on() -> None:
    store = KeyStore([KEY_A, KEY_B])
    running = store.caller(f"Bearer {A}".encode())
    running.begin()
    store.replace([KEY_B])
    with pytest.raises(Unauthorized):
        store.caller(f"Bearer {A}".encode())
    running.prompt(3)
    running.end(3, 4)
    assert [account.key.name for account in store] == ["b"]


def test_another_key_of_the_same_name_is_the_same_account() -> None:
    store = KeyStore([KEY_A])
    store.caller(f"Bearer {A}".encode()).begin()
    store.replace([replace(KEY_A, digest=KEY_B.digest)])
    store.caller(f"Bearer {B}".encode()).begin()
    with pytest.raises(Unauthorized):
        store.caller(f"Bearer {A}".encode())
    (account,) = store
    assert (account.requests, account.running) == (2, 2)


def test_a_request_keeps_the_salt_and_models_that_it_began_with() -> None:
    store = KeyStore([KEY_B])
    caller = store.caller(f"Bearer {B}".encode())
    store.replace([replace(KEY_B, cache_salt="another", models=frozenset({"x"}))])
    assert caller.salted(body()).get("cache_salt") == "b's own"
    assert caller.may_use("m")


@pytest.mark.parametrize("sent", [{}, {"cache_salt": "mine"}, {"cache_salt": None}, {"cache_salt": 7}])
def test_a_keys_own_salt_takes_the_place_of_any(sent: dict[str, object]) -> None:
    caller = KeyStore([KEY_A, KEY_B]).caller(f"Bearer {B}".encode())
    edited = json.loads(caller.salted(body(prompt="x", **sent)).edited({}))
    assert edited == {"prompt": "x", "cache_salt": "b's own"}


@pytest.mark.parametrize("sent", [{}, {"cache_salt": "mine"}, {"cache_salt": None}, {"cache_salt": 7}])
def test_a_key_without_a_salt_may_have_one_of_its_client(sent: dict[str, object]) -> None:
    caller = KeyStore([KEY_A, KEY_B]).caller(f"Bearer {A}".encode())
    assert json.loads(caller.salted(body(prompt="x", **sent)).edited({})) == {"prompt": "x", **sent}


def test_nobody_uses_another_keys_salt() -> None:
    store = KeyStore([KEY_A, KEY_B])
    with pytest.raises(ApiError) as refused:
        store.caller(f"Bearer {A}".encode()).salted(body(cache_salt="b's own"))
    assert (refused.value.status, refused.value.param) == (400, "cache_salt")
    assert next(iter(store)).refused == {Refused.SALT: 1}
    store.replace([KEY_A])
    store.caller(f"Bearer {A}".encode()).salted(body(cache_salt="b's own"))


def test_a_key_uses_only_the_models_that_it_may() -> None:
    store = KeyStore([replace(KEY_A, models=frozenset({"m", "n"}))])
    caller = store.caller(f"Bearer {A}".encode())
    caller.check_model("m")
    with pytest.raises(ApiError, match=r"The model 'x' does not exist here, or .* It may use: m, n\.") as no:
        caller.check_model("x")
    assert (no.value.status, no.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError, match=r"'model' is missing; your key may use: m, n\.") as no:
        caller.check_model(None)
    assert no.value.status == 400
    assert (caller.may_use("n"), caller.may_use("x")) == (True, False)
    assert next(iter(store)).refused == {Refused.MODEL: 2}
