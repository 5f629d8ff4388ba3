"""What engines of all kinds have in common when they are opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

Engine = TypeVar("Engine", bound="Opened")


class Opened(ABC):
    """`async with` waits until the model is loaded, and closes the engine in the end."""

    @abstractmethod
    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises what loading raised."""

    @abstractmethod
    async def close(self) -> None:
        """Ends the engine."""

    async def __aenter__(self: Engine) -> Engine:
        try:
            await self.loaded()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
