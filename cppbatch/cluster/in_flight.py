"""Which requests a worker gets after another one died, so that one that kills workers takes no other along."""

from __future__ import annotations

from collections.abc import Collection

from cppbatch.cluster.flight import Flight

MOST_CRASHES = 3
"""Workers in a row that a request may see die while they have it in hand."""


class Replay:
    """The requests that have not ended, and which of them the worker has.

    After one crash all of them go on together: mostly the cause was none of them. Those that were in hand at the next
    one too, and had got no token in between, are suspects. Each suspect is sent alone, until it gets a token: what a
    request does depends on nothing beside it, so that proves it harmless, and a crash proves it guilty. Then it makes
    way for the next suspect, and when there are none left all go on together again.
    """

    def __init__(self) -> None:
        self.flights: dict[int, Flight] = {}
        self._held: dict[int, Flight] = {}  # not sent to this worker yet
        self._suspects: dict[int, Flight] = {}

    def add(self, flight: Flight) -> None:
        """A new request."""
        self.flights[flight.number] = self._held[flight.number] = flight

    def to_send(self) -> list[Flight]:
        """Those that the worker should get now; they count as sent."""
        if not self._suspects:
            chosen = list(self._held.values())
        elif self._suspects.keys() <= self._held.keys():
            chosen = [next(iter(self._suspects.values()))]
        else:  # one is on trial
            chosen = []
        for flight in chosen:
            del self._held[flight.number]
        return chosen

    def is_sent(self, flight: Flight) -> bool:
        """Whether the worker knows of it."""
        return flight.number not in self._held

    def got_token(self, flight: Flight) -> bool:
        """It is no suspect any more. True when it was one, and has to make way for another: see `take_back`."""
        flight.crashes = 0
        was_suspect = self._suspects.pop(flight.number, None) is not None
        return was_suspect and bool(self._suspects)

    def take_back(self, flight: Flight, number: int) -> None:
        """It goes on later, under another number, so that what the worker still says of it now is of no concern."""
        self.ended(flight)
        flight.number = number
        self.add(flight)

    def ended(self, flight: Flight) -> None:
        """It is over, in whatever way."""
        for place in (self.flights, self._held, self._suspects):
            place.pop(flight.number, None)

    def crashed(self, at_work: Collection[int]) -> list[Flight]:
        """Notes that the worker died with these in hand. Returns those that are to fail; they have ended."""
        for number in at_work:
            if flight := self.flights.get(number):
                flight.crashes += 1
        guilty = [flight for flight in self.flights.values() if flight.crashes >= MOST_CRASHES]
        for flight in guilty:
            self.ended(flight)
        self._held = dict(self.flights)
        self._suspects = {n: flight for n, flight in self.flights.items() if flight.crashes == MOST_CRASHES - 1}
        return guilty
