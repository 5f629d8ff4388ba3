"""The rules by which a simulated fleet chooses a replica: the real one, and those that it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from cppbatch.cluster.prefix_router import PrefixRouter, prompt_prefixes
from cppbatch.engine.request import GenerationRequest


class Routing(Protocol):
    """A routing rule. `loads`: unfinished requests of each replica."""

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int: ...
    def forget(self, replica: int) -> None: ...


class PrefixRouting:
    """The routing rule of cppbatch (`cluster/rules.py`)."""

    def __init__(self, n_parallel: int) -> None:
        self._router: PrefixRouter[int] = PrefixRouter(n_parallel)

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int:
        prefixes = prompt_prefixes(request)
        chosen = self._router.choose(prefixes, loads)
        self._router.note(prefixes, chosen)
        return chosen

    def forget(self, replica: int) -> None:
        self._router.forget(replica)


class LoadRouting:
    """Fewest requests of all replicas (`n` None), of `n` random ones (2: Ray Serve's default), or a random one (1)."""

    def __init__(self, n: int | None, seed: int) -> None:
        self._n = n
        self._rng = np.random.default_rng((seed, 2))

    def choose(self, request: GenerationRequest, loads: Mapping[int, int]) -> int:
        """Of equals, a random one."""
        replicas = list(loads)
        if self._n is None:
            least = min(loads.values())
            best = [replica for replica in replicas if loads[replica] == least]
            return best[int(self._rng.integers(len(best)))]
        drawn: list[int] = self._rng.choice(replicas, min(self._n, len(replicas)), replace=False).tolist()
        return min(drawn, key=loads.__getitem__)

    def forget(self, replica: int) -> None:
        pass


ROUTINGS: dict[str, Callable[[int, int], Routing]] = {
    "prefix": lambda n_parallel, seed: PrefixRouting(n_parallel),
    "least-loaded": lambda n_parallel, seed: LoadRouting(None, seed),
    "power-of-two": lambda n_parallel, seed: LoadRouting(2, seed),
    "random": lambda n_parallel, seed: LoadRouting(1, seed),
}
"""By name: a rule for replicas with this `n_parallel`, and a seed."""
