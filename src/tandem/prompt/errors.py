"""What can keep a prompt from being counted, by who can act on it."""


class LoadError(ValueError):
    """The model's tokenizer or template files cannot be used: what is wrong, in which file, what to do."""


class NotExact(Exception):
    """Local rendering cannot promise the engine's token ids for this request.

    `reason` is one of few fixed phrases ("multimodal", "prompt list", ...), fit for a metric label;
    `detail` names the field or file. Neither holds text of the prompt.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["NotExact"], tuple[str, str]]:
        return type(self), (self.reason, self.detail)


class BadPrompt(ValueError):
    """The engine is certain to refuse this prompt; `message` and `param` are for the 400 answer."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type["BadPrompt"], tuple[str, str | None]]:
        return type(self), (self.message, self.param)


class TooLong(Exception):
    """The prompt has more text than the caller lets be made of it, in characters."""

    def __init__(self, most: int) -> None:
        super().__init__(f"more than {most} characters")
        self.most = most


def is_panic(error: BaseException) -> bool:
    """Whether a library written in Rust gave up: no Exception, but no wish to end the process either."""
    return type(error).__name__ == "PanicException"
