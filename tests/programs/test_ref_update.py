"""The policy becomes the reference: the file that is written, the servers that get it, and those that miss it."""

import copy
import itertools
import json
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import requests
import torch
from conftest import running_server
from proxy import Plan, proxy
from rounding import FORMULA, NETWORK, NO_KL, assert_rounded
from servers import COMPLETIONS, HEALTH, MODEL, PROMPT, exact, fake, open_client, request, wait_until
from trainer_runs import lines, options, reach, timeless, training
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo.client import sessions as http
from grpo.client.reference import RewardClient, check_reference
from grpo.client.server_errors import ServerError, ServersLost
from grpo.config.errors import ConfigError
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.model.fingerprint import describe
from grpo.model.load import load_reference
from grpo.model.lora import train_adapter
from grpo.trainer.publish_reference import WeightPublisher

pytestmark = pytest.mark.usefixtures("one_rank")
SETTINGS = {"ref_update_steps": 1, "ref_startup_timeout": 60, "ref_deadline": 60, "ref_request_timeout": 20}


@pytest.fixture
def policy(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def train(policy, seed: int, size: float = 0.05) -> None:
    """Other weights, as a step would leave them."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.parameters():
            tensor.add_((size * torch.randn(tensor.shape, generator=chance)).to(tensor.dtype))


@contextmanager
def updated_by(urls, policy, tokenizer, folder, alpha=1.0, **changes):
    """(client, WeightPublisher) of a run with these servers."""
    folder.mkdir(exist_ok=True)
    with open_client(*urls, **(SETTINGS | changes)) as client:
        reference = client.wait_ready()
        config = TrainerConfig(ref_mixup_alpha=alpha, ref_update_steps=1)
        updates = WeightPublisher(
            config=config,
            client=client,
            model=policy,
            tokenizer=tokenizer,
            policy=describe(policy, tokenizer, "p"),
            folder=folder,
        )
        updates.begin(reference)
        yield client, updates


def open_server(folder, tmp_path, *words, **options):
    return running_server(folder, tmp_path, "--update_folder", str(tmp_path / "new"), *words, **options)


@pytest.fixture
def server(updated_server):
    return updated_server


def check_answers(client, model) -> None:
    for _ in range(6):
        rows = np.concatenate(request(client).result(timeout=60))
        assert_rounded(rows, exact(model, PROMPT, COMPLETIONS))


def parameters(model) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().double().clone() for name, tensor in model.named_parameters()}


def begun_with(server, policy, tokenizer, tmp_path, dtype=torch.float32):
    """A policy that begins with the server's weights, which an earlier run has left there."""
    with updated_by([server.url], policy, tokenizer, tmp_path / "earlier") as (_, updates):
        train(policy, 1000)
        updates.publish(7)
    return AutoModelForCausalLM.from_pretrained(tmp_path / "earlier" / "reference-7", dtype=dtype).eval()


def test_a_mixture_is_that_of_a_computation_by_hand_here_and_on_the_server(server, policy, tokenizer, tmp_path):
    policy = begun_with(server, policy, tokenizer, tmp_path)
    with updated_by([server.url], policy, tokenizer, tmp_path / "run", alpha=0.3) as (client, updates):
        mixed = parameters(policy)
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["reference-0"]
        for step in (5, 10, 15):
            train(policy, step)
            updates.publish(step)
            mixed = {name: 0.3 * tensor + 0.7 * mixed[name] for name, tensor in parameters(policy).items()}
            assert [path.name for path in (tmp_path / "run").iterdir()] == [f"reference-{step}"]
            saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / f"reference-{step}")
            for name, tensor in parameters(saved).items():
                assert_rounded(tensor, mixed[name], FORMULA)
            check_answers(client, saved)


def test_alpha_1_replaces_and_what_was_saved_is_served_under_the_same_fingerprint(server, policy, tokenizer, tmp_path):
    """Another one each time, also after a step too small for its samples: 64 values of each tensor in bfloat16."""
    with updated_by([server.url], policy, tokenizer, tmp_path / "run") as (client, updates):
        seen = {client.connection.fingerprint}
        for step in (1, 2, 3):
            if step < 3:
                train(policy, step)
            else:
                with torch.no_grad():
                    policy.model.embed_tokens.weight[-1, -1] += 1e-6
            updates.publish(step)
            check_answers(client, policy)
            folder = tmp_path / "run" / f"reference-{step}"
            again = load_reference(ServerConfig(model_name_or_path=str(folder)), torch.device("cpu"))
            found = describe(again, AutoTokenizer.from_pretrained(folder), "x").fingerprint
            assert found == client.connection.fingerprint and found not in seen
            seen.add(found)
        assert all(torch.equal(tensor, parameters(again)[name]) for name, tensor in parameters(policy).items())


