"""The options of replicas for Ray Serve: their number, CPUs and GPUs, and what does not fit on any machine."""

from __future__ import annotations

import pytest

from cppbatch import EngineConfig
from cppbatch.errors import ConfigError
from cppbatch.ray.cluster import Node
from cppbatch.ray.replica.options import ReplicaOptions, for_nodes, for_own_machine, why_unplaceable, with_gpus

CONFIG = EngineConfig(model_path="model.gguf", n_parallel=6)


def test_a_fixed_number_is_not_autoscaled() -> None:
    options = ReplicaOptions(min_replicas=3, max_replicas=3, num_cpus=2).serve_options(CONFIG)
    assert options["num_replicas"] == 3
    assert "autoscaling_config" not in options
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 0}


def test_a_range_follows_the_load_with_as_many_requests_a_replica_as_it_computes_at_once() -> None:
    options = ReplicaOptions(min_replicas=1, max_replicas=8, downscale_delay=60).serve_options(CONFIG)
    scaling = options["autoscaling_config"]
    assert "num_replicas" not in options
    assert (scaling["min_replicas"], scaling["initial_replicas"], scaling["max_replicas"]) == (1, 1, 8)
    assert scaling["target_ongoing_requests"] == CONFIG.n_parallel
    assert scaling["downscale_delay_s"] == 60
    assert scaling["upscale_delay_s"] < 10  # Serve's own 30 s are longer than most requests


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2), (1, 5000)])
def test_a_wrong_range_is_refused_with_its_values(least: int, most: int) -> None:
    with pytest.raises(ConfigError, match=rf"--replicas is {least}\.\.{most}"):
        ReplicaOptions(min_replicas=least, max_replicas=most)


@pytest.mark.parametrize(("most", "n_cores", "threads"), [(1, 8, 8), (3, 8, 2), (8, 2, 1)])
def test_replicas_of_one_machine_divide_its_cores(most: int, n_cores: int, threads: int) -> None:
    options, config = for_own_machine(ReplicaOptions(max_replicas=most), CONFIG, n_cores)
    assert config.n_threads == threads
    assert options.num_cpus == threads


def test_given_threads_are_the_cpus_of_a_replica() -> None:
    config = EngineConfig(model_path="model.gguf", n_threads=3)
    assert for_own_machine(ReplicaOptions(), config, 16)[0].num_cpus == 3
    options, same = for_nodes(ReplicaOptions(max_replicas=4), config, [Node("a", 16, 0)])
    assert options.num_cpus == 3
    assert same.n_threads == 3


def test_a_replica_alone_on_a_machine_has_a_thread_for_each_core() -> None:
    options, config = for_nodes(ReplicaOptions(max_replicas=2), CONFIG, [Node("a", 8, 0), Node("b", 4, 0)])
    assert options.num_cpus == 4  # fits both
    assert config.n_threads == 0


def test_replicas_of_one_node_divide_its_cpus() -> None:
    nodes = [Node("head", 0, 0), Node("a", 8, 0), Node("b", 8, 0)]  # nothing can run on the first one
    options, config = for_nodes(ReplicaOptions(max_replicas=4), CONFIG, nodes)
    assert options.num_cpus == 4
    assert config.n_threads == 4
    assert for_nodes(ReplicaOptions(max_replicas=100), CONFIG, nodes)[0].num_cpus == 1


def test_each_replica_takes_a_gpu_if_there_are_any() -> None:
    assert with_gpus(ReplicaOptions(), [Node("a", 8, 0)], grows=False).num_gpus == 0
    assert with_gpus(ReplicaOptions(max_replicas=2), [Node("a", 8, 2)], grows=False).num_gpus == 1
    with pytest.raises(ConfigError, match=r"--replicas 1\.\.3: each replica needs a GPU.* has 2.*-ngl 0"):
        with_gpus(ReplicaOptions(max_replicas=3), [Node("a", 8, 2)], grows=False)
    assert with_gpus(ReplicaOptions(max_replicas=3), [Node("a", 8, 2)], grows=True).num_gpus == 1


def test_a_replica_that_fits_no_machine_is_reported_with_their_resources() -> None:
    nodes = [Node("10.0.0.1", 4, 0), Node("10.0.0.2", 2, 1)]
    assert why_unplaceable(ReplicaOptions(num_cpus=4), nodes) is None
    assert why_unplaceable(ReplicaOptions(num_cpus=2, num_gpus=1), nodes) is None
    problem = why_unplaceable(ReplicaOptions(num_cpus=8), nodes)
    assert problem
    assert problem.startswith("a replica needs 8 CPUs on one machine")
    assert "10.0.0.1: 4 CPUs" in problem
    assert why_unplaceable(ReplicaOptions(num_cpus=4, num_gpus=1), nodes)  # no single machine has both
