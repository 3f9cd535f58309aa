"""A stand-in for the client of wandb, trackio or swanlab, which writes down its calls."""

from pathlib import Path

CLIENT = """
import json

def note(*call):
    with open({calls!r}, "a") as file:
        file.write(json.dumps(call) + "\\n")

class Table:
    def __init__(self, columns, data):
        self.content = [columns, data]

class Text:
    def __init__(self, text, caption):
        self.content = [text, caption]

def content(value):
    return [content(item) for item in value] if isinstance(value, list) else getattr(value, "content", value)

class Run:
    def log(self, values, step):
        note("log", step, {{name: content(value) for name, value in values.items()}})
    def finish(self):
        note("finish")

def init(config, **settings):
    note("init", settings)
    return Run()
"""


def write_client(folder: Path, name: str, calls: Path) -> Path:
    """Write a module `name` whose calls are appended to the file `calls`, a JSON list a line; return the folder."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(CLIENT.format(calls=str(calls)))
    return folder
