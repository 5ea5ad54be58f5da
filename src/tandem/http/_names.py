"""Addresses of host names, looked up in threads that hold up nothing but those who ask for the same name.

The system's resolver blocks and cannot be stopped: with a name server that is silent it takes half a minute
to give up. The event loops run it in a handful of threads (uvloop in four, in which a few such names fill
them all, and then nobody connects to any name). Here each name has at most one thread, and names that were
not found last time cannot have them all.
"""

import asyncio
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_AT_ONCE = 256
"""Look-ups at once: a thread each, whose stack is hardly touched."""

_KEPT = 1.0
"""Seconds that an answer counts, so that a burst of connections needs one look-up. Longer than that, the
resolver's own cache may know better."""

_REMEMBERED = 16_384  # names, of which it is known whether they were found
_MOST = 16  # addresses of one name that are tried

Answer = list[str] | str
"""The addresses of a name, or why there are none."""


class _LookUp:
    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting = 0
        self.runs = False
        self.until = 0.0


class Names:
    """One look-up at a time for each name, shared by all who wait for it."""

    def __init__(
        self,
        *,
        resolve: Callable[[str], list[str]] | None = None,
        at_once: int = _AT_ONCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`resolve` blocks, and raises OSError or ValueError; by default it is the system's."""
        self._resolve = resolve or system_addresses
        self._at_once = at_once
        self._clock = clock
        self._running = 0
        self._look_ups: dict[str, _LookUp] = {}
        """Those that wait for a thread, in their order; that run; or whose answer still counts."""
        self._found: dict[str, bool] = {}
        """Whether a name had addresses the last time."""

    async def addresses(self, host: str) -> list[str]:
        """The IP addresses of a host in the order to be tried; of an address itself. Raises OSError.

        May take as long as the resolver likes: callers bound their wait. Who leaves takes the look-up from
        nobody else, and who comes back joins it.
        """
        if _is_address(host):
            return [host]
        look_up = self._look_ups.get(host)
        if look_up is None or (look_up.answer.done() and look_up.until <= self._clock()):
            self._forget_old()
            look_up = self._look_ups[host] = _LookUp()
            self._start_next()
        look_up.waiting += 1
        try:
            answer = await asyncio.shield(look_up.answer)
        finally:
            look_up.waiting -= 1
            if not look_up.waiting and not look_up.runs and not look_up.answer.done():
                self._look_ups.pop(host, None)  # nobody wants it any more
        if isinstance(answer, str):
            raise OSError(answer)
        return answer

    def _start_next(self) -> None:
        """Give free threads to those who wait: first to names that were found last time, at last to those
        that were not, which cannot have more than half of them."""
        waiting = [host for host, each in self._look_ups.items() if not each.runs and not each.answer.done()]
        waiting.sort(key=self._room, reverse=True)
        for host in waiting:
            if self._running >= self._room(host):
                return
            self._start(host)

    def _room(self, host: str) -> int:
        """How many threads may run for one to be started for a name."""
        found = self._found.get(host)
        if found is None:
            return max(1, self._at_once * 3 // 4)
        return self._at_once if found else max(1, self._at_once // 2)

    def _start(self, host: str) -> None:
        loop = asyncio.get_running_loop()
        look_up = self._look_ups[host]
        look_up.runs = True
        self._running += 1

        def run() -> None:
            try:
                answer: Answer = self._resolve(host) or f"the name {host} has no address"
            except (OSError, ValueError) as error:  # ValueError: what no name looks like
                answer = f"the name {host} cannot be looked up: {error}"
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._ended, host, look_up, answer)

        try:
            # A daemon: the process may end while a name server is silent.
            threading.Thread(target=run, name=f"look-up of {host}", daemon=True).start()
        except RuntimeError as error:  # the system has no threads left
            self._running -= 1
            self._settle(look_up, f"the name {host} cannot be looked up: {error}")

    def _ended(self, host: str, look_up: _LookUp, answer: Answer) -> None:
        self._running -= 1
        self._found.pop(host, None)
        self._found[host] = not isinstance(answer, str)
        if len(self._found) > _REMEMBERED:
            del self._found[next(iter(self._found))]
        self._settle(look_up, answer)
        self._start_next()

    def _settle(self, look_up: _LookUp, answer: Answer) -> None:
        look_up.runs = False
        look_up.until = self._clock() + _KEPT
        look_up.answer.set_result(answer)

    def _forget_old(self) -> None:
        now = self._clock()
        old = [host for host, each in self._look_ups.items() if each.answer.done() and each.until <= now]
        for host in old:
            del self._look_ups[host]


def system_addresses(host: str) -> list[str]:
    """What the system's resolver says, /etc/hosts and search domains included. Blocks. Raises OSError, and
    ValueError for what cannot be a name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = dict.fromkeys(_text(address) for *_, address in found)
    return list(addresses)[:_MOST]


def _text(address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]) -> str:
    host = str(address[0])
    scope = address[3] if len(address) == 4 else 0
    return f"{host}%{scope}" if scope and "%" not in host else host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
