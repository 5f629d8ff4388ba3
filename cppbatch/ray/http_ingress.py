"""The ingress of the application for `serve deploy`: the HTTP API at Ray Serve's address.

A separate file because it imports the whole server; `serve_application` only imports it to build an application.
"""

from __future__ import annotations

from cppbatch.config import EngineConfig
from cppbatch.ray.engine import RayEngine
from cppbatch.server.asgi_server import AsgiServer
from cppbatch.server.settings import ServerSettings


class HttpIngress:
    """The ingress deployment: a front with its own `RayEngine` in each of its replicas."""

    def __init__(self, config: EngineConfig, settings: ServerSettings, engines: object) -> None:
        """`engines`: the handle of the engine deployment, which includes it in the same application."""
        self._config, self._settings = config, settings

    def __serve_build_asgi_app__(self) -> AsgiServer:
        """Called by Serve after the constructor."""
        from ray import serve

        from cppbatch.ray.replica.serve_replicas import ServeReplicas

        application = serve.get_replica_context().app_name
        return AsgiServer(
            lambda: RayEngine(self._config, ServeReplicas(application)),
            self._settings,
            without_headers=(b"date", b"server", b"x-request-id"),
        )
