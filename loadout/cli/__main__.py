"""The `loadout` command: `loadout ...` or `python -m loadout.cli ...`.

Exit codes: 0 done, 1 it failed (one plain line on stderr says why), 2 the command line was wrong,
130 interrupted.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import typer

from loadout.cli.app import app
from loadout.cli.output import CommandFailed, error_text
from loadout.errors import LoadoutError

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code; never shows a traceback for errors that can
    happen."""
    try:
        code = command().main(arguments, prog_name="loadout", standalone_mode=False)
    except LoadoutError as error:
        return _complain(error_text(error), FAILED)
    except (CommandFailed, OSError) as error:
        return _complain(str(error), FAILED)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        # Errors of the command line parser have this method, in every version of typer.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        return _complain(format_message(), WRONG_USAGE)
    return code if isinstance(code, int) else 0


@cache
def command() -> Any:
    """Returns the command line's group of commands. It takes a while to make, and is made once."""
    return typer.main.get_command(app)


def _complain(message: str, code: int) -> int:
    print(f"loadout: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
