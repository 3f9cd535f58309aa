"""The trainer as a function, for scripts and notebooks.

    import grpo

    run = grpo.train(model="Qwen/Qwen2.5-0.5B-Instruct", train_dataset=dataset, reward_funcs=[brevity], beta=0)
    run.metrics, run.model_path, run.evaluate(dataset), run.chat("Why is the sky blue?"), run.plot()

A run is that of `grpo launch`, in processes of their own: it has the machine's cards, gives them back at its end, and
starts the reference server if it needs one. Under torchrun or the deepspeed launcher each rank runs its trainer so.
Its inputs lie in the folder OUTPUT_DIR.inputs: rows, functions (dill stores them), and settings that
`grpo launch --config` takes.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from grpo.config.command_line import to_yaml
from grpo.config.console import start_program
from grpo.config.errors import ConfigError, first_here, one_line
from grpo.config.fields import PROGRAMS
from grpo.config.sampling_settings import AgentCodeSection
from grpo.config.trainer import RecordSection, settings_in
from grpo.run.run_folder import check_unused, check_writable, is_finished, is_stop_asked, name_by_time, read_records

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from PIL.Image import Image

    Rows = Dataset | Sequence[Mapping[str, Any]] | str | Path

_STEP = re.compile(r"step (\d+) of (\d+): (.+)")
_ERROR = re.compile(r"^[^:]*(?:grpo|ref_server)[^:]*: error: (.+)", re.MULTILINE)  # no line of a compiler's
_LAST_LINES = 2.0  # seconds after a program's end in which its last lines are read
_FUNCTIONS_FILE = "given_functions.py"  # imports inside find it: a name that no module of the user's has
_FUNCTIONS = '''"""The functions that grpo.train was given."""

from pathlib import Path

import dill

for file in Path(__file__).parent.glob("*.dill"):
    globals()[file.stem] = dill.loads(file.read_bytes())
'''


class RunError(RuntimeError):
    """A run or an evaluation that ended early. The message says why, and how to continue."""


class Metrics(list[dict[str, float]]):
    """A dictionary for each step, step 0 for an evaluation before the first. A notebook shows a table."""

    def _repr_html_(self) -> str:
        import pandas

        return pandas.DataFrame(self)._repr_html_()


class SavedRun:
    """A run that is done, by its folder: `grpo.SavedRun("runs/20260101-120000")`."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder).expanduser().absolute()  # a notebook may change its directory
        self.model_path = self.folder / "model"

    def __repr__(self) -> str:
        return f"grpo.SavedRun({str(self.folder)!r})"

    @property
    def metrics(self) -> Metrics:
        return Metrics(read_records(self.folder / "metrics.jsonl"))

    def evaluate(self, dataset: Rows | None = None, **settings: Any) -> dict[str, float]:
        """Return the rewards of the model's answers to these rows, or the run's own: the metrics of `grpo eval`, whose
        options `settings` are. Raises SettingsError, RunError."""
        with tempfile.TemporaryDirectory() as folder:
            inputs = _Inputs(Path(folder), is_shared=False)
            output = Path(settings.pop("output", None) or Path(folder) / "output").expanduser()
            if isinstance(dataset, str | Path):
                settings["dataset_name"] = str(dataset)
            elif dataset is not None:
                settings |= {"dataset_name": inputs.rows("dataset", "test", dataset), "dataset_test_split": "test"}
            code = self._asked("reward_funcs", "reward_weights")
            if "reward_funcs" in settings:  # weights are for the functions that they were written with
                code.pop("reward_weights", None)
            _follow(["-m", "grpo.evaluate"], inputs.write({**code, **settings, "output": str(output)}), _alone())
            return json.loads((output / "metrics.json").read_text(encoding="utf-8"))

    def chat(self, question: str, **settings: Any) -> str:
        """Return the model's answer to one question. `settings` are options of `grpo chat`. Raises SettingsError."""
        with tempfile.TemporaryDirectory() as folder:
            config = _Inputs(Path(folder), is_shared=False).write(self._asked() | settings)
            command = [sys.executable, "-m", "grpo.chat", "--config", str(config)]
            lines = " ".join(question.splitlines()) + "\n"  # a line is a question
            streams = {"input": lines, "capture_output": True, "text": True, "errors": "replace"}
            done = subprocess.run(command, env=_alone(), check=False, **streams)
        if done.returncode:
            _raise(done.returncode, done.stderr)
        return done.stdout.strip()

    def _asked(self, *more: str) -> dict[str, Any]:
        """Return the settings to ask the model with, and the run's own code, which a model's folder may not name."""
        recorded = settings_in(self.folder)
        code = "tools", "environment", *(field.name for field in fields(AgentCodeSection))
        own_code = {name: recorded[name] for name in (*code, *more) if recorded.get(name)}
        return {"model_name_or_path": str(self.model_path), **own_code}

    def plot(self) -> Image:
        """Draw the learning curves, curves.png in the run's folder, and return the picture, which a notebook shows."""
        from PIL import Image

        from grpo.report.curves import draw_curves

        return Image.open(draw_curves(self.folder))


