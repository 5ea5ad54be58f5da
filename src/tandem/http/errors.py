"""What can go wrong between a client and an origin, and what no message may carry."""


class InvalidHeader(ValueError):
    """A header, method or target that would change the message around it (header injection)."""


class HTTPClientError(Exception):
    """Any failure to get a whole response from an origin (`origin` as `http://host:port`), which its message
    names."""

    def __init__(self, origin: object, message: str) -> None:
        super().__init__(f"{origin}: {message}")
        self.origin = str(origin)


class ConnectFailed(HTTPClientError):
    """No connection came about, in time or at all. The request was not sent, or only over a kept connection
    that was to be replaced (see `retry` of `Client.stream`)."""


class HeadTimeout(HTTPClientError):
    """The request was sent and the head of the response did not come in time."""


class IdleTimeout(HTTPClientError):
    """The body of the response paused for too long."""


class UpstreamClosed(HTTPClientError):
    """The origin closed the connection before the response was whole."""

    def __init__(self, origin: object, message: str, *, before_first_byte: bool) -> None:
        super().__init__(origin, message)
        self.before_first_byte = before_first_byte
        """Whether not a single byte of the response had come."""


class ProtocolError(HTTPClientError):
    """The origin sent something that is not HTTP/1.1, or more of it than is allowed."""


class BodyTooLarge(HTTPClientError):
    """The body of the response is larger than the reader allows."""
