"""`omni-jax describe-images`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from serving.cli.options import AsJson, Switch
from serving.cli.support import fail, usage_error
from serving.describe.settings import DescribeSettings

EXAMPLE = 'omni-jax describe-images photos/ --prompt "What is in this image?" -o photos.jsonl --rate 20'


def describe_images(
    source: str,
    /,
    *,
    out: Annotated[Path, Parameter(name=("--out", "-o"))],
    prompt: str,
    settings: Annotated[DescribeSettings | None, Parameter(name="*")] = None,
    dry_run: Annotated[bool, Switch] = False,
    as_json: AsJson = False,
) -> int:
    """Ask a running server about each of many images.

    Exit codes: 0 every source has a text, 1 some failed, 2 wrong arguments, 130 interrupted. The same command, without
    --overwrite, continues where it stopped. A run stops early where all requests would fail: a wrong key or model, or a
    server that has gone.

    Args:
        source: Folder, searched recursively; an image; a URL; or a .txt file with a path or URL in each line. URLs are
            fetched by the server.
        out: JSONL file for the results, a row for each source in the order of completion. A source with a text there is
            skipped. A file *.run.json beside it stores prompt, model and settings.
        prompt: What to ask about each image.
        dry_run: Only list what would be sent.
        as_json: Print the summary as JSON on standard output.
    """
    from serving.describe import job
    from serving.describe.sources import UsageError

    try:
        values = (settings or DescribeSettings()).values()
        values["api_key"] = values["api_key"] or os.environ.get("OPENAI_API_KEY")
        options = job.Options(source=source, prompt=prompt, out=out, **values)
        done = job.plan(options) if dry_run else job.run(options)
    except (UsageError, ValueError) as error:
        usage_error(str(error))
    except (job.NoModel, OSError) as error:
        fail(str(error))
    if isinstance(done, list):
        print(json.dumps({"would_send": done}, ensure_ascii=False) if as_json else "\n".join(done))
        return 0
    if as_json:
        print(json.dumps(dataclasses.asdict(done), ensure_ascii=False))
    return done.exit_code
