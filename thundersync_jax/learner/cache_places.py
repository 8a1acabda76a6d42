"""`CachePlaces`: whose trajectory caches lie on the device, of one replica. Pure host decisions.

Invariants:
  * A cache is at one place of the device, or in the host's memory, or new: never at two, and at a
    place there is one cache.
  * After `reach` all that were wanted are on the device; the others left in the order in which they
    were last wanted, and only where no place was free.
  * What is released takes no place and is in nobody's memory.

No jax: `cache_pages.py` copies what `reach` decides, before the call that wants it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(Generic[Owner]):
    """Whose cache leaves a place for the host, and whose comes there from the host, or nobody's."""

    place: int
    leaving: Owner | None
    entering: Owner | None


class CachePlaces(Generic[Owner]):
    """The places of a replica, and which owners' caches the host holds."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._places: dict[Owner, int] = {}  # the least recently wanted first
        self._in_host: set[Owner] = set()

    def __getitem__(self, owner: Owner) -> int:
        """The place of a cache that the last `reach` wanted."""
        return self._places[owner]

    def release(self, is_over: Callable[[Owner], bool]) -> list[Owner]:
        """Forgets the caches that nobody needs any more; the owners of those that the host held."""
        self._places = {o: place for o, place in self._places.items() if not is_over(o)}
        gone = [owner for owner in self._in_host if is_over(owner)]
        self._in_host.difference_update(gone)
        return gone

    def reach(self, wanted: Sequence[Owner]) -> list[Exchange[Owner]]:
        """Gives every wanted cache a place; what has to be copied for that, in this order."""
        if len(wanted) > self._num_places:
            raise AssertionError(
                f"a call wants {len(wanted)} caches, expected at most the {self._num_places} places"
            )
        for owner in wanted:
            if owner in self._places:
                self._places[owner] = self._places.pop(owner)
        exchanges = [self._place(owner) for owner in wanted if owner not in self._places]
        return [e for e in exchanges if (e.leaving, e.entering) != (None, None)]

    def _place(self, owner: Owner) -> Exchange[Owner]:
        """Places a cache where nothing lies, or else where the least recently wanted one does."""
        leaving = None
        free = set(range(self._num_places)) - set(self._places.values())
        if free:
            place = min(free)
        else:
            leaving = next(iter(self._places))
            place = self._places.pop(leaving)
            self._in_host.add(leaving)
        entering = owner if owner in self._in_host else None
        self._in_host.discard(owner)
        self._places[owner] = place
        return Exchange(place=place, leaving=leaving, entering=entering)
