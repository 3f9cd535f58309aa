"""HTTP for all clients: sessions, files in pieces, and the error of each fault of a network or a proxy. It imports
nothing that a worker's machine may lack, as connection.py does."""

import random
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO, TypeVar

import requests

from grpo.client.server_errors import RequestFailure, ServerError
from grpo.config.connection_settings import TOKEN_VARIABLE
from grpo.wire.refusals import ProtocolError
from grpo.wire.tensors import FilePart

CONNECT_SECONDS = 5.0  # to connect, and for all of /health
PIECE_BYTES = 16 << 20  # of a file in one request
# Sent again: a slow or cut body, an upload at another offset, too many requests, a proxy alone, a server not ready.
RETRIED = (408, 409, 429, 502, 503, 504)
_LONGEST_PAUSE = 5.0  # seconds between two tries
_Value = TypeVar("_Value")


class Sessions(threading.local):
    """The HTTP session of each thread, which has TCP connections of its own, as `session`."""

    def __init__(self, token: str | None, verify: str | bool, content_type: str):
        self.session = requests.Session()
        # Ignore http_proxy and the like: such a proxy leads out of the network, and the servers are inside.
        self.session.trust_env = False
        self.session.verify = verify
        self.session.headers["Content-Type"] = content_type
        if token:
            self.session.headers["Authorization"] = f"Bearer {token}"


def open_sessions(token: str | None, ref_ca_file: str | None, content_type: str) -> Sessions:
    """Raises ServerError if `ref_ca_file` holds no certificate."""
    if not ref_ca_file:
        return Sessions(token, True, content_type)
    try:
        ssl.create_default_context(cafile=ref_ca_file)
    except OSError as error:
        reason = f"no certificate can be read from it ({error}): name a PEM file"
        raise ServerError(f"ref_ca_file={ref_ca_file!r}: {reason}") from error
    # An absolute path: each new TCP connection reads it, and a reward function may change the working directory.
    return Sessions(token, str(Path(ref_ca_file).absolute()), content_type)


def send_pieces(file: BinaryIO, size: int, sha256: str, post: Callable) -> Iterator[None]:
    """Send a file by `post(query, body)`, from where an earlier upload of it ended. Yields after each piece. Raises
    RequestFailure if the server does not take it in, and the errors of `post`."""
    data, received = b"", 0
    while True:
        response = post(asdict(FilePart(sha256=sha256, size=size, offset=received)), data)
        try:
            now_received = int(response.json()["received"])
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailure(f"sent a damaged answer ({response.text[:200]!r})") from error
        if data and now_received <= received:
            raise RequestFailure(f"does not take in the file: it had {received} bytes and now {now_received}")
        received = now_received
        if data:
            yield
        if received >= size:
            break
        file.seek(received)
        data = file.read(PIECE_BYTES)


def decoded(body: bytes, decode: Callable[[bytes], _Value]) -> _Value:
    """Decode an answer. Raises RequestFailure for a damaged one."""
    try:
        return decode(body)
    except (ProtocolError, ValueError, KeyError, TypeError) as error:
        raise RequestFailure(f"sent a damaged answer ({error})") from error


def connection_failed(error: requests.RequestException) -> RequestFailure:
    root = _root_cause(error)
    if isinstance(root, TimeoutError):
        return RequestFailure("did not answer in time")
    return RequestFailure(f"cannot be reached ({getattr(root, 'strerror', None) or root})")


def connection_error(url: str, error: requests.RequestException) -> RequestFailure | ServerError:
    """Return what `connection_failed` does, and a ServerError for a certificate that does not verify."""
    if not isinstance(root := _root_cause(error), ssl.SSLCertVerificationError):
        return connection_failed(error)
    fault = f"has a certificate that does not verify ({root.verify_message})"
    remedy = "set ref_ca_file to the PEM file of the authority that signed it"
    return ServerError(f"{url} {fault}: {remedy}, and write the host as the certificate does")


def token_refused(url: str, token: str | None, users: str) -> ServerError:
    """Return the error of a server that does not take this token, or none. `users` must all have the same one."""
    remedy = f"give {users} the same one, with --token_file FILE or {TOKEN_VARIABLE}"
    return ServerError(f"{url} wants {'another' if token else 'a'} token: {remedy}")


def _root_cause(error: BaseException) -> BaseException:
    while (inner := error.__context__) is not None:
        error = inner
    return error


def read_error(response: requests.Response) -> tuple[str, str]:
    """Return the code and the message of a refusal of ours; of any other answer "" and its first line."""
    try:
        error = response.json()["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "", first_line(response)


def first_line(response: requests.Response) -> str:
    """Return the first line of a foreign body; for a web page, say that it is one."""
    line = response.text.strip().partition("\n")[0][:200]
    return "a web page: another program or a proxy answers there" if line.startswith("<") else line


def read_retry_after(response: requests.Response) -> float:
    """Return the seconds that a server wants its clients to wait; a proxy may name an hour for what takes seconds."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), 60.0) if value.isdecimal() else 0.0


def seconds_to_next_try(failures: int, retry_after: float) -> float:
    """Return how long to wait, with a random part: many ranks must not ask a server at the same moment."""
    if retry_after:
        return retry_after * random.uniform(1.0, 1.25)
    return min(_LONGEST_PAUSE, 0.05 * 2 ** min(failures, 10)) * random.uniform(0.5, 1.0)
