"""What the server's log says about replicas that start, run, stop, die, or wait for a place."""

from __future__ import annotations

from cppbatch.ray.replica.watch import ReplicaChanges, SeenReplica

RUNNING = SeenReplica("running", 7, "10.0.0.5")
STARTING = SeenReplica("starting")
STOPPING = SeenReplica("stopping", 7, "10.0.0.5")
NEEDS = "it needs 2 CPUs (0 of 4 in the cluster are free) on one machine"


def test_each_change_is_reported_once() -> None:
    changes = ReplicaChanges()
    assert list(changes.lines(0, 1, {"a": STARTING}, NEEDS)) == []
    assert list(changes.lines(1, 1, {"a": RUNNING}, NEEDS)) == ["replica a runs on 10.0.0.5 (pid 7)"]
    assert list(changes.lines(2, 1, {"a": RUNNING}, NEEDS)) == []
    assert list(changes.lines(3, 2, {"a": RUNNING, "b": STARTING}, NEEDS)) == ["scaling to 2 replicas from 1"]
    assert list(changes.lines(4, 1, {"a": RUNNING, "b": STOPPING}, NEEDS)) == [
        "scaling to 1 replica from 2",
        "replica b is draining: it finishes its requests and ends",
    ]
    assert list(changes.lines(5, 1, {"a": RUNNING}, NEEDS)) == ["replica b has ended"]


def test_a_replica_that_vanishes_while_it_runs_has_died() -> None:
    changes = ReplicaChanges()
    list(changes.lines(0, 1, {"a": RUNNING}, NEEDS))
    assert list(changes.lines(1, 1, {"c": STARTING}, NEEDS)) == ["replica a has died"]


def test_a_replica_that_fits_no_machine_is_logged_once_with_its_requirements() -> None:
    changes = ReplicaChanges()
    said = [line for second in range(30) for line in changes.lines(second, 1, {"a": STARTING}, NEEDS)]
    assert said == [f"replica a is waiting for resources: {NEEDS}"]
    loading = SeenReplica("starting", 8, "10.0.0.5")  # it has a place, and loads the model
    changes = ReplicaChanges()
    assert [line for second in range(30) for line in changes.lines(second, 1, {"a": loading}, NEEDS)] == []
