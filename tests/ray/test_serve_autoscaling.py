"""The autoscaling rule of the simulation decides as Ray Serve's own code does."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

pytest.importorskip("ray")

from fleet.serve_autoscaling import Autoscaling, ServeAutoscaler
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingConfig, AutoscalingContext


@pytest.mark.parametrize("seed", range(20))
def test_the_same_targets_over_an_hour_of_random_load(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "min_replicas": rng.randint(1, 3), "max_replicas": rng.randint(4, 30),
        "target_ongoing_requests": rng.choice([1.37, 2.71, 7.53, 16.1]), "upscale_delay_s": rng.choice([0, 3, 30]),
        "downscale_delay_s": rng.choice([5, 60, 600]), "look_back_period_s": 12,
    }  # fmt: skip
    ours = ServeAutoscaler(Autoscaling(**settings))
    decide = autoscaling_policy._apply_autoscaling_config(autoscaling_policy.default_autoscaling_policy)
    config, target = AutoscalingConfig(**settings), settings["min_replicas"]
    state: dict[str, Any] = {}
    window: list[int] = []
    seen: set[int] = set()
    for now in range(3600):
        monkeypatch.setattr(autoscaling_policy.time, "time", lambda now=now: float(now))
        ongoing = max(0, int(60 * (1 - math.cos(now / 400)) + rng.gauss(0, 10)))
        window = [*window, ongoing][-13:]
        context = AutoscalingContext(
            deployment_id=None, deployment_name="", app_name=None, current_num_replicas=target,
            target_num_replicas=target, running_replicas=[], total_num_requests=sum(window) / len(window),
            total_queued_requests=None, aggregated_metrics=None, raw_metrics=None, capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=1, policy_state=state, last_scale_up_time=None, last_scale_down_time=None,
            current_time=None, config=config,
        )  # fmt: skip
        wanted, state = decide(context)
        target = min(max(wanted, settings["min_replicas"]), settings["max_replicas"])
        assert ours.observe(float(now), ongoing) == target, f"after {now} s"
        seen.add(target)
    assert len(seen) > 1
