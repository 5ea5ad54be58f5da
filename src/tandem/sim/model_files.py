"""A model's tokenizer files, as the reverse proxy of a model pod serves them beside the engine."""

from __future__ import annotations

from pathlib import Path

from tandem.http import Request
from tandem.prompt import FILES, MARKS
from tandem.sim.wire import Wire

PATH = "/tandem/model/"


class ModelFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """What it holds may change while it is served."""

    def send(self, request: Request, wire: Wire) -> None:
        """Answer a request for a path below PATH, as nginx does: GET and HEAD, ETags, 404 for all else."""
        name = request.path.removeprefix(PATH)
        path = self.folder / name
        if name not in (*FILES, *MARKS) or not path.is_file():
            wire.send(404, {"error": {"message": "There is no such path here."}})
        elif request.method not in ("GET", "HEAD"):
            wire.send(403, b"")
        else:
            told = path.stat()
            tag = b'"%x-%x"' % (told.st_mtime_ns, told.st_size)
            wire.add((b"etag", tag), (b"content-type", b"application/octet-stream"))
            if request.header(b"if-none-match") == tag:
                wire.send(304, b"")
            else:
                wire.send(200, path.read_bytes())
