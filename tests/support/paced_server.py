"""`cppbatch` whose workers make up to 100 steps a second: `python -m tests.support.paced_server serve ...`.

Texts of a tiny model then last long enough to be watched, stopped and interrupted on any machine, and need little CPU.
"""

from __future__ import annotations

from cppbatch import cli
from cppbatch.cluster.worker import process


def main() -> None:
    """Runs the command line."""
    start_early = process.start_early

    def start_paced() -> None:
        start_early()  # imports while this process does
        from cppbatch.cluster.engines.process import EngineProcess

        assert EngineProcess.__init__.__kwdefaults__
        EngineProcess.__init__.__kwdefaults__["runtime"] = "tests.support.failing_runtimes:paced"

    process.start_early = start_paced
    cli.main()


if __name__ == "__main__":
    main()
