"""What keeps an endpoint from being planned."""


class EngineError(ValueError):
    """An endpoint that cannot be run as it is written. The message names the field and says what to do."""