def test_of_a_policy_with_an_adapter_the_whole_is_published(server, policy, tokenizer, tmp_path):
    pytest.importorskip("peft")
    policy = begun_with(server, policy, tokenizer, tmp_path)
    described = describe(policy, tokenizer, "p")
    train_adapter(policy, TrainerConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"]))
    with open_client(server.url, **SETTINGS) as client:
        config = TrainerConfig(ref_update_steps=1, ref_mixup_alpha=0.5)
        updates = WeightPublisher(
            config=config, client=client, model=policy, tokenizer=tokenizer, policy=described, folder=tmp_path
        )
        updates.begin(client.wait_ready())
        adapter = [tensor for tensor in policy.parameters() if tensor.requires_grad]
        with torch.no_grad():
            for tensor in adapter:
                tensor.add_(0.2)
        before = [tensor.clone() for tensor in policy.parameters()]
        updates.publish(1)
        assert all(torch.equal(tensor, same) for tensor, same in zip(policy.parameters(), before, strict=True))
        with torch.no_grad():
            adapter_b = [tensor for name, tensor in policy.named_parameters() if "lora_B" in name]
            for tensor in adapter_b:
                tensor.mul_(0.5)  # half of its product is half of the way from the base
        check_answers(client, policy)


@pytest.mark.slow
def test_small_steps_are_not_lost_in_bfloat16(server, policy, tokenizer, tmp_path):
    """A hundredth of a policy that has moved, thirty times: in bfloat16 each alone would round to nothing."""
    policy = begun_with(server, policy, tokenizer, tmp_path, torch.bfloat16)
    first = parameters(policy)
    with updated_by([server.url], policy, tokenizer, tmp_path / "run", alpha=0.01) as (_, updates):
        train(policy, 1)
        for step in range(1, 31):
            updates.publish(step)
    saved = parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "reference-30"))
    for name, tensor in parameters(policy).items():
        share = 1 - 0.99**30
        assert_rounded(saved[name], share * tensor + (1 - share) * first[name], NETWORK)


def test_an_upload_that_is_cut_again_and_again_goes_on_from_where_it_was(
    server, policy, tokenizer, tmp_path, monkeypatch
):
    """Every connection ends after 130 kB to the server; what came through whole is not sent again."""
    monkeypatch.setattr(http, "PIECE_BYTES", 100_000)
    with (
        proxy(server.port) as between,
        updated_by([between.url], policy, tokenizer, tmp_path / "run") as (client, updates),
    ):
        train(policy, 100)
        between.plan = lambda: Plan(request_bytes=130_000)
        updates.publish(1)
        between.plan = Plan
        size = (tmp_path / "run" / "reference-1" / "model.safetensors").stat().st_size
        assert size / 130_000 - 1 <= between.happened["request cut"] <= 2 * size / 100_000
        check_answers(client, policy)


def describe_of(server) -> str:
    return requests.get(server.url + "/health", timeout=5).json()["model_fingerprint"]


