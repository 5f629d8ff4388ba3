"""What Ray Serve's controller knows about a deployment: its replicas with their state, process and machine."""

from __future__ import annotations

from typing import Any


def deployment_details(application: str, deployment: str) -> Any:
    """The `ray.serve.schema.DeploymentDetails` of a deployment, with its replicas; None: it does not exist.

    `serve.status` only counts replicas; Ray's dashboard, which is not started here, shows the same details.
    """
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeInstanceDetails

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    found = ServeInstanceDetails(**client.get_serve_details()).applications.get(application)
    return found.deployments.get(deployment) if found else None
