"""The `prescore` command: finds its subcommands, turns errors into one sentence and an exit code."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prescore.errors import PrescoreError

if TYPE_CHECKING:
    import typer


_NOT_COMMANDS = ("main", "options")
DONE, FAULT, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0 done, 1 a fault, 2 bad usage, 130 interrupted."""
    return run(_build, "prescore", argv)


def script(command: Callable[..., None], argv: Sequence[str] | None = None) -> int:
    """Run a function as a command with options, records and errors as ours: for scripts of studies."""
    import typer

    from prescore.bench.cli.options import with_groups

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(with_groups(command))
    return run(lambda: app, Path(inspect.getfile(command)).name, argv)


def run(build: Callable[[], typer.Typer], name: str, argv: Sequence[str] | None) -> int:
    """Run the command line of an application; errors become one sentence and an exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        import typer

        from prescore.bench.cli.options import ARGV, load_imports
    except ModuleNotFoundError as error:
        return _fail(
            f"""prescore's command line needs {error.name}: pip install ".[eval]" in a clone of prescore"""
        )
    token = ARGV.set((name, *argv))
    debug = "--debug" in argv
    try:
        words = load_imports([word for word in argv if word != "--debug"])
        code = build()(words, prog_name=name, standalone_mode=False)
        # depending on its version, typer turns an interrupt into this code or into Abort
        if code == INTERRUPTED:
            return _fail("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else BAD_USAGE
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _refuse(error, argv)
    finally:
        ARGV.reset(token)


def _refuse(error: Exception, argv: Sequence[str]) -> int:
    # typer's usage errors have no public base class; all of them have this method
    if hasattr(error, "format_message"):
        return _fail(error.format_message() + _setting(error))
    if isinstance(error, ModuleNotFoundError):
        from prescore.bench.cli.info import installation

        package = str(error.name).partition(".")[0]
        prefer = "vision" if {"vision", "table2", "appendix-e", "appendix-g"} & {*argv} else "hf"
        return _fail(f"this command needs the package {package}{installation(package, prefer)}")
    if isinstance(error, ValueError | TypeError | OSError | PrescoreError):
        return _fail(str(error))
    # a fault in this package or in an imported one
    return _fail(f"{type(error).__name__}: {error}; --debug shows where", FAULT)


def _setting(error: Exception) -> str:
    """Where an unknown option is a field of a configuration: how it is set; else empty."""
    context, name = (
        getattr(error, "ctx", None),
        str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_"),
    )
    if context is None or not any("--set" in parameter.opts for parameter in context.command.params):
        return ""
    from prescore.bench.methods import field_paths
    from prescore.config import Hyper, Routed, Selected

    paths = {path for config in (Routed(), Selected(), Hyper()) for path in field_paths(config)}
    fitting = [name] if name in paths else sorted(path for path in paths if path.endswith(f".{name}"))
    return f" (a field of configurations: --set {fitting[0]}=VALUE)" if fitting else ""


def _fail(sentence: str, code: int = BAD_USAGE) -> int:
    if sentence:
        print(f"prescore: {sentence}", file=sys.stderr)
    return code


def _build() -> typer.Typer:
    """The application: every other file of this folder is a subcommand, its `command` function; and `paper`."""
    import typer

    from prescore.bench.cli.options import root, with_groups

    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

    app.callback()(root)
    package = importlib.import_module("prescore.bench.cli")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name):
        if module.name not in _NOT_COMMANDS:
            command = importlib.import_module(f"prescore.bench.cli.{module.name}").command
            app.command(name=module.name.replace("_", "-"))(with_groups(command))
    # by name: nothing in bench depends on the room of the paper
    importlib.import_module("prescore.paper.cli").add_to(app)
    return app


if __name__ == "__main__":
    sys.exit(main())
