"""An endpoint of the OpenAI API that judges as a test says. As a program it counts letters at a port, and kills itself
instead of the answer of a given number."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def verdict(text: str, tokens: int = 10) -> tuple[int, dict, dict]:
    usage = {"prompt_tokens": tokens - 3, "completion_tokens": 3, "total_tokens": tokens}
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}


def letters(body: dict, number: int) -> tuple[int, dict, dict]:
    """Judge by the number of letters of the completion, the last text, and the vote."""
    text = body["messages"][1]["content"].rpartition("<data ")[2]
    return verdict(f"SCORE: {(sum(map(str.isalpha, text)) + body['seed']) % 11}")


@contextmanager
def judging(answer: Callable[[dict, int], tuple[int, dict, dict]], port: int = 0):
    """An endpoint of the OpenAI API, which keeps what it is asked. `answer` gets a request's body and its number."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append((self.path, self.headers.get("Authorization"), body))
                number = len(server.asked) - 1
            status, headers, said = answer(body, number)
            said = json.dumps(said).encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": len(said)}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.asked, server.url = [], f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


def main() -> None:
    port, last = map(int, sys.argv[1:])

    def answer(body: dict, number: int) -> tuple[int, dict, dict]:
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return letters(body, number)

    with judging(answer, port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
