"""`python -m tests.serving.fake_server PORT DRAIN_SECONDS [free] [N]`: runs run_server over a fake engine.

Without `free`, each choice waits after its first token until SIGUSR1. The process prints "loading" when it makes the
engine. With N, there are N API server processes, each with a fake engine of its own.
"""

import asyncio
import functools
import logging
import multiprocessing
import signal
import sys

from serving.http.api_processes import Launch
from serving.http.metrics_directory import share_metrics
from serving.http.settings import ServerSettings
from tests.serving.fake_engine import FakeEngine


class HeldEngine(FakeEngine):
    async def start(self) -> None:
        await super().start()
        self.hold_after, self.queue = 1, 1000
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.gate.set)

    def client_gone(self, client, pid):
        logging.getLogger(__name__).info("client %d is gone", client)

    def submit(self, request):
        logging.getLogger(__name__).info("submitted %s", request.id)
        return super().submit(request)


def make_engine() -> FakeEngine:
    print("loading", flush=True)  # noqa: T201
    return FakeEngine() if "free" in sys.argv else HeldEngine()


def log() -> None:
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(processName)s: %(message)s")


def main() -> int:
    count = next((int(word) for word in sys.argv[3:] if word.isdigit()), 1)
    multiprocessing.current_process().name = "api-server-0"
    log()
    if count > 1:
        share_metrics()
    from serving.http.lifecycle import CannotListen, bind, run_server
    from serving.http.server import make_app

    try:
        sock = bind("127.0.0.1", int(sys.argv[1]))
    except CannotListen as error:
        sys.stderr.write(f"{error}\n")
        return 1
    settings = ServerSettings(served_model_name=("fake",), shutdown_timeout=float(sys.argv[2]), api_server_count=count)
    app = functools.partial(make_app, settings=settings)

    def launch(engine: FakeEngine, number: int) -> Launch:
        return Launch(
            name=f"api-server-{number}",
            prepare=log,
            make_engine=make_engine,
            make_app=app,
            sock=sock,
            settings=settings,
        )

    return run_server(make_engine, app, sock, settings, launch=launch)


if __name__ == "__main__":
    sys.exit(main())