def train(
    model: str | Path,
    *,
    reward_funcs: Sequence[Callable | str] | Callable | str | None = None,
    train_dataset: Rows | None = None,
    eval_dataset: Rows | None = None,
    output_dir: str | Path | None = None,
    **settings: Any,
) -> SavedRun:
    """Train a model, a folder or a hub id, and return the run.

    Datasets are `datasets.Dataset`s, lists of rows, or names of files, folders or the hub. Without an `eval_dataset`
    rows are evaluated on only if `eval_steps` is set. Every other setting is an option of `grpo launch`; a function or
    class may stand where an option names one of a file. Ctrl-C, or a notebook's interrupt, lets the run finish its step
    and save. `resume_from_checkpoint="last"` with the same `output_dir` continues it.

    Raises SettingsError for a mistake, with the sentence of `grpo launch`, RunError if the run ends early, and
    KeyboardInterrupt after a Ctrl-C.
    """
    checkpoint = settings.get("resume_from_checkpoint")
    if output_dir is None and checkpoint is not None:
        RecordSection(resume_from_checkpoint=checkpoint)  # refuses "last", which needs the folder
        output_dir = Path(checkpoint).parent
    if output_dir is None and "RANK" in os.environ:
        raise ConfigError("output_dir=None: name a folder: all ranks must have the same")
    if (engine := settings.get("on")) in ("slurm", "k8s"):
        raise ConfigError(f"on={engine!r}: it submits a job, whose end nobody waits for: use the command grpo launch")
    folder = Path(output_dir or name_by_time()).expanduser()
    if checkpoint is None:  # before another run's inputs are written over
        check_unused("output_dir", folder, may_have_begun=True)
    beside = Path(f"{folder.absolute()}.inputs")  # "." has no name
    for each in (folder, beside):
        check_writable("output_dir", each)
    inputs = _Inputs(beside)
    if checkpoint is None:
        inputs.clear()
    settings = {"model_name_or_path": str(model), "output_dir": str(folder), **settings}
    if reward_funcs is not None:
        is_single = isinstance(reward_funcs, str) or callable(reward_funcs)
        settings["reward_funcs"] = [reward_funcs] if is_single else [*reward_funcs]
    if train_dataset is not None:
        split = settings.get("dataset_train_split", "train")
        settings["dataset_name"] = inputs.rows("train_dataset", split, train_dataset)
        if eval_dataset is None and not settings.get("eval_holdout") and settings["dataset_name"] == str(inputs.folder):
            settings.setdefault("eval_steps", 0)
    if eval_dataset is not None:
        name = inputs.rows("eval_dataset", settings.get("dataset_test_split", "test"), eval_dataset)
        if name != settings.get("dataset_name"):
            raise ConfigError("eval_dataset: give rows with rows, or let train_dataset name a folder with both splits")
    program = [str(PROGRAMS / "grpo_ref_split.py")] if "RANK" in os.environ else ["-m", "grpo.launch"]
    _follow(program, inputs.write(settings), _environment())
    if is_stop_asked(folder) and not (settings.get("dry_run") or is_finished(folder)):
        raise RunError(f"{folder}: grpo stop ended it: the same call with resume_from_checkpoint='last' continues it")
    return SavedRun(folder)


