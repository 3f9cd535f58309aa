"""What the pool has of each version is the policy as it stood when it was published, whatever happens beside."""

import copy
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapters import move, policy, write_adapter
from pools import RUN
from rounding import assert_rounded
from safetensors.numpy import load
from safetensors.torch import load_file
from servers import exact
from trainer_runs import equal
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.client.server_errors import ServersUnavailable
from grpo.config.command_line import parse_arguments
from grpo.config.programs import WorkerConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.model.trial import make_batcher
from grpo.pool.client import PoolClient, Retrier, Stopped
from grpo.pool.delta import apply_delta
from grpo.pool.pool_service import PoolService
from grpo.pool.protocol import GroupResult, Task, Version
from grpo.run.folder import SaveError
from grpo.sampling.self_check import make_sampler
from grpo.server.http import HttpServer
from grpo.trainer.publish_policy import PolicyCopy, PolicyPublisher, PoolRun, model_files
from grpo.workers.transformers_engine import TransformersEngine
from grpo.workers.weights_folder import ModelFolder
from ref_server import make_app


def rounded(values: list[float]) -> list[float]:
    """As a version has a probe's."""
    return [round(value, 6) for value in values]


@dataclass
class Pool:
    client: PoolClient
    server: HttpServer
    service: PoolService

    def fetch(self, version: Version, folder: Path) -> Path:
        """Return the version's weights as a worker gets them: a whole file and the deltas after it."""
        path = folder / f"{version.version}.safetensors"
        if version.whole:
            self.client.fetch_file(version.sha256, path)
            return path
        [base] = [other for other in self.client.versions() if other.version == version.base]
        old = self.fetch(base, folder)
        self.client.fetch_file(version.delta, folder / "delta")
        apply_delta(old, folder / "delta", new=path, sha256=version.sha256)
        return path

    def weights(self, version: Version, folder: Path) -> dict[str, torch.Tensor]:
        return load_file(self.fetch(version, folder))


@contextmanager
def serving(path: Path) -> Iterator[Pool]:
    config = ServerConfig(task="rollouts", pool_file=str(path), port=0)
    service = PoolService(config)
    server = HttpServer(make_app(service), config, admit=service.admit, on_refused=lambda **refused: None)
    threading.Thread(target=server.run, daemon=True).start()
    service.load()
    try:
        yield Pool(PoolClient(f"http://127.0.0.1:{server.effective_port}"), server, service)
    finally:
        service.close()


@pytest.fixture
def pool(tmp_path) -> Iterator[Pool]:
    with serving(tmp_path / "run.sqlite") as pool:
        yield pool


