"""The command `persisting-torch`: look at and look after queues from a shell."""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
from collections.abc import Sequence

from persisting_torch.cli import care, look
from persisting_torch.cli.find import Mistake
from persisting_torch.errors import PersistingError

DONE, FAILED, MISTAKEN, INTERRUPTED = 0, 1, 2, 130

EPILOG = """\
QUEUE is a queue's name under --storage-path, or the path of its folder; paths may be URLs such as
s3://bucket/folder. No command makes a queue.
Exit codes: 0 done; 1 failed, or verify found faults; 2 there is no such queue, task or partition.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, of `sys.argv` if none is given; its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return DONE
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except Mistake as mistake:
        return _complain(str(mistake), MISTAKEN)
    except BrokenPipeError:
        # Who reads our output has had enough; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except sqlite3.DatabaseError as error:
        return _complain(f"the ledger of the queue cannot be read: {error}", FAILED)
    except (PersistingError, OSError) as error:
        return _complain(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED


def _complain(message: str, code: int) -> int:
    print(f"persisting-torch: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="persisting-torch",
        description="Look at and look after durable queues.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", action="store_true", help="print JSON")
    where = argparse.ArgumentParser(add_help=False)
    where.add_argument(
        "--storage-path", default="./data", metavar="PATH", help="where queues are (./data)"
    )
    where.add_argument(
        "--storage-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="how to reach an object store, such as aws_region=eu-central-1; may be repeated, and"
        " the environment (AWS_REGION) says the rest",
    )
    queue = argparse.ArgumentParser(add_help=False, parents=[where, output])
    queue.add_argument("queue", metavar="QUEUE", help="a queue's name, or the path of its folder")

    ls = commands.add_parser("ls", parents=[where, output], help="the queues under a path")
    ls.add_argument("path", nargs="?", metavar="STORAGE_PATH", help="in place of --storage-path")
    ls.set_defaults(run=look.ls)

    stats = commands.add_parser("stats", parents=[queue], help="fields, partitions, tasks, storage")
    stats.set_defaults(run=look.stats)

    head = commands.add_parser("head", parents=[queue], help="the first samples")
    head.add_argument("-n", type=_count, default=10, metavar="N", help="how many (10)")
    head.add_argument("--offset", type=_count, default=0, metavar="K", help="skip the first K")
    head.set_defaults(run=look.head)

    tail = commands.add_parser("tail", parents=[queue], help="the last samples")
    tail.add_argument("-n", type=_count, default=10, metavar="N", help="how many (10)")
    tail.add_argument("-f", "--follow", action="store_true", help="go on with those that come")
    tail.set_defaults(run=look.tail)

    verify = commands.add_parser("verify", parents=[queue], help="does the ledger fit the rows?")
    verify.set_defaults(run=look.verify)

    export = commands.add_parser("export", parents=[queue], help="all samples into one file")
    export.add_argument("file", metavar="FILE", help="a name that ends in .parquet or .arrow")
    export.set_defaults(run=look.export)

    compact = commands.add_parser("compact", parents=[queue], help="one round of upkeep, now")
    compact.set_defaults(run=care.compact)

    reset = commands.add_parser("reset", parents=[queue], help="let a task begin anew")
    reset.add_argument("--task", required=True, metavar="TASK")
    reset.add_argument(
        "--partition", metavar="PARTITION", help="in this one only (all of the task's)"
    )
    reset.add_argument("--yes", action="store_true", help="do not ask")
    reset.set_defaults(run=care.reset)

    seal = commands.add_parser("seal", parents=[queue], help="say that no more samples will come")
    seal.add_argument("--partition", metavar="PARTITION", help="to this one only (the whole queue)")
    seal.set_defaults(run=care.seal)
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return number


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE")
    return name, value