class RefClient:
    """A client of a running reference server, for a loop of your own.

    with grpo.RefClient("http://127.0.0.1:59875") as reference:
        of_first, of_second = reference.logprobs(prompt_ids, [first_ids, second_ids])
    """

    def __init__(self, url: str | Sequence[str], temperature: float = 1.0, **settings: Any):
        """Wait until the servers of one or several URLs are ready. `settings` are those of the trainer, as `token_file`
        and `ref_deadline`. Raises SettingsError, and ServersUnavailable if none comes."""
        from grpo.client.reference import ReferenceClient
        from grpo.config.trainer import TrainerConfig

        urls = [url] if isinstance(url, str) else [*url]
        self._client = ReferenceClient(TrainerConfig(ref_servers=urls, temperature=temperature, **settings))
        self.model = self._client.wait_ready()

    def logprobs(self, prompt_ids: list[int], completions: list[list[int]]) -> list[np.ndarray]:
        """Return the log-probs of each completion's tokens after the prompt, float32 [tokens]. Raises ServerError."""
        (answer,) = self._client.request_groups([("group", prompt_ids, completions)])
        return answer.result()

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> RefClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Inputs:
    """The files of what a function is given: rows, functions, settings. The first rank of a machine writes them, unless
    each has a folder of its own."""

    def __init__(self, folder: Path, is_shared: bool = True):
        self.folder, self._writes = folder.absolute(), first_here() or not is_shared
        self._functions: dict[str, object] = {}

    def clear(self) -> None:
        """Remove the rows of an earlier run of this name, whose own folder is gone."""
        if self._writes:
            for old in self.folder.glob("*.parquet"):
                old.unlink()

    def rows(self, field: str, split: str, rows: Rows) -> str:
        """Write rows as the folder's file of this split. Return the dataset's name."""
        import datasets
        import pyarrow

        if isinstance(rows, str | Path):
            return str(rows)
        if isinstance(rows, Sequence | datasets.Dataset) and len(rows) == 0:
            raise ConfigError(f"{field}: there is no row in it: give one at least")
        if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
            names = dict.fromkeys(name for row in rows for name in row)  # from_list takes those of the first row
            try:
                rows = datasets.Dataset.from_list([{name: row.get(name) for name in names} for row in rows])
            except (pyarrow.ArrowException, TypeError) as error:
                raise ConfigError(f"{field}: {one_line(error)}: give each column values of one type") from error
        if not isinstance(rows, datasets.Dataset):
            remedy = "give a datasets.Dataset, a list of rows that are dicts, or a name"
            if isinstance(rows, datasets.DatasetDict):
                remedy = f"give one of its splits, {', '.join(map(repr, rows))}"
            raise ConfigError(f"{field}={type(rows).__name__}: {remedy}")
        if self._writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            datasets.disable_progress_bars()
            rows.to_parquet(self.folder / f"{split.partition('[')[0]}.parquet")  # of train[:30] the whole
        return str(self.folder)

    def write(self, settings: Mapping[str, Any]) -> Path:
        """Write the settings, with functions by the names of files; return the file."""
        try:
            text = to_yaml({name: self._named(name, value) for name, value in settings.items()})
        except yaml.representer.RepresenterError as error:
            raise ConfigError(f"a setting is no text, number or list of such: {error.args[-1]!r}") from error
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._writes:
            for old in self.folder.glob("*.dill"):
                old.unlink()
            for name, function in self._functions.items():
                (self.folder / f"{name}.dill").write_bytes(_pickled(name, function))
        if self._functions:
            self._replace(_FUNCTIONS_FILE, _FUNCTIONS)
        return self._replace("config.yaml", text)

    def _replace(self, name: str, text: str) -> Path:
        """Write a file that a rank's program reads before it has met the others, which write it too."""
        path = self.folder / name
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(path)
        return path

    def _named(self, field: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [self._named(field, each) for each in value]
        if not callable(value):
            return str(value) if isinstance(value, Path) else value
        name = self._name_of(field, value)
        self._functions[name] = value
        return f"{self.folder / _FUNCTIONS_FILE}:{name}"

    def _name_of(self, field: str, value: object) -> str:
        """Return a function's name. A partial has its function's and an object its class's, with a number if there are
        several of them."""
        function = value
        while isinstance(function, partial):
            function = function.func
        own = getattr(value, "__name__", getattr(function, "__name__", type(function).__name__))
        if not own.isidentifier():
            raise ConfigError(f"{field}={own}: define it with a name: its metrics bear that")
        is_named = function is value and hasattr(value, "__name__")
        names = (own, *(f"{own}_{number}" for number in range(2, len(self._functions) + 2)))
        name = next(name for name in names if self._functions.get(name, value) is value)
        if name != own and is_named:
            remedy = "rename one, or set its __name__"
            raise ConfigError(f"{field}={own}: another function has this name: {remedy}")
        return name


def _pickled(name: str, function: object) -> bytes:
    import dill

    try:
        # What a script or notebook defines goes by value, with the globals that it needs; the rest is imported there.
        return dill.dumps(function, recurse=True)
    except Exception as error:  # an object that it holds may raise anything
        reason = f"cannot be sent to the run's processes ({type(error).__name__}: {error})"
        raise ConfigError(f"{name}: {reason}: let it make or import what it needs") from error


def _environment() -> dict[str, str]:
    """Return the environment of a child, which imports what this process can."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str))  # Python ignores others
    return os.environ | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}


def _alone() -> dict[str, str]:
    """Return the environment of a child that is no rank, also of a script under torchrun."""
    of_ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in _environment().items() if not name.startswith("TORCHELASTIC_")}
    return {name: kept[name] for name in kept.keys() - of_ranks}


def _follow(program: list[str], config: Path, environment: Mapping[str, str]) -> None:
    """Run a program with these settings to its end; print its lines, or show steps as a bar. Pass signals on."""
    # Programs of the user's code may print any bytes.
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}
    process = start_program([*program, "--config", str(config)], environment, **streams)
    lines = _lines_of(process)
    errors: list[str] = []
    interrupted = is_over = False
    with _signals_passed_on(process), closing(_Screen()) as screen:
        while not is_over:
            try:
                while line := lines.get():
                    if error := _ERROR.search(line):
                        errors.append(error[1].removeprefix(f"{config}: "))
                    else:
                        screen.show(line.rstrip("\n"))
                process.wait()
                is_over = True
            except KeyboardInterrupt:
                interrupted = True
                process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt
    if process.returncode:
        _raise(process.returncode, *errors[-1:])


def _lines_of(process: subprocess.Popen) -> queue.SimpleQueue[str]:
    """Return a program's lines as they come, and "" after the last one. What the program leaves in the background may
    keep its stdout open, and is not waited for."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with process.stdout as output:
            for line in output:
                lines.put(line)

    def end() -> None:
        process.wait()
        reader.join(_LAST_LINES)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    for thread in (reader, threading.Thread(target=end, daemon=True)):
        thread.start()
    return lines


def _raise(code: int, message: str = "") -> None:
    """Raise the error of a program that ended with a code above 0."""
    found = _ERROR.search(message)
    message = (found[1] if found else message.strip()) or f"it ended with code {code}: its own messages say why"
    raise ConfigError(message) if code == 2 else RunError(message)


class _Screen:
    """The display of a program: its lines, and in a terminal or notebook a bar instead of a line for each step."""

    def __init__(self) -> None:
        self._bar = None
        self._shows_bar = "ipykernel" in sys.modules or sys.stderr.isatty()

    def show(self, line: str) -> None:
        step = _STEP.search(line)
        if step is None or not self._shows_bar:
            print(line, flush=True)
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=int(step[2]), unit="step")
        self._bar.set_postfix_str(step[3], refresh=False)
        self._bar.update(int(step[1]) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextmanager
def _signals_passed_on(process: subprocess.Popen) -> Iterator[None]:
    """Let SIGTERM, with which launchers and clusters end a script, reach the program, which saves."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        with suppress(ProcessLookupError):
            if process.poll() is None:
                process.kill()
