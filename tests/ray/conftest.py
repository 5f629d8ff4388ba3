"""A Ray cluster of three nodes on this machine, started and ended by the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator

import pytest

import cppbatch.ray  # noqa: F401  # before Ray: its settings

# Before Ray is imported. Not where others look for a cluster of this machine, and a short path: those of sockets have a
# limit.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="cppbatch-ray-", dir="/tmp")
# A separate token: the user's token file is neither read nor written.
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=uuid.uuid4().hex, RAY_USAGE_STATS_ENABLED="0")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's name for: take the loopback address as the node's

import ray
from ray import serve
from ray.cluster_utils import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, so that no replica runs there, and two nodes with two each."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            started.add_node(num_cpus=2)
        ray.init(started.address, log_to_driver=False, namespace="cppbatch-tests")
        serve.start(proxy_location="Disabled")
        yield started
    finally:
        serve.shutdown()
        ray.shutdown()
        started.shutdown()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
