"""The base of every command: one-line errors, an exit status for each kind of trouble, `--json`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, ClassVar, NoReturn

from django.core.management.base import BaseCommand, CommandError, CommandParser, SystemCheckError
from django.db import DatabaseError, IntegrityError, InterfaceError, OperationalError, ProgrammingError, connection
from django.db.migrations.executor import MigrationExecutor

from embeddings.errors import UsageError
from embeddings.management.rendering import Table, printable, render

USAGE, NO_DATABASE, INTERRUPTED = 2, 4, 130

Options = Mapping[str, Any]
Action = Callable[[Options], None]


class Refused(CommandError):
    """The command cannot do its task and has changed nothing."""


class Interrupted(CommandError):
    """Ctrl-C ended the command."""


class LineParser(CommandParser):
    """Reports a usage error in one line; argparse would print the whole usage first."""

    def error(self, message: str) -> NoReturn:
        refuse(self, message)


class SluicegateCommand(BaseCommand):
    """An entry point: parses, calls one verb, renders.

    An error is one line. Exit status 2: usage or configuration; 4: the database cannot be reached; 130: Ctrl-C.
    """

    examples: ClassVar[str] = ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        parser = super().create_parser(
            prog_name, subcommand, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=examples(self.examples)
        )
        parser.error = partial(refuse, parser)  # type: ignore[method-assign]
        return parser

    def execute(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().execute(*args, **options)
        except UsageError as error:
            raise Refused(printable(str(error)), returncode=USAGE) from error
        except SystemCheckError as error:
            error.returncode = USAGE
            raise
        except KeyboardInterrupt:
            raise Interrupted("stopped by Ctrl-C.", returncode=INTERRUPTED) from None
        except IntegrityError as error:
            raise Refused(
                "another process changed the same row at the same time: try again.", returncode=USAGE
            ) from error
        except (InterfaceError, OperationalError, ProgrammingError) as error:
            raise _database_refusal(error) from error

    def print_json(self, data: object) -> None:
        """Writes one JSON object and nothing else to standard output; moments in ISO 8601."""

        def plain(value: object) -> str:
            return value.isoformat() if isinstance(value, datetime) else str(value)

        self.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, default=plain))

    def print_table(self, table: Table) -> None:
        render(table, self.stdout)

    def note(self, line: str) -> None:
        """Writes a line for the person to standard error."""
        self.stderr.write(printable(line), self.style.WARNING)


class NounCommand(SluicegateCommand):
    """A command of several actions, such as `provider set`."""

    def add_arguments(self, parser: CommandParser) -> None:
        actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, parser_class=LineParser)
        self.add_actions(actions)

    def add_actions(self, actions: Any) -> None:
        raise NotImplementedError

    def add_action(self, actions: Any, name: str, act: Action, text: str, example: str) -> CommandParser:
        """One action with its help; `act` gets the parsed options."""
        parser: CommandParser = actions.add_parser(
            name,
            help=text,
            description=text,
            epilog=examples(example),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.set_defaults(act=act)
        return parser

    def handle(self, *args: Any, **options: Any) -> None:
        options["act"](options)


def add_json(parser: CommandParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def whole_number(text: str) -> int:
    """For argparse: digits only; `1.5`, `NaN`, `1_000` and text are refused."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def positive_number(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    number = whole_number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text!r}")
    return number


def examples(text: str) -> str | None:
    """The epilog of a help page, from one or more example lines."""
    return "examples:\n" + "\n".join(f"  manage.py {line}" for line in text.splitlines()) if text else None


def refuse(parser: CommandParser, message: str) -> NoReturn:
    """Reports a usage error: exits with status 2 on the command line, raises CommandError elsewhere."""
    line = f"{parser.prog}: {message}; see {parser.prog} --help"
    if parser.called_from_command_line:
        parser.exit(USAGE, f"{line}\n")
    raise CommandError(line, returncode=USAGE)


def migrations_missing() -> int:
    """The number of migrations not applied yet. Raises DatabaseError if the database cannot be reached."""
    executor = MigrationExecutor(connection)
    return len(executor.migration_plan(executor.loader.graph.leaf_nodes()))


def _database_refusal(error: Exception) -> Exception:
    """One line if tables are missing or the database cannot be reached; otherwise the error itself."""
    try:
        missing = migrations_missing()
    except (DatabaseError, InterfaceError) as unreachable:
        reason = printable(str(unreachable).strip().splitlines()[0])
        return Refused(f"the database cannot be used: {reason}", returncode=NO_DATABASE)
    if missing:
        return Refused("the database lacks some tables: run `manage.py migrate` first.", returncode=USAGE)
    return error
