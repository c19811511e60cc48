"""Let one writer at a time work on an object store, where no kernel releases a dead one's lock.

A lease is an object `lease-00000007.json` below the root. Its number is the attempt: it is created
exclusively, so among competitors one gets the next number. Its holder writes it again and again
with a counter. A competitor watches the counter by its own clock, never by the time that another
machine wrote down; one that stood still for `lease_seconds` is stale, and the next number may be
claimed. A holder that went away in order says `released`; one that died on the same machine is
missed at once.

A replaced writer may wake up and write on, so its lease alone protects nothing. The new holder
first claims its number, then looks what is committed, and writes the list into its lease as
`inherits`: what a lower attempt commits later is not on the list and never counts. And a holder
notes each of its own commits in its lease as `saved` before it looks for a higher number: what
the caller was told to be saved was noted before any successor claimed, so it is inherited, even
by a successor whose listing of the store is old.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from rowstep.components.checkpoints.array_files import CheckpointError
from rowstep.components.checkpoints.lease_holders import describe_this_process, is_running
from rowstep.components.checkpoints.objects import Objects
from rowstep.components.locks import LockHeldError

LEASE_SECONDS = 30.0
_LEASE = re.compile(r"lease-(\d{8,})\.json")
_NUM_KEPT = 32
"""Old leases that stay: a competitor that slept must still find its number taken."""


class Record(NamedTuple):
    """Hold what a lease says; what cannot be read in it is empty."""

    number: int
    text: bytes
    holder: dict[str, Any]
    inherits: frozenset[str] | None
    """Folders that count although a lower attempt wrote them; None until the holder has looked."""
    saved: frozenset[str]
    released: bool

    @property
    def holder_name(self) -> str:
        """Return who holds it, for people."""
        if "pid" not in self.holder or "host" not in self.holder:
            return "a process that has not written its name yet"
        return f"process {self.holder['pid']} on {self.holder['host']}"


class Leases:
    """Read and claim the leases of one root."""

    def __init__(self, objects: Objects, lease_seconds: float) -> None:
        self.objects = objects
        self.lease_seconds = lease_seconds

    def newest(self, listed: Iterable[str] | None = None) -> int:
        """Return the highest number, 0 where there is none.

        Args:
            listed: names below the root, if the caller has just listed them.

        Cost: a listing unless given; and one question an object that the listing did not know.
        """
        names = self.objects.listing() if listed is None else listed
        number = max((int(match[1]) for match in map(_LEASE.fullmatch, names) if match), default=0)
        # A listing may be old, a question for one object is not.
        while self.objects.entry(_name(number + 1)) is not None:
            number += 1
        return number

    def read(self, number: int) -> Record:
        """Return what a lease says."""
        try:
            text = self.objects.read(_name(number))
        except FileNotFoundError:
            text = b""
        try:
            fields = json.loads(text)
            inherits = fields["inherits"]
            return Record(
                number,
                text,
                dict(fields["holder"]),
                None if inherits is None else frozenset(inherits),
                frozenset(fields["saved"]),
                bool(fields["released"]),
            )
        except (ValueError, KeyError, TypeError):
            return Record(number, text, {}, None, frozenset(), False)

    def settled(self, listed: Iterable[str] | None = None) -> Record | None:
        """Return the newest lease whose holder has looked what is committed; it decides."""
        newest = self.newest(listed)
        for number in range(newest, max(newest - _NUM_KEPT, 0), -1):
            record = self.read(number)
            if record.inherits is not None:
                return record
        return None

    def acquire(
        self, wait_seconds: float, floor: Callable[[], int], inherit: Callable[[], list[str]]
    ) -> Lease:
        """Claim the next number once the holder of the newest is gone.

        Args:
            wait_seconds: how long to wait for a live holder. A holder on another machine that
                says nothing is watched for `lease_seconds` in any case, since only that tells
                whether it is alive.
            floor: returns the highest attempt that wrote a folder, should leases have been lost.
            inherit: returns the committed folders; it is called after the claim.

        Raises:
            LockHeldError: the holder is alive.
            OSError: the store refuses.
        """
        deadline = time.monotonic() + wait_seconds
        watch = _Watch()
        while True:
            number = self.newest()
            looked_at = time.monotonic()
            record = self.read(number) if number else None
            if record is None or self._is_free(record, watch.still_seconds(record, looked_at)):
                lease = self._claim(max(number, floor()) + 1, inherit)
                if lease is not None:
                    return lease
            elif time.monotonic() >= deadline and (watch.moved or is_running(record.holder)):
                raise LockHeldError(record.holder_name)
            else:
                time.sleep(min(self.lease_seconds / 10, 1.0))

    def _is_free(self, record: Record, still_seconds: float) -> bool:
        if record.released or is_running(record.holder) is False:
            return True
        return still_seconds >= self.lease_seconds

    def _claim(self, number: int, inherit: Callable[[], list[str]]) -> Lease | None:
        lease = Lease(self, number)
        if not self.objects.create(_name(number), lease.text()):
            return None
        lease.start()
        try:
            lease.write(inherits=inherit())
            names = self.objects.listing()
            # One who slept before the claim may have taken a number that was given up long ago.
            if self.newest(names) == number:
                for old in sorted(name for name in names if _LEASE.fullmatch(name))[:-_NUM_KEPT]:
                    with suppress(OSError):
                        self.objects.remove(old)
                return lease
        except BaseException:
            lease.release()
            raise
        lease.release()
        return None


class Lease:
    """Hold one number, and keep saying so from a thread until it is released."""

    def __init__(self, leases: Leases, number: int) -> None:
        self.number = number
        self.is_lost = False
        self._leases = leases
        self._fields: dict[str, Any] = {
            "token": uuid.uuid4().hex,
            "holder": describe_this_process(),
            "beat": 0,
            "inherits": None,
            "saved": [],
            "released": False,
        }
        self._mutex = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="rowstep-lease", daemon=True)

    def text(self) -> bytes:
        """Return the bytes of the lease's object."""
        return json.dumps(self._fields).encode()

    def start(self) -> None:
        """Start the thread that refreshes the lease four times in `lease_seconds`."""
        self._thread.start()

    def write(self, **fields: Any) -> None:
        """Change fields of the lease and write it.

        Raises:
            OSError: the store refuses.
        """
        with self._mutex:
            self._fields |= {**fields, "beat": self._fields["beat"] + 1}
            self._leases.objects.put(_name(self.number), self.text())

    def note(self, folder: str, *, is_committed: bool) -> None:
        """Note that a folder was committed, and write that; or, silently, that it goes away."""
        others = [name for name in self._fields["saved"] if name != folder]
        if is_committed:
            self.write(saved=[*others, folder])
        else:
            self._fields["saved"] = others

    def check(self, folder: str | None = None) -> None:
        """Refuse unless this is still the newest lease, or its successors inherited the folder.

        Raises:
            CheckpointError: another writer took over.
            OSError: the store does not say.
        """
        newest = self._leases.newest()
        if newest <= self.number:
            return
        self.is_lost = True
        settled = self._leases.settled()
        if settled and settled.number > self.number and folder in (settled.inherits or ()):
            return
        raise CheckpointError(
            f"{self._leases.objects.where}: only the newest writer may change checkpoints. Got "
            f"attempt {self.number}, which was silent for too long; attempt {newest} "
            f"({self._leases.read(newest).holder_name}) took over. What this run saved before is "
            "safe. Stop this run, the other one goes on."
        )

    def release(self) -> None:
        """Stop the thread and let go; where the store refuses, the lease becomes stale in time."""
        self._ended.set()
        with suppress(OSError):
            self.write(released=True)

    def _beat(self) -> None:
        while not self._ended.wait(self._leases.lease_seconds / 4):
            with suppress(OSError):  # the next one may arrive; a commit looks for itself
                self.write()


class _Watch:
    """Watch the newest lease by the clock of this machine alone."""

    def __init__(self) -> None:
        self.moved = False
        self._seen: tuple[int, bytes] | None = None
        self._since = 0.0

    def still_seconds(self, record: Record, looked_at: float) -> float:
        """Return for how long the lease has not changed; `looked_at` is before it was read."""
        seen = (record.number, record.text)
        if seen != self._seen:
            self.moved = self._seen is not None
            self._seen, self._since = seen, time.monotonic()
        return looked_at - self._since


def _name(number: int) -> str:
    return f"lease-{number:08d}.json"
