"""What keeps an endpoint from being planned."""


class EngineError(ValueError):
    """An endpoint that cannot be run as it is written. The message names the field and says what to do."""


class MachineError(EngineError):
    """A machine that cannot run engines, or not as many as the endpoint asks for."""
