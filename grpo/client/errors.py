"""What can go wrong between the trainer and its servers."""

from __future__ import annotations


class ServerError(RuntimeError):
    """The reference cannot serve this run. The message says which server, what it said, and what to do."""


class ServersLost(ServerError):
    """Some rank gets no answer. Raised on every rank at the same place, with weights as after the last step."""


class ServersUnavailable(ServerError):
    """No server answered before the deadline."""


class Failure(Exception):
    """An attempt that failed as another may not. The message follows the server's URL in a sentence."""

    def __init__(self, said: str, retry_after: float = 0.0, other_model: str = ""):
        super().__init__(said)
        self.retry_after = retry_after
        """seconds after which the server wants to be asked again; 0 where it said nothing of it"""
        self.other_model = other_model
        """fingerprint of what it serves, where that was never this run's reference"""


class Loading(Failure):
    """The server is loading its model."""


class Outdated(Failure):
    """The server has a reference that this run has replaced."""

    def __init__(self, fingerprint: str):
        super().__init__(f"has missed an update of the reference (it serves {fingerprint})")
        self.fingerprint = fingerprint
