"""The Ray cluster of a front: started on this machine or joined, with Ray's own log in a file."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import logging.handlers
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
import psutil

from cppbatch.errors import ConfigError

LOCAL = "local"
"""`--ray` without an address."""
_INSTALL = "install it with `pip install 'cppbatch[ray]'`, or in a checkout with `python3 scripts/install.py --ray`"

_OLDEST = (2, 60)
_AUTO = "auto"
_ADDRESS_VARIABLE, _AUTH_VARIABLE = "RAY_ADDRESS", "RAY_AUTH_MODE"


class Node(msgspec.Struct, frozen=True):
    """A live machine of the cluster."""

    address: str
    cpus: float
    gpus: float


class RayCluster(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster to which this process is connected."""

    address: str
    """The address of its head node: HOST:PORT."""
    is_own: bool
    """Whether this process started the cluster, which then ends with it."""
    log_file: str
    """The log file of Ray in this process."""
    session_logs: str
    """The folder with the logs of Ray's processes and the replicas on this machine."""
    wants_token: bool
    """Whether this process authenticated with the user's token; if so, all processes that join must."""


def alive_nodes() -> list[Node]:
    """The machines of the cluster to which this process is connected."""
    import ray

    return [
        Node(node["NodeManagerAddress"], node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    ]


def check_installed() -> None:
    """Raises `ConfigError` with the installation command if Ray is missing or too old. Does not import Ray."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"--ray requires Ray: {_INSTALL}") from None
    if not importlib.util.find_spec("fastapi"):
        raise ConfigError(f"--ray requires Ray with Ray Serve: {_INSTALL}")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST:
        raise ConfigError(
            f"--ray requires Ray {'.'.join(map(str, _OLDEST))} or newer, but {version} is installed: {_INSTALL}"
        )


@contextlib.contextmanager
def connect(address: str, *, num_cpus: int | None = None, known: RayCluster | None = None) -> Iterator[RayCluster]:
    """Starts a cluster on this machine or joins one; on exit, leaves it, or stops it if it was started here.

    `address`: `LOCAL` joins the cluster of RAY_ADDRESS or one started on this machine with `ray start`; otherwise it
    starts one. `auto` joins a cluster on this machine, HOST:PORT the cluster at this address. `num_cpus`: the logical
    CPUs of a new cluster; None: those of the machine. `known`: information about the cluster from another process of
    this user. Raises `ConfigError`.
    """
    check_installed()
    log_file = _prepare(address)
    if known and known.wants_token:
        os.environ.setdefault(_AUTH_VARIABLE, "token")
    if known and known.is_own:
        _stay_here()
    found = _find(address)
    if not found:
        _stay_here()
    import ray
    import ray.serve

    _log_to(log_file)
    try:
        with _stderr_to(log_file):
            info = _init(found, num_cpus)
    except Exception as error:
        raise ConfigError(_connection_error(found, error, log_file)) from error
    _log_to(log_file)  # Ray has removed the handler
    try:
        yield RayCluster(
            address=str(info["gcs_address"]),
            is_own=not found,
            log_file=str(log_file),
            session_logs=str(Path(info["session_dir"]) / "logs"),
            wants_token=os.environ.get(_AUTH_VARIABLE) == "token",  # set by Ray if it found the cluster itself
        )
    finally:
        ray.shutdown()


def _prepare(address: str) -> Path:
    """Sets the environment variables that Ray reads on import. Returns the file for its messages."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ["RAY_DEDUP_LOGS_SKIP_REGEX"] = "."  # all lines of Ray's processes that it would print here
    os.environ.setdefault("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "2")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if "://" in address:
        raise ConfigError(
            f"--ray {address}: the address must be HOST:PORT without a protocol, such as 10.0.0.5:6379, and this "
            "machine must be a node of that cluster (`ray start --address=HOST:PORT`)"
        )
    folder = Path(platformdirs.user_log_dir("cppbatch"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "ray.log"


def _stay_here() -> None:
    """Makes the cluster's processes only listen on 127.0.0.1. Has no effect once Ray is imported."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # makes Ray use the loopback address as the node's address


def _find(address: str) -> str:
    """The address at which `ray.init` joins a running cluster; "" to start one. Raises `ConfigError` if an expected
    cluster does not respond."""
    name = f"--ray {address}"
    if address in (LOCAL, _AUTO) and (named := os.environ.get(_ADDRESS_VARIABLE)):
        address, name = named, f"{_ADDRESS_VARIABLE}={named}"
    if address in (LOCAL, _AUTO) and _runs_here():
        return _AUTO
    if address == LOCAL:
        return ""
    if address == _AUTO:
        raise ConfigError(
            f"{name}: no Ray cluster is running on this machine. Start one with `ray start --head`, or use --ray "
            "without an address to start one automatically"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"{name} is not an address such as 10.0.0.5:6379; without an address, --ray starts a cluster")
    if why := _refuses(_as_ray_resolves(address)):
        raise ConfigError(
            f"{name}: cannot connect to a Ray cluster ({why}). Start one on that machine with `ray start --head`, "
            "which prints its address, or use --ray without an address to start one on this machine"
        )
    return address


def starts_own(address: str) -> bool:
    """Whether `connect` would start a cluster. Does not import Ray."""
    return address == LOCAL and not os.environ.get(_ADDRESS_VARIABLE) and not _runs_here()


def _runs_here() -> bool:
    """Whether `ray start` has started a cluster on this machine. Does not import Ray: see `_stay_here`."""
    folder = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "darwin" else tempfile.gettempdir())
    try:
        address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return False
    return not _refuses(address)


def _as_ray_resolves(address: str) -> str:
    """The address as Ray resolves it: loopback addresses become the machine's own."""
    from ray._private.services import canonicalize_bootstrap_address

    return str(canonicalize_bootstrap_address(address))


def _refuses(address: str) -> str:
    """The reason why the address is unreachable; "" if it is reachable."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _init(found: str, num_cpus: int | None) -> dict[str, Any]:
    import ray

    settings: dict[str, Any] = {"configure_logging": False, "log_to_driver": False, "namespace": "cppbatch"}
    if not found:
        settings |= {
            "num_cpus": num_cpus,
            "include_dashboard": False,
            "object_store_memory": 256 << 20,  # Ray's default is 30% of memory
        }
    return dict(ray.init(found or LOCAL, **settings).address_info)


def _log_to(file: Path) -> None:
    """Sends the messages of Ray and Ray Serve in this process to a file instead of the terminal."""
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=5 << 20, backupCount=1, delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    for name in ("ray", "ray.serve"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


@contextlib.contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Redirects the output of Ray's C++ code, which bypasses loggers, to the file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(file, "ab") as log_file:
        os.dup2(log_file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _connection_error(address: str, error: Exception, log_file: Path) -> str:
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    text = text.partition(" Traceback (")[0]
    more = f"Ray's messages are in {log_file}"
    if not address:
        return f"Ray could not be started on this machine: {text[:500]}. {more}"
    if "token" in text.lower() or "auth" in type(error).__name__.lower():
        return (
            f"the Ray cluster at {address} requires a token: set RAY_AUTH_MODE=token here, with the ~/.ray/auth_token "
            "of its head node in the same place on this machine"
        )
    if "ersion mismatch" in text:
        return f"the Ray cluster at {address} uses different versions from this process: {text[:500]}"
    if "No node info found" in text:
        return (
            f"this machine is not a node of the Ray cluster at {address}: run `ray start --address={address}` here "
            f"first (with --num-cpus=0 to run no replicas here). {more}"
        )
    if "Failed to connect" in text:
        return f"the program at {address} is not a Ray cluster, or does not accept this machine. {more}"
    return f"the Ray cluster at {address} cannot be joined: {text[:500]}. {more}"


# Records of what each `cppbatch serve --ray` of this user has started on this machine, in files that persist if the
# process is killed.


class FrontRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A front, its cluster, and the Serve application that it has deployed."""

    pid: int
    created: float
    """When the process started, in seconds since 1970, to distinguish it from a later process with the same pid."""
    cluster: RayCluster
    started_serve: bool
    """Whether the front started Ray Serve in the cluster."""
    application: str
    """The name of the application in Ray Serve."""
    model: str
    replicas: str
    """`2` or `1..8`."""

    @property
    def is_alive(self) -> bool:
        """Whether the front is running."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.created) < 1
            return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.Error:
            return False


@contextlib.contextmanager
def keep_record(record: FrontRecord) -> Iterator[None]:
    """Keeps the record in a file during the context. The file remains if the process is killed."""
    remember(record)
    try:
        yield
    finally:
        forget(record)


def remember(record: FrontRecord) -> None:
    """Writes the record."""
    _file(record).write_bytes(msgspec.json.encode(record))


def this_process() -> tuple[int, float]:
    """The pid and the start time of this process, for a `FrontRecord`."""
    return os.getpid(), psutil.Process().create_time()


def records() -> list[FrontRecord]:
    """All records, by pid. Deletes those of dead fronts that had their own cluster, which ended with them."""
    found = []
    for file in sorted(_folder().glob("*.json"), key=lambda file: int(file.stem)):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(file.read_bytes(), type=FrontRecord)
            if record.is_alive or not record.cluster.is_own:
                found.append(record)
            else:
                forget(record)
    return found


def forget(record: FrontRecord) -> None:
    """Deletes the record."""
    _file(record).unlink(missing_ok=True)


def _file(record: FrontRecord) -> Path:
    return _folder() / f"{record.pid}.json"


def _folder() -> Path:
    folder = Path(platformdirs.user_state_dir("cppbatch")) / "ray"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
