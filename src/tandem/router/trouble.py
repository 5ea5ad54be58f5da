"""What is wrong with something that is followed, such as a source of engines: kept for those who ask, logged
when it changes."""

from __future__ import annotations

import logging

logger = logging.getLogger("tandem.router")


class Trouble:
    def __init__(self, source: str) -> None:
        """`source` is the subject of what is logged."""
        self._source = source
        self.text: str | None = None
        """What is wrong now and what comes of it; None: nothing is."""

    def tell(self, text: str) -> None:
        """Something is wrong. Said once for each text."""
        if text != self.text:
            logger.warning("%s: %s", self._source, text)
        self.text = text

    def over(self) -> None:
        if self.text is not None:
            logger.info("%s: is all right again", self._source)
        self.text = None
