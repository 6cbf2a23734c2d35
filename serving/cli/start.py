"""The command `omni-jax`: signals first, then what is slow to import."""

from typing import NoReturn


def start() -> NoReturn:
    """Runs the command line. SIGINT and SIGTERM end it within two seconds, while it imports and loads too."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback even of the next import
    from omni_jax.interrupts import run

    def command() -> None:
        from serving.cli.main import main

        main()

    run(command)


if __name__ == "__main__":
    start()
