"""Whether a model fits beside those that are loaded: estimates and free memory as the tests say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cppbatch.config import EngineConfig
from cppbatch.errors import DoesNotFit
from cppbatch.sizing import sizes as models_beside
from cppbatch.sizing.buffers import MAPPED, Buffer
from cppbatch.sizing.estimate import Device, Footprint, MemoryEstimate
from cppbatch.sizing.sizes import LoadedSizes, first_beside

GIB = 2**30
GPU = Device("CUDA0", "a GPU", 8 * GIB, 8 * GIB)

Set = Callable[..., None]


def footprint(firm: float, mapped: float = 0, gpu: float = 0) -> Footprint:
    parts = (("CPU", firm), (MAPPED, mapped), ("CUDA0", gpu))
    buffers = [Buffer(kind="weights", buffer_type=kind, n_bytes=int(size * GIB)) for kind, size in parts if size]
    return Footprint(buffers=buffers)


def loaded(name: str, firm: float, mapped: float = 0) -> LoadedSizes:
    return LoadedSizes(EngineConfig(name), MemoryEstimate([footprint(firm, mapped)], []))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets the free GiB of the host, and what an engine needs by its -np."""

    def set_memory(free: float, by_parallel: dict[int, Footprint], devices: tuple[Device, ...] = ()) -> None:
        monkeypatch.setattr(models_beside, "free_host_memory", lambda: int(free * GIB))
        monkeypatch.setattr(
            models_beside,
            "estimate_memory",
            lambda configs: MemoryEstimate([by_parallel[config.n_parallel] for config in configs], list(devices)),
        )

    return set_memory


def choose(
    others: tuple[LoadedSizes, ...] = (), pinned: tuple[LoadedSizes, ...] = (), budget: float | None = None, *sizes: int
) -> int:
    """The -np of the chosen sizes."""
    candidates = [EngineConfig("new", n_parallel=n) for n in sizes or (16, 4)]
    limit = None if budget is None else int(budget * GIB)
    chosen = first_beside(candidates, others, pinned, engines=lambda one: [one], budget=limit)
    return chosen.config.n_parallel


def test_the_largest_sizes_that_leave_a_tenth_free_are_taken(memory: Set) -> None:
    memory(10, {16: footprint(8), 4: footprint(2)})
    assert choose() == 16
    memory(8.5, {16: footprint(8), 4: footprint(2)})
    assert choose() == 4
    memory(2.1, {16: footprint(8), 4: footprint(2)})
    assert choose() == 4, "the smallest need not leave a tenth free"


def test_fit_target_is_left_free_where_sizes_allow_it(memory: Set) -> None:
    memory(10, {16: footprint(8), 4: footprint(2)})
    for mib, n in ((2048, 16), (4096, 4), (9216, 4)):
        candidates = [EngineConfig("new", n_parallel=n, fit_target=(mib,)) for n in (16, 4)]
        assert first_beside(candidates, (), (), engines=lambda one: [one]).config.n_parallel == n


def test_weights_that_others_have_mapped_are_not_free(memory: Set) -> None:
    memory(10, {16: footprint(1, mapped=5), 4: footprint(0.5, mapped=5)})
    assert choose() == 16
    assert choose((loaded("other", 1, mapped=4.2),)) == 4
    same_file = (loaded("other", 1, mapped=2), loaded("other", 1, mapped=2))
    assert choose(same_file) == 16, "processes share the pages of a file"
    with pytest.raises(DoesNotFit) as refused:
        choose((loaded("other", 1, mapped=6),))
    assert not refused.value.never


def test_a_model_that_would_not_fit_alone_is_refused_permanently(memory: Set) -> None:
    memory(2, {16: footprint(8), 4: footprint(4)})
    others = (loaded("a", 1), loaded("b", 1.5))
    with pytest.raises(DoesNotFit) as refused:
        choose(others)
    assert not refused.value.never, "4.5 GiB would be free"
    with pytest.raises(DoesNotFit, match="more than there is") as refused:
        choose(others, pinned=others[1:])
    assert refused.value.never


def test_weights_that_must_be_read_again_and_again_are_accepted_only_when_nothing_else_can_leave(memory: Set) -> None:
    memory(4, {16: footprint(1, mapped=6), 4: footprint(0.5, mapped=6)})
    other = loaded("other", 1)
    with pytest.raises(DoesNotFit) as refused:
        choose((other,))
    assert not refused.value.never
    assert choose((other,), pinned=(other,)) == 4
    assert choose() == 4


def test_a_budget_limits_all_models_together(memory: Set) -> None:
    memory(100, {16: footprint(3, mapped=1), 4: footprint(1, mapped=1)})
    other = loaded("other", 2, mapped=1)
    assert choose((other,), (), 7) == 16
    assert choose((other,), (), 6) == 4
    for pinned, never in (((), False), ((other,), True)):
        with pytest.raises(DoesNotFit, match="--models-memory") as refused:
            choose((other,), pinned, 4)
        assert refused.value.never is never


def test_a_gpu_counts_too(memory: Set) -> None:
    memory(100, {16: footprint(1, gpu=7.5), 4: footprint(1, gpu=4)}, (GPU,))
    assert choose() == 4
    memory(100, {16: footprint(1, gpu=9), 4: footprint(1, gpu=9)}, (GPU,))
    with pytest.raises(DoesNotFit) as refused:
        choose((loaded("other", 1),))
    assert not refused.value.never, "what the others take of the GPU is not known"
    with pytest.raises(DoesNotFit) as refused:
        choose()
    assert refused.value.never


def test_settings_that_the_engine_refuses_are_left_to_the_loading(memory: Set) -> None:
    memory(1, {16: Footprint(error="no such type of cache"), 4: footprint(1)})
    assert choose() == 16
