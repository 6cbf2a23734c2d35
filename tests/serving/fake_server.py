"""`python -m tests.serving.fake_server PORT DRAIN_SECONDS [free]`: runs run_server over a fake engine.

Without `free`, each choice waits after its first token until SIGUSR1. The process prints "loading" when it makes the
engine.
"""

import asyncio
import logging
import signal
import sys

from serving.http.lifecycle import CannotListen, bind, run_server
from serving.http.server import make_app
from serving.http.settings import ServerSettings
from tests.serving.fake_engine import FakeEngine


class HeldEngine(FakeEngine):
    async def start(self) -> None:
        await super().start()
        self.hold_after = 1
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.gate.set)


def make_engine() -> FakeEngine:
    print("loading", flush=True)  # noqa: T201
    return FakeEngine() if "free" in sys.argv else HeldEngine()


def main() -> int:
    logging.basicConfig(level="INFO", stream=sys.stderr)
    try:
        sock = bind("127.0.0.1", int(sys.argv[1]))
    except CannotListen as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return run_server(
        make_engine,
        lambda engine: make_app(engine, settings=ServerSettings(served_model_name=("fake",))),
        sock,
        ServerSettings(shutdown_timeout=float(sys.argv[2])),
    )


if __name__ == "__main__":
    sys.exit(main())
