"""API keys: who may call a router, and how much."""

from tandem.router.keys.file import KeyFile, keys_of
from tandem.router.keys.key import ApiKey, Limits, digest, name_mistake, new_key, new_salt
from tandem.router.keys.key_list import entry, read_keys
from tandem.router.keys.store import Caller, KeyStore, Refused

__all__ = [
    "ApiKey",
    "Caller",
    "KeyFile",
    "KeyStore",
    "Limits",
    "Refused",
    "digest",
    "entry",
    "keys_of",
    "name_mistake",
    "new_key",
    "new_salt",
    "read_keys",
]
