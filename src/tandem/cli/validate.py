"""`tandem validate`: every mistake in manifests, before a cluster sees them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tandem.cli import FAILURE, OK, USAGE, complain, emit, remark
from tandem.cli.flags import model_config

if TYPE_CHECKING:
    from tandem.api.validation import Report

SUFFIXES = (".yaml", ".yml", ".json")
"""Of the files of a folder that are read, as kubectl does."""

STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f",
        "--file",
        dest="files",
        metavar="FILE",
        nargs="+",
        action="extend",
        required=True,
        help="manifests: files in YAML or JSON, folders of such files, or - for standard input",
    )
    parser.add_argument(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="the model's config.json: with it the PD buffer is compared with the longest prompt exactly",
    )
    parser.add_argument("--strict", action="store_true", help="fail on warnings too")
    parser.add_argument(
        "--format",
        choices=("human", "json", "github", "sarif"),
        default="human",
        help="how findings are printed: as lines, JSON, annotations of GitHub's workflows, or SARIF 2.1.0",
    )
    parser.add_argument(
        "--json", dest="format", action="store_const", const="json", help="the same as --format json"
    )


def run(arguments: argparse.Namespace) -> int:
    from tandem.api.problem import one_line
    from tandem.api.validation import Report, formats, read_manifest
    from tandem.engine.validation import validate

    report, endpoints, notes = Report(), 0, []
    try:
        config = model_config(arguments.model_config) if arguments.model_config else None
        for name, text in _texts(arguments.files):
            manifest = read_manifest(text, name)
            report += Report(tuple(manifest.findings))
            notes += manifest.notes
            for document in manifest.documents:
                report += validate(document.resource, lines=document.lines, model_config=config)
                endpoints += 1
        notes += _folders_of(arguments.files)
    except OSError as error:
        complain(one_line(f"{error.filename}: {error.strerror}"))
        return USAGE
    except ValueError as error:
        complain(one_line(str(error)))
        return USAGE
    if not endpoints and report.ok:
        report += _nothing(arguments.files)
    report = _in_order(report)
    match arguments.format:
        case "json":
            text = formats.as_json(report, endpoints, notes)
        case "sarif":
            text = formats.sarif(report)
        case "github":
            text = formats.github(report)
        case _:
            text = formats.human(report)
    written = emit(text)
    for note in notes if arguments.format != "json" else ():
        remark(f"note: {note}")
    remark(formats.counts(report, endpoints))
    return written or (OK if report.ok and not (arguments.strict and report.warnings) else FAILURE)


def _in_order(report: Report) -> Report:
    """Findings file by file, in the order that the files were named; lines in order."""
    from tandem.api.validation import Report

    files = list(dict.fromkeys(f.position.file for f in report.findings if f.position))

    def place(finding: Any) -> tuple[int, int, int]:
        if finding.position is None:
            return len(files), 0, 0
        return files.index(finding.position.file), finding.position.line, finding.position.column

    return Report(tuple(sorted(report.findings, key=place)))


def _nothing(files: Iterable[str]) -> Report:
    from tandem.api.models import KIND
    from tandem.api.validation import Finding, Position, Report

    named = ["<stdin>" if name == STDIN else name for name in files]
    at = Position(named[0], 1, 1) if len(named) == 1 else None
    return Report((Finding("IEC003", "", f"no object of kind {KIND} in {', '.join(named)}", at),))


def _texts(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each file's name and text. Raises OSError, or ValueError where it is not text."""
    for name in names:
        if name == STDIN:
            yield "<stdin>", _decoded(sys.stdin.buffer, "standard input")
            continue
        if not name:
            raise ValueError("-f: names no file")  # for Path it would be the folder that we are in
        path = Path(name)
        found = [path]
        if path.is_dir():
            found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES and not p.is_dir())
        for file in found:
            with file.open("rb") as opened:
                try:
                    text = _decoded(opened, str(file))
                except OSError as error:  # of reading it: only of opening it Python says which file
                    raise OSError(error.errno, error.strerror, str(file)) from None
            yield str(file), text


def _folders_of(names: Iterable[str]) -> list[str]:
    """A note on each folder of a named one: as by kubectl, it is not looked into."""
    named = [Path(name) for name in names if name != STDIN]
    found = [
        path for folder in named if folder.is_dir() for path in sorted(folder.iterdir()) if path.is_dir()
    ]
    shown = [path for path in found if path not in named and not path.name.startswith(".")]
    return [f"{path}: a folder of a folder is not looked into; name it too" for path in shown]


def _decoded(file: BinaryIO, name: str) -> str:
    from tandem.api.validation.manifest import MOST_BYTES, file_text

    try:
        return file_text(file.read(MOST_BYTES + 1))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
