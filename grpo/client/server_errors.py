"""Errors between the trainer and its servers: a ServerError ends the run, a RequestFailure is tried again."""


class ServerError(RuntimeError):
    """A fault that ends the run. The message names the server, its answer, and the remedy."""


class ServersUnavailable(ServerError):
    """A deadline at which no server had answered."""


class ServersLost(ServerError):
    """A request of some rank that got no answer. Every rank raises it, with weights as after the last step."""


class RequestRefused(ServerError):
    """A request that a server does not take, however often it is sent."""


class ResultRefused(ServerError):
    """Completions that the pool does not take: they cannot be those of their task."""


class RequestFailure(Exception):
    """A failed request that may be sent again. The message follows the server's URL in a sentence."""

    def __init__(self, reason: str, retry_after: float = 0.0, other_model: str = ""):
        super().__init__(reason)
        self.retry_after = retry_after  # seconds after which the server wants the next request; 0 if it named no time
        self.other_model = other_model  # fingerprint of the server's model, if this run never had that model


class FileFailure(RequestFailure):
    """A file that the pool does not have, or that came damaged. Asking for it again may never help."""


class ModelLoading(RequestFailure):
    """A request to a server that is loading its model."""


class ModelOutdated(RequestFailure):
    """A request to a server with weights that this run has replaced."""

    def __init__(self, fingerprint: str):
        super().__init__(f"has missed an update of the reference (it serves {fingerprint})")
        self.fingerprint = fingerprint