@pytest.fixture
def model(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()


GONE = PoolClient("http://127.0.0.1:9")


def publisher_of(
    client: PoolClient, model, folder: Path, deadline: float = 30.0, stop: threading.Event | None = None
) -> PolicyPublisher:
    stop = stop or threading.Event()
    copy = PolicyCopy(model, make_batcher(model, 0))
    return PolicyPublisher(
        client=client, policy=copy, run_folder=folder, ask=Retrier(client, deadline, stop), stop=stop
    )


def take_copy(publisher: PolicyPublisher) -> None:
    publisher.wait_written()
    publisher.policy.take()


def publish(publisher: PolicyPublisher, version: int) -> None:
    take_copy(publisher)
    publisher.publish(version)


def published(client: PoolClient, model, folder: Path, *versions: int) -> PolicyPublisher:
    publisher = publisher_of(client, model, folder)
    for version in versions:
        publish(publisher, version)
    publisher.wait()
    return publisher


@torch.no_grad()
def train(model, share: float = 0.01) -> None:
    """Move a share of the weights to the next number of their dtype, in place as an update does."""
    for weight in model.parameters():
        if weight.requires_grad:
            moved = torch.rand(weight.shape) < share
            weight.copy_(torch.where(moved, torch.nextafter(weight, torch.full_like(weight, torch.inf)), weight))


def saved(model) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def test_a_version_is_the_policy_when_it_was_published(pool, model, tmp_path):
    publisher, expected = publisher_of(pool.client, model, tmp_path), []
    for version in range(10):
        expected.append(saved(model))
        publish(publisher, version)
        train(model, share=0.5 if version == 4 else 0.01)  # while the version is being written
    publisher.wait()
    versions = pool.client.versions()
    assert [version.version for version in versions] == [*range(10)]
    assert [version.version for version in versions if version.whole] == [0, 8]
    assert [version.base for version in versions] == [None, *range(9)]
    for version, weights in zip(versions, expected, strict=True):
        assert equal(pool.weights(version, tmp_path), weights)
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {"9.json", "9.safetensors"}
    publisher.close()
    assert not (tmp_path / "policy").exists()


def test_a_version_that_changed_most_weights_goes_whole(pool, model, tmp_path):
    publisher = published(pool.client, model, tmp_path, 0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    publish(publisher, 4)
    publisher.wait()
    first, second = pool.client.versions()
    assert first.whole and second.whole and second.base is second.delta is None
    assert equal(pool.weights(second, tmp_path), saved(model))


def test_a_worker_can_load_and_prove_a_version(pool, model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    published(pool.client, model, tmp_path, 3)
    [version] = pool.client.versions()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    packed = model_files(model, tokenizer)
    assert packed == model_files(copy.deepcopy(model), AutoTokenizer.from_pretrained(model_folder))
    folder = tmp_path / "worker"
    folder.mkdir()
    for name, data in load(packed).items():
        (folder / name).write_bytes(data.tobytes())
    assert not (folder / "model.safetensors").exists()
    pool.fetch(version, folder).rename(folder / "model.safetensors")
    loaded, probe = AutoModelForCausalLM.from_pretrained(folder), version.probe
    assert (len(probe.prompt_ids), len(probe.completion_ids)) == (8, 56)
    assert max(probe.prompt_ids + probe.completion_ids) < model.config.vocab_size
    assert_rounded(probe.logprobs, exact(loaded, probe.prompt_ids, [probe.completion_ids]))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_the_probe_fits_a_short_model(pool, model, tmp_path):
    model.config.max_position_embeddings = 5
    published(pool.client, model, tmp_path, 0)
    [version] = pool.client.versions()
    assert (len(version.probe.prompt_ids), len(version.probe.completion_ids)) == (4, 1)


ADAPTERS = {
    "bfloat16": ["--use_rslora", "True", "--use_dora", "True", "--dtype", "bfloat16"],
    "4bit": ["--quantization", "4bit", "--lora_target_modules", "all-linear"],
    "began with it": [],
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_version_of_an_adapter_is_the_adapter_and_a_worker_draws_with_it_the_same_bits(
    pool, model_folder, tokenizer, tmp_path, kind
):
    if kind == "4bit":
        pytest.importorskip("bitsandbytes")
    if kind == "began with it":
        settings = {"r": 4, "use_dora": True, "use_rslora": True, "target_modules": "all-linear"}
        model_folder = write_adapter(tmp_path / "adapter", model_folder, **settings)
    model, _ = policy(*ADAPTERS[kind], model=model_folder)
    packed, publisher = model_files(model, tokenizer), publisher_of(pool.client, model, tmp_path)
    path, base = publisher.write_base()
    run = replace(RUN, vocab_size=512, model_files=hashlib.sha256(packed).hexdigest(), base_weights=base)
    pool.client.put_run(run)
    pool.client.send_file(packed, run.model_files)
    pool.client.send_file(path, base)
    publish(publisher, 0)
    move(model)
    publish(publisher, 1)
    model.save_pretrained(tmp_path / "saved")
    adapter = load_file(tmp_path / "saved/adapter_model.safetensors")
    batcher = make_batcher(model, tokenizer.pad_token_id)
    sampler = make_sampler(model, tokenizer, run.max_completion_length, rows=4, packs=batcher.packs)
    (rollouts,) = sampler.sample(
        [Example(index=7, prompt="", prompt_ids=[5, 6, 7], columns={})], run.num_generations, 0.8, run.seed, ids=[7]
    )
    publisher.wait()
    assert (publisher.write_base()[1], model_files(model, tokenizer)) == (base, packed)  # a resumed run's are the same
    first, second = pool.client.versions()
    assert equal(pool.weights(second, tmp_path), adapter)

    ask = Retrier(pool.client, 20, threading.Event())
    worker, engine = ModelFolder(tmp_path, pool.client, ask), TransformersEngine(WorkerConfig(pool=pool.client.url))
    worker.bring_model(run)
    worker.bring(0, first.sha256)
    engine.start(run, worker.path, 0)
    assert rounded(engine.logprobs(first.probe)) == first.probe.logprobs
    worker.bring(1, second.sha256)
    engine.load(worker.path, 1)
    assert rounded(engine.logprobs(second.probe)) == second.probe.logprobs != first.probe.logprobs
    drawn = engine.draw(Task(group=7, attempt=0, version=1, prompt_ids=[5, 6, 7]))
    assert drawn.completions == [rollout.completion_ids for rollout in rollouts]
    assert drawn.logprobs == [rollout.sampling_logprobs for rollout in rollouts]
    assert ModelFolder(tmp_path, pool.client, ask).sha256 == base  # a worker that starts again has it


def test_a_resumed_run_publishes_what_is_new_alone(pool, model, tmp_path):
    publisher = published(pool.client, model, tmp_path, 0)
    train(model)
    publish(publisher, 2)
    checkpoint = copy.deepcopy(model)
    train(model)
    publish(publisher, 4)
    publisher.wait()
    before = pool.client.versions()

    # Killed, and continued from the checkpoint of version 2: nobody closed the first.
    again = published(pool.client, model := checkpoint, tmp_path, 2)
    assert pool.client.versions() == before
    train(model)  # other bits than before
    publish(again, 4)
    again.wait()
    versions = pool.client.versions()
    assert versions[:2] == before[:2] and versions[2].sha256 != before[2].sha256
    assert versions[2].base == 2 and not versions[2].whole
    assert equal(pool.weights(versions[2], tmp_path), saved(model))


@pytest.fixture
def start(pool, model, model_folder, tmp_path):
    """`start(folder, *words)`: a run whose oldest checkpoint is of step 0, and its publisher."""

    def begin(folder: str, *words: str) -> tuple[PolicyPublisher, PoolRun]:
        config = parse_arguments(TrainerConfig, "", ["--sampler=pool", "--pool=http://box:1", *words])
        publisher = publisher_of(pool.client, model, tmp_path / folder)
        return publisher, PoolRun(
            config=config,
            publisher=publisher,
            tokenizer=AutoTokenizer.from_pretrained(model_folder),
            name="a",
            checkpoints=SimpleNamespace(identity=RUN.run, oldest=lambda: 0),
            turns=None,
        )

    return begin


def test_without_a_lag_the_pool_keeps_the_last_version_and_what_it_is_a_difference_from(pool, model, start):
    publisher, run = start("run")
    for version in range(10):
        take_copy(publisher)
        run.publish(version, version)
        kept = pool.client.versions()
        assert [each.version for each in kept] == [*range(version - version % 8, version + 1)]
        assert [each.whole for each in kept] == [each.version % 8 == 0 for each in kept]
        train(model)
    publisher, again = start("again")  # from the checkpoint of step 0, of which the pool has nothing any more
    take_copy(publisher)
    again.publish(0, 0)
    assert pool.client.versions()[0].version == 0


def test_with_in_flight_updates_no_round_gets_what_an_earlier_starts_weights_drew(pool, model, start):
    words = "--max_policy_lag=2", "--in_flight_weight_updates=true"
    publisher, first = start("first", *words)
    config = first.config
    for version in range(3):
        take_copy(publisher)
        first.publish(version, version)
        train(model)
    publisher.wait()
    before = {version.version: version.sha256 for version in pool.client.versions()}
    task = Task(group=3, attempt=0, version=0, prompt_ids=[5])  # of the round that begins with version 2
    pool.client.put_tasks([task])
    count, longest = config.num_generations, config.max_completion_length
    drawn = GroupResult(
        group=3,
        attempt=0,
        completions=[[5] * longest] * count,
        logprobs=[[-0.5] * longest] * count,
        versions=[[0] + [2] * (longest - 1)] * count,
    )
    assert pool.client.results("w", [drawn], before.items()) == ["accepted"]
    publisher, again = start("again", *words)
    take_copy(publisher)
    again.publish(2, 2)
    assert pool.client.versions()[-1].sha256 != before[2] and pool.client.take([(3, 0)], 0) == []


def test_a_pool_that_lost_the_version_before_gets_the_next_one_whole(pool, model, tmp_path):
    publisher = published(pool.client, model, tmp_path, 0)
    with serving(tmp_path / "other.sqlite") as other:
        pool.client.url = other.client.url
        train(model)
        publish(publisher, 1)
        publisher.wait()
        [version] = other.client.versions()
        assert version.whole and version.base is None
        assert equal(other.weights(version, tmp_path), saved(model))


def test_a_pool_that_is_gone_ends_the_run_at_the_next_version(model, tmp_path):
    publisher = publisher_of(GONE, model, tmp_path, deadline=0.5)
    publish(publisher, 0)
    gone = r"no answer from http://127.0.0.1:9 for 0 s \(it cannot be reached"
    for call in (lambda: publish(publisher, 1), publisher.wait):
        with pytest.raises(ServersUnavailable, match=gone):
            call()


def test_a_full_disk_ends_the_run_before_a_checkpoint_needs_the_version(pool, model, tmp_path):
    (tmp_path / "policy").write_text("a file stands where the folder should be")
    publisher = publisher_of(pool.client, model, tmp_path)
    publish(publisher, 0)
    publisher.wait_written()
    for call in (publisher.check_written, publisher.wait):
        with pytest.raises(SaveError, match="the policy could not be saved to .*0.safetensors"):
            call()


def test_a_pool_with_a_full_disk_is_given_up_too(pool, model, tmp_path, monkeypatch):
    """It goes on naming its versions, and how much of the file it has."""
    monkeypatch.setattr("grpo.pool.client.seconds_to_next_try", lambda *_: 0.05)
    shutil.rmtree(tmp_path / "run.sqlite.files")
    (tmp_path / "run.sqlite.files").write_text("a file stands where the folder should be")
    publisher = publisher_of(pool.client, model, tmp_path, deadline=0.5)
    publish(publisher, 0)
    with pytest.raises(ServersUnavailable, match=r"for 0 s \(it said 503: .* its disk may be full\): see"):
        publisher.wait()


def test_a_run_that_ends_gives_up_what_it_was_sending(model, tmp_path):
    publisher = publisher_of(GONE, model, tmp_path, deadline=60.0)
    publish(publisher, 0)
    publisher.close()
    with pytest.raises(Stopped):
        publisher.wait()
    publisher.wait_written()
    assert {path.name for path in (tmp_path / "policy").iterdir()} == {"0.json", "0.safetensors"}


@pytest.mark.parametrize("sent", [0, 1])
def test_a_run_that_goes_on_sends_what_it_was_ended_before_it_had_sent(pool, model, tmp_path, sent):
    """With a lag of 1 the pool needs version 1 for the round that follows the run's second update."""
    stop = threading.Event()
    publisher = publisher_of(pool.client, model, tmp_path, stop=stop)
    for version in (0, 1):
        if version > sent:
            publisher.client = GONE
        publish(publisher, version)
        publisher.wait_written()
        left = Version.of_fields(json.loads((tmp_path / f"policy/{version}.json").read_bytes()))
        second = saved(model), left.probe
        if version <= sent:
            publisher.wait()
        train(model)
    stop.set()  # as for a killed run, nothing is tidied up
    assert len(pool.client.versions()) == sent + 1
    (tmp_path / "policy/2.json").touch()  # a power cut has emptied it, and no checkpoint needs it
    (tmp_path / "policy/2.safetensors").touch()
    again = publisher_of(pool.client, model, tmp_path)
    again.send_left(first=1, end=2)
    versions = pool.client.versions()
    assert [version.version for version in versions] == [0, 1]
    assert equal(pool.weights(versions[1], tmp_path), second[0]) and versions[1].probe == second[1]
    publish(again, 2)
    again.wait()
    assert [path.name for path in (tmp_path / "policy").iterdir() if path.suffix != ".json"] == ["2.safetensors"]
    again.close()
    assert not (tmp_path / "policy").exists()
