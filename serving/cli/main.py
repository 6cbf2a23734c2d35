"""The command line: `omni-jax COMMAND`. A command imports what is slow to import when it runs."""

import json
import sys

from omni_jax.interrupts import run
from serving.cli.ablate import EXAMPLE as ABLATE_EXAMPLE
from serving.cli.ablate import ablate
from serving.cli.app import app, main
from serving.cli.chat import EXAMPLE as CHAT_EXAMPLE
from serving.cli.chat import chat
from serving.cli.convert import CHECK_EXAMPLE, CONVERT_EXAMPLE, check, convert
from serving.cli.describe_images import EXAMPLE as DESCRIBE_EXAMPLE
from serving.cli.describe_images import describe_images
from serving.cli.generate import EXAMPLE as GENERATE_EXAMPLE
from serving.cli.generate import generate
from serving.cli.kv_study import EXAMPLE as KV_STUDY_EXAMPLE
from serving.cli.kv_study import kv_study
from serving.cli.options import AsJson
from serving.cli.plan import EXAMPLE as PLAN_EXAMPLE
from serving.cli.plan import plan
from serving.cli.serve import EXAMPLE as SERVE_EXAMPLE
from serving.cli.serve import serve


def version(*, as_json: AsJson = False) -> int:
    """Print the versions of omni-jax, JAX and Python.

    Args:
        as_json: Print one JSON object instead of text.
    """
    from importlib.metadata import version as version_of

    versions = {"omni-jax": version_of("omni-jax"), "jax": version_of("jax"), "python": sys.version.split()[0]}
    print(json.dumps(versions) if as_json else "\n".join(f"{name} {number}" for name, number in versions.items()))
    return 0


COMMANDS = {
    serve: SERVE_EXAMPLE,
    chat: CHAT_EXAMPLE,
    generate: GENERATE_EXAMPLE,
    convert: CONVERT_EXAMPLE,
    check: CHECK_EXAMPLE,
    describe_images: DESCRIBE_EXAMPLE,
    ablate: ABLATE_EXAMPLE,
    kv_study: KV_STUDY_EXAMPLE,
    plan: PLAN_EXAMPLE,
    version: "omni-jax version --json",
}
for number, (function, example) in enumerate(COMMANDS.items()):
    app.command(function, help_epilogue="Example:\n\n" + example.replace("\n", "\n\n"), sort_key=number)

if __name__ == "__main__":
    run(main)
