"""Help in a terminal of 80 columns."""

import os
import re
import subprocess
import sys

COMMANDS = ("serve", "generate", "convert", "check", "describe-images", "ablate", "kv-study", "plan", "version")
PRINT_ALL = """
import sys
from serving.cli.main import main
for command in sys.argv[1:]:
    print("COMMAND", command, flush=True)
    sys.argv = ["omni-jax", command, "--help"]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""


def pages(columns: int) -> dict[str, str]:
    """What `omni-jax COMMAND --help` prints in so many columns."""
    done = subprocess.run(
        [sys.executable, "-c", PRINT_ALL, *COMMANDS],
        env=os.environ | {"COLUMNS": str(columns), "TERM": "dumb", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(page.split("\n", 1) for page in done.stdout.split("COMMAND ")[1:])
    assert tuple(found) == COMMANDS
    return found


def flags(page: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![…\w-])", page))


def test_every_flag_is_whole_in_80_columns():
    """Every flag of a wide terminal is there, unbroken, in a narrow one."""
    wide, narrow = pages(1000), pages(80)
    assert len(flags(wide["serve"])) > 40
    missing = {command: sorted(flags(wide[command]) - flags(narrow[command])) for command in COMMANDS}
    assert {command: broken for command, broken in missing.items() if broken} == {}
    assert not [command for command in COMMANDS if re.search(r"--[a-z-]*…", narrow[command])]