@pytest.mark.slow
def test_an_upload_cut_at_any_byte_of_an_answer_is_done_in_the_end(server, policy, tokenizer, tmp_path, few):
    """The server has done it, and the trainer does not know: a repetition must not harm."""
    with (
        proxy(server.port) as between,
        updated_by([between.url], policy, tokenizer, tmp_path / "run") as (client, updates),
    ):
        for step, cut in enumerate(few(range(0, 600, 47), 4), 1):
            plans = itertools.chain([Plan(answer_bytes=cut)], itertools.repeat(Plan()))
            between.plan = lambda plans=plans: next(plans)
            train(policy, step)
            updates.publish(step)
            check_answers(client, policy)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_server_killed_in_the_middle_of_an_upload_gets_it_when_it_is_back(
    model_folder, policy, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(http, "PIECE_BYTES", 20_000)
    with ExitStack() as servers:
        first = servers.enter_context(open_server(model_folder, tmp_path))
        between = servers.enter_context(proxy(first.port))
        client, updates = servers.enter_context(updated_by([between.url], policy, tokenizer, tmp_path / "run"))
        between.plan = lambda: Plan(delay=0.2)
        train(policy, 1)

        def kill():
            wait_until(lambda: (tmp_path / "new").exists() and between.happened["delay"] >= 4)
            first.end(signal.SIGKILL)
            between.plan = Plan
            assert not list((tmp_path / "new").iterdir())
            servers.enter_context(open_server(model_folder, tmp_path, port=first.port))

        killer = threading.Thread(target=kill)
        killer.start()
        updates.publish(1)
        killer.join()
        assert first.process.returncode == -signal.SIGKILL
        check_answers(client, policy)


@pytest.mark.slow
def test_a_server_that_missed_an_update_is_never_used_and_gets_it_when_it_is_back(
    model_folder, policy, tokenizer, tmp_path, caplog
):
    caplog.set_level("INFO")
    with ExitStack() as servers:
        stays, dies = (servers.enter_context(open_server(model_folder, tmp_path)) for _ in range(2))
        urls = [stays.url, dies.url]
        client, updates = servers.enter_context(updated_by(urls, policy, tokenizer, tmp_path / "run"))
        # As on the other ranks: it is told of the update and sends nothing.
        other_rank = servers.enter_context(open_client(*urls, **SETTINGS))
        other_rank.wait_ready()
        dies.end(signal.SIGKILL)
        train(policy, 1)
        began = time.monotonic()
        updates.publish(1)
        assert time.monotonic() - began < 40  # it is not waited for until ref_deadline, 60
        other_rank.balancer.use_only(client.connection.fingerprint)
        for rank_client in (client, other_rank):
            check_answers(rank_client, policy)

        # It is back with its first weights, and takes none: it must never be asked, or not believed.
        with running_server(model_folder, tmp_path, port=dies.port):
            wait_until(lambda: "it runs without --update_folder" in caplog.text)
            for rank_client in (client, other_rank):
                check_answers(rank_client, policy)
            wait_until(lambda: "has missed an update of the reference" in other_rank.balancer.servers[1].last_outcome)
        with open_server(model_folder, tmp_path, port=dies.port) as back:
            wait_until(lambda: describe_of(back) == client.connection.fingerprint)
            stays.end(signal.SIGKILL)
            for rank_client in (client, other_rank):
                check_answers(rank_client, policy)


def test_where_no_server_can_have_it_the_run_ends_with_what_each_said(policy, tokenizer, tmp_path):
    with ExitStack() as gone:
        server = gone.enter_context(fake(health=lambda: (200, {}, replace(HEALTH, takes_updates=True).to_json())))
        with updated_by([server.url], policy, tokenizer, tmp_path / "run", ref_deadline=1) as (_, updates):
            gone.close()
            with pytest.raises(ServersLost, match="no reference server has got the new weights: .* for 1 s") as error:
                updates.publish(1)
    assert server.url in str(error.value) and "Connection refused" in str(error.value)


def test_servers_that_cannot_be_updated_are_refused_at_the_start(policy, tokenizer, tmp_path):
    with fake() as closed, open_client(closed.url, **SETTINGS) as client, pytest.raises(ServerError) as refused:
        client.wait_ready()
    assert f"{closed.url} takes no new weights: restart it with --update_folder" in str(refused.value)

    # A reward model's server need not take any.
    with fake(health=lambda: (200, {}, replace(HEALTH, task="reward").to_json())) as served:
        judge = RewardClient(TrainerConfig(ref_update_steps=1), served.url)
        judge.wait_ready()
        judge.close()

    config = TrainerConfig(ref_update_steps=5)
    other = replace(MODEL, config_fingerprint="other")
    with pytest.raises(ServerError, match="serves m, whose configuration is not that of m"):
        check_reference(config, MODEL, other)
    check_reference(TrainerConfig(), MODEL, other)

    config, described = TrainerConfig(ref_mixup_alpha=0.5, ref_update_steps=1), describe(policy, tokenizer, "p")
    with pytest.raises(ConfigError, match="ref_mixup_alpha=0.5: the servers have other weights"):
        WeightPublisher(
            config=config, client=None, model=policy, tokenizer=tokenizer, policy=described, folder=tmp_path
        ).begin(replace(described, fingerprint="x"))


@pytest.mark.parametrize("alpha", [1.0, 0.6])
def test_a_run_that_begins_again_has_its_first_reference_again(server, policy, tokenizer, tmp_path, alpha):
    begun = begun_with(server, policy, tokenizer, tmp_path)
    run, saved = tmp_path / "run", []
    for _ in range(2):
        policy = copy.deepcopy(begun)
        with updated_by([server.url], policy, tokenizer, run, alpha) as (client, updates):
            check_answers(client, policy)
            train(policy, 5)
            updates.publish(5, needed={0})
            assert sorted(path.name for path in run.iterdir()) == ["reference-0", "reference-5"]
        saved.append((run / "reference-5/model.safetensors").read_bytes())
    assert saved[0] == saved[1]
    # Of another policy nothing is there: it begins with what the servers have.
    with updated_by([server.url], policy, tokenizer, run) as (client, _):
        assert client.connection.fingerprint == describe_of(server)


def test_a_run_that_began_with_unknown_weights_does_not_begin_again_with_others(
    server, model_folder, policy, tokenizer, tmp_path
):
    begun_with(server, policy, tokenizer, tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    first = describe_of(server)
    with updated_by([server.url], policy, tokenizer, tmp_path / "run") as (client, updates):
        assert client.connection.fingerprint == first
        updates.publish(5, needed={0})
    with updated_by([server.url], policy, tokenizer, tmp_path / "run", ref_deadline=1) as (client, _):
        assert client.connection.fingerprint == first != describe_of(server)
        with pytest.raises(ServerError, match="has missed an update of the reference"):
            request(client).result(timeout=60)


@pytest.mark.slow
def test_a_resumed_run_knows_a_server_that_comes_back_with_its_first_weights(model_folder, policy, tokenizer, tmp_path):
    begun, run = copy.deepcopy(policy), tmp_path / "run"
    with ExitStack() as servers:
        server = servers.enter_context(open_server(model_folder, tmp_path))
        first = describe_of(server)
        with updated_by([server.url], policy, tokenizer, run) as (_, updates):
            train(policy, 5)
            updates.publish(5, needed={0})
        client, updates = servers.enter_context(updated_by([server.url], begun, tokenizer, run))
        check_answers(client, begun)
        assert updates.begin(client.wait_ready(any_version=True)) == first  # whatever they have by now
        server.end(signal.SIGKILL)
        servers.enter_context(open_server(model_folder, tmp_path, port=server.port))
        check_answers(client, begun)


@pytest.mark.slow
def test_a_kl_begins_anew_with_each_update_and_a_server_killed_between_two_changes_no_number(
    model_folder, data_folder, letters, tmp_path
):
    """It comes back with its first weights and must not answer with them."""
    changes = {"ref_update_steps": 2, "max_steps": 6, "eval_steps": 0, "ref_deadline": 120, "report_to": "none"}

    def run(name: str, is_killed: bool) -> str:
        with ExitStack() as servers:
            server = servers.enter_context(open_server(model_folder, tmp_path, "--deterministic", "true"))
            settings = options(model_folder, data_folder, tmp_path / name, ref_servers=server.url, **changes)
            with training(2, [*settings, *letters]) as process:
                if is_killed:
                    reach(process, tmp_path / name, 3)
                    server.end(signal.SIGKILL)
                    again = open_server(model_folder, tmp_path, "--deterministic", "true", port=server.port)
                    servers.enter_context(again)
                output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        return output

    output = run("quiet", is_killed=False)
    assert "out of rotation" not in output and output.count("has the new reference") == 2
    folder = tmp_path / "quiet"
    rows = timeless(folder)
    assert [row["ref_step"] for row in rows] == [0, 0, 2, 2, 4, 4]
    # It grows until the next update; the first step on a new reference has the same weights as that.
    assert [abs(row["kl"]) < NO_KL for row in rows] == [True, False] * 3
    published = [row["time/publish_ref"] for row in lines(folder / "metrics.jsonl") if "time/publish_ref" in row]
    assert len(published) == 2 and min(published) > 0  # nobody would ask after the last
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["model", "reference-0", "reference-4"]
    assert len(json.loads((folder / "reference-4/config.json").read_text())["weights_sha256"]) == 64

    output = run("disturbed", is_killed=True)
    assert "out of rotation" in output and output.count("has the new reference") >= 2
    assert timeless(tmp_path / "disturbed") == rows
