"""What the configuration refuses, what wins over what, and that one file serves both programs."""

import dataclasses
import json
import re
import shlex

import pytest
import torch
from conftest import LAUGHS, REPOSITORY

from grpo.config.command_line import parse_arguments, write_config
from grpo.config.errors import ConfigError
from grpo.config.programs import EvaluateConfig, LaunchConfig
from grpo.config.sampling_settings import ChatConfig
from grpo.config.server import ServerConfig
from grpo.config.trainer import TrainerConfig
from grpo.trainer.deepspeed_engine import engine_config


@pytest.fixture
def refused(capsys):
    """`refused(config class, *options)`: what the program printed before it exited with 2."""

    def run(config_class, *options) -> str:
        with pytest.raises(SystemExit) as ended:
            parse_arguments(config_class, "", list(options))
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


def trainer(*options) -> TrainerConfig:
    return parse_arguments(TrainerConfig, "", list(options))


def test_the_upper_clip_follows_from_the_lower_one_and_without_a_server_a_port_is_free():
    assert trainer("--epsilon", "0.1").upper_clip == 0.1 and trainer("--epsilon_high", "0.28").upper_clip == 0.28
    assert trainer("--loss_type", "cispo").upper_clip == 5.0
    assert trainer("--use_peft", "--ref", "adapter_off", "--port", "0").port == 0  # no server, no port


IMPOSSIBLE = {
    "--temperature 0": "temperature=0.0: training and evaluation draw samples",
    "--lr_scheduler_type constant --warmup_steps 50": "warmup_steps=50.0: a constant rate has none: use",
    "--teacher_servers http://a:1 --reward_funcs --eval_steps 0 --kl_in_reward": "kl_in_reward=True: it needs rewards",
    "--teacher_servers http://a:1 --reward_funcs --eval_steps 0 --soft_punish_cache 4": "soft_punish_cache=4: it needs",
    "--teacher_servers http://a:1 --reward_funcs --eval_steps 0 --off_policy_mask_threshold 0.1": (
        "off_policy_mask_threshold=0.1: it needs rewards"
    ),
    "--teacher_servers http://a:1 --reward_funcs --eval_steps 0 --advantage_estimator passk": (
        "advantage_estimator='passk': it needs rewards"
    ),
    "--teacher_servers http://a:1 --reward_funcs --eval_steps 0 --multi_objective_aggregation normalize_then_sum": (
        "multi_objective_aggregation='normalize_then_sum': it needs rewards, and a teacher alone gives none: leave it"
    ),
    "--temperature nan": "temperature=nan: use a finite number",
    "--max_steps many": "max_steps='many': use a whole number",
    "--max_steps": "max_steps: expected one argument",
    "--port 0": "port=0: the trainer cannot know",
    "--agent 'command: true' --tools reward.py:score_answer": "the program has its own tools: leave out tools",
    "--agent 'command: true' --system_prompt brief": "the agent writes its messages itself: leave it out",
    "--agent 'command: true' --sampler generate": "requests join rows that are always full: use continuous, or pool",
    "--agent 'command: true' --sampler pool --pool http://h:1 --max_policy_lag 1 --in_flight_weight_updates true": (
        "in_flight_weight_updates=True: an agent's episode is drawn by one version: leave it out"
    ),
    "--chat_template_kwargs {enable": "chat_template_kwargs='{enable': ",
    "--chat_template_kwargs '{\"tokenize\":true}'": "the program itself sets tokenize: leave it out",
    "--reward_weights 1": "reward_weights=[1.0]: give 2 weights, one for each of correctness_reward format_reward",
    "--reward_weights 1 x": "reward_weights='x': use a number",
    "--reward_weights 1 --reward_funcs": "reward_weights=[1.0]: give 0 weights",
    "--reward_weights -1e-3": "reward_weights=[-0.001]: give 2 weights",
    "--ref_servers http://a:1 http://a:1/": "ref_servers=['http://a:1', 'http://a:1']: name each once",
    "--ref_servers localhost:59875": "ref_servers='localhost:59875': write it as http://HOST:PORT",
    "--ref_ca_file nowhere.pem": "ref_ca_file='nowhere.pem': no such file",
    "--ref_update_steps 5 --beta 0": "ref_update_steps=5: there is no reference server",
    "--ref_update_steps 6 --steps_per_generation 2 --num_iterations 2": "ref_update_steps=6: a round has one",
    "--quantization 4bit --use_peft --ref_update_steps 4": "ref_update_steps=4: 4-bit weights cannot be replaced",
    "--quantization 4bit": "quantization='4bit': only an adapter",
    "--quantization 8bit --use_peft": "quantization='8bit': a log-prob would depend on its batch: use 4bit",
    "--report_to comet": "report_to='comet': use tensorboard, wandb",
    "--loss_type ppo": "loss_type='ppo': use grpo, bnpo",
    "--num_draws 4": "num_draws=4: use num_generations=8 or more",
    "--scale_rewards batch --advantage_estimator opo": "scale_rewards='batch': opo does not divide by",
    "--scale_rewards none --advantage_estimator reinforce++": "scale_rewards='none': reinforce++ always divides",
    "--multi_objective_aggregation normalize_then_sum --advantage_estimator rloo": "multi_objective_aggregation='norm",
    "--reward_tolerance 0.1 --advantage_estimator reinforce++": "reward_tolerance=0.1: reinforce++ may learn",
    "--dataset_order adaptive --advantage_estimator reinforce++": "dataset_order='adaptive': reinforce++ may learn",
    "--max_resample 2 --advantage_estimator mine.py:compare": "max_resample=2: mine.py:compare may learn",
    "--advantage_estimator remax --sampler pool --pool http://a:1": "advantage_estimator='remax': a pool draws no",
    "--delta 1.1": "delta=1.1: the clip is tighter: use a number above 1.2",
    "--delta 4 --loss_type cispo": "delta=4.0: loss_type cispo has no such clip",
    "--epsilon 0.1 --loss_type cispo": "epsilon=0.1: loss_type cispo has no such clip",
    "--delta 9 --loss_type vespo": "delta=9.0: loss_type vespo has no such clip",
    "--loss_type luspo": "importance_sampling_level='token': luspo needs sequence",
    "--loss_type vespo --importance_sampling_level sequence": "importance_sampling_level='sequence': vespo needs token",
    "--loss_type vespo --importance_sampling_mode sequence_mask": "importance_sampling_mode='sequence_mask': vespo",
    "--sampler pool": "sampler='pool': set pool to a URL, or replay to a file",
    "--sampler pool --pool a:1": "pool='a:1': write it as http://HOST:PORT",
    "--sampler pool --replay nowhere.sqlite": "replay='nowhere.sqlite': there is no such file",
    "--use_adaptive_entropy --entropy_coef_min 2": "entropy_coef_min=2.0: it is above entropy_coef_max",
    "--agent 'command: true' --soft_punish_cache 128": "soft_punish_cache=128: an agent's episode has no",
    "--multi_objective_aggregation normalize_then_sum --scale_rewards none": "scale_rewards='none': normalize_then_sum",
    "--soft_punish_cache 513": "soft_punish_cache=513: use max_completion_length=512 or less",
    "--kl_in_reward --multi_objective_aggregation normalize_then_sum": "kl_in_reward=True: it needs multi_",
    "--kl_in_reward --use_bias_correction_kl": "use_bias_correction_kl=True: it is for",
    "--importance_sampling_mode token_mask --importance_sampling_clip_min 4": "importance_sampling_clip_min=4.0: it is",
    "--ref adapter_off": "ref='adapter_off': it needs an adapter",
    "--system_prompt '' --save_system_prompt": "save_system_prompt=True: system_prompt is empty",
    "--use_peft perhaps": "use_peft='perhaps': use true or false",
    "--dtype float16": "dtype='float16': use auto or bfloat16 or float32",
    "--tools mine.py": "tools='mine.py': mine.py is not a Python file",
    "--reward_funcs mine:f": "reward_funcs='mine:f': mine is not a Python file",
    "--resume_from_checkpoint last": "resume_from_checkpoint='last': of which run? set output_dir",
    "configs/dapo.yaml": "configs/dapo.yaml: use --config configs/dapo.yaml",
    "--config nowhere.yaml": "config='nowhere.yaml': No such file or directory: give the path of a YAML file",
    "--help nonsense": "--help nonsense: no such topic: use all, a setting's name, or model, data,",
    "--num_generations 1 --num_draws 4 --advantage_estimator reinforce++": "num_draws=4: of one trained completion no",
    "--num_draws 16 --advantage_estimator passk": "num_draws=16: passk would judge other completions than it trains on",
    "--learn 1": "error: --learn: no such option; see --help all",
    "--modle x": "error: --modle (did you mean model?): no such option; see",
    "--lr_scheduler_kwargs [1] --lr_scheduler_type cosine": "lr_scheduler_kwargs=[1]: write a JSON object",
    "--lr_scheduler_kwargs '{\"num_cycles\":1}'": "lr_scheduler_kwargs={'num_cycles': 1}: a constant rate takes none",
    "--warmup_steps 2.5": "warmup_steps=2.5: use a whole number of updates, or a share",
    "--val_freq 5 --shuffle": "--val_freq (use eval_steps), --shuffle (use dataset_order: shuffled, or as_is)",
    "--eval_delay 3": "error: --eval_delay: no such option",  # it is nothing like eval_steps
    "--lr 1e-6 --kl-coef=-1 --n -2 --seed 9": "--lr (use learning_rate), --kl-coef (use beta), --n (use",
}


@pytest.mark.parametrize("options", IMPOSSIBLE)
def test_the_trainer_refuses_in_one_sentence(refused, options):
    assert IMPOSSIBLE[options] in refused(TrainerConfig, *shlex.split(options))


def test_what_is_named_for_a_setting_of_trls_is_a_setting_here():
    names = {field.name for field in dataclasses.fields(TrainerConfig)}
    assert names.isdisjoint(TrainerConfig.INSTEAD)
    named = {name for text in TrainerConfig.INSTEAD.values() for name in re.findall(r"use (\w+)|and (\w+_\w+)", text)}
    assert len(named) > 9 and {first or second for first, second in named} <= names


@pytest.mark.parametrize(
    "config_class, options, sentence",
    [
        (ServerConfig, "--host 0.0.0.0", "host='0.0.0.0': others could reach it there: give --token_file or"),
        (ServerConfig, "--task reward --quantization 8bit", "quantization='8bit': not for task reward"),
        (ServerConfig, "--device_map cuda", "device_map='cuda': use auto"),
        (ServerConfig, "--update_folder x --quantization 4bit", "update_folder='x': quantized weights cannot be"),
    ],
)
def test_other_programs_refuse_in_one_sentence(refused, config_class, options, sentence):
    assert sentence in refused(config_class, *options.split())


@pytest.mark.parametrize("samples, ks", [("0", []), ("1", [1]), ("8", [1, 2, 4, 8]), ("12", [1, 2, 4, 8, 12])])
def test_the_k_of_pass_at_k(samples, ks):
    options = ["--num_generations_eval", samples]
    assert trainer(*options).ks == ks == parse_arguments(EvaluateConfig, "", options).ks


def test_short_names_are_the_long_ones_of_the_programs_that_have_them(refused, file):
    path = file("model_name_or_path: a\ndataset_name: b\ndataset_test_split: c\nnum_generations: 4\neval_samples: 9\n")
    config = parse_arguments(EvaluateConfig, "", ["--config", path, "--model", "x", "--dataset=y"])
    assert (config.model_name_or_path, config.dataset_name, config.dataset_test_split) == ("x", "y", "c")
    assert config.eval_samples == 9 and parse_arguments(EvaluateConfig, "", []).eval_samples == 0
    assert parse_arguments(ChatConfig, "", ["--config", path]).model_name_or_path == "a"
    config = trainer("--config", path, "--model", "x", "--dataset", "y")
    assert (config.model_name_or_path, config.dataset_name) == ("x", "y")
    assert parse_arguments(ServerConfig, "", ["--model=x"]).model_name_or_path == "x"
    assert "--split: no such option" in refused(TrainerConfig, "--split", "x")


def test_a_token_comes_from_a_file_or_the_environment(tmp_path, refused, monkeypatch):
    path = tmp_path / "token"
    monkeypatch.setenv("GRPO_REF_TOKEN", "from-the-environment")
    assert parse_arguments(ServerConfig, "", ["--host", "0.0.0.0"]).token == trainer().token == "from-the-environment"
    for text in ("", "two words"):
        path.write_text(text)
        assert "a token is printable ASCII without spaces" in refused(ServerConfig, "--token_file", str(path))
    assert "cannot be read" in refused(ServerConfig, "--token_file", str(tmp_path / "none"))
    path.write_text("secret\n")
    assert parse_arguments(ServerConfig, "", ["--token_file", str(path), "--host", "0.0.0.0"]).token == "secret"
    assert trainer("--token_file", str(path)).token == "secret"
    monkeypatch.setenv("GRPO_REF_TOKEN", "of the environment")
    assert "GRPO_REF_TOKEN='(hidden)': a token is" in refused(TrainerConfig)


def test_a_token_is_not_repeated_where_it_does_not_belong(refused, file):
    for options in (["--token=secret"], ["--token", "secret"], ["--config", file("token: secret")]):
        assert "secret" not in refused(TrainerConfig, *options)


@pytest.mark.parametrize(
    "options, on",
    [
        *[("", True), ("--gradient_checkpointing false", False), ("--gradient-checkpointing=No", False)],
        *[("--no_gradient_checkpointing", False), ("--no-gradient-checkpointing", False)],
        *[("--no_gradient_checkpointing --gradient_checkpointing", True), ("--gradient_checkpointing 1", True)],
    ],
)
def test_the_ways_to_write_a_switch(options, on):
    assert trainer(*options.split()).gradient_checkpointing is on


@pytest.mark.parametrize("ranks, prompts", [(1, 48), (3, 48), (5, 50), (7, 49), (8, 48), (100, 100)])
def test_unset_prompts_are_what_the_ranks_can_share_and_given_ones_stay(monkeypatch, ranks, prompts):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert trainer().prompts_per_step == prompts
    assert trainer("--prompts_per_step", str(7 * ranks)).prompts_per_step == 7 * ranks


@pytest.mark.parametrize("ranks, remedy", [(3, "use 54 or 57"), (5, "use 55 or 60"), (64, "use 64")])
def test_a_batch_that_ranks_cannot_share_is_refused(monkeypatch, refused, ranks, remedy):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    sentence = f"prompts_per_step=56: {ranks} ranks cannot share it equally: {remedy}, or another number of ranks"
    assert sentence in refused(TrainerConfig, "--prompts_per_step", "56")


def test_ranks_that_cannot_share_rows_are_refused(monkeypatch, refused):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert trainer("--sequence_parallel_size", "2").sequence_parallel_size == 2
    sentence = "sequence_parallel_size=3: 4 ranks form no groups of so many: use another"
    assert sentence in refused(TrainerConfig, "--sequence_parallel_size", "3")
    sentence = "sequence_parallel_size=2: router_aux_loss_coef needs whole sequences on each rank: use 1"
    assert sentence in refused(TrainerConfig, "--sequence_parallel_size", "2", "--router_aux_loss_coef", "0.1")


def test_an_unset_learning_rate_is_ten_times_as_large_for_an_adapter_and_kept_by_a_run_that_goes_on(tmp_path):
    assert trainer().learning_rate == 1e-6 and trainer("--use_peft").learning_rate == 1e-5
    write_config(trainer("--use_peft", "--learning_rate", "3e-6"), tmp_path / "config.yaml")
    again = ["--use_peft", "--resume_from_checkpoint", "last", "--output_dir", str(tmp_path)]
    assert trainer(*again).learning_rate == 3e-6
    assert trainer(*again, "--learning_rate", "2e-6").learning_rate == 2e-6


def test_the_sampler_is_corrected_for_where_it_is_a_pool_unless_a_run_that_goes_on_had_it_otherwise(tmp_path):
    pool, again = ["--sampler", "pool", "--pool", "http://a:1/"], ["--resume_from_checkpoint", str(tmp_path / "c-5")]
    assert trainer().importance_sampling_mode == "none"
    assert trainer(*pool).importance_sampling_mode == "token_truncate" and trainer(*pool).pool == "http://a:1"
    assert trainer(*pool, "--importance_sampling_mode", "none").importance_sampling_mode == "none"
    write_config(trainer(), tmp_path / "config.yaml")
    assert trainer(*pool, *again).importance_sampling_mode == "none"


def test_who_has_no_pool_to_ask_reads_a_trainers_file_that_names_one(refused, tmp_path):
    (tmp_path / "config.yaml").write_text("sampler: pool\npool: http://a:1\nmax_policy_lag: 1\n")
    assert parse_arguments(EvaluateConfig, "", ["--config", str(tmp_path / "config.yaml")]).sampler == "pool"
    assert "--sampler: no such option" in refused(ChatConfig, "--sampler", "pool")


def test_a_run_that_is_continued_keeps_what_was_unset(monkeypatch, refused, tmp_path):
    write_config(trainer(), tmp_path / "config.yaml")
    (tmp_path / "checkpoint-5").mkdir()
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert trainer("--output_dir", str(tmp_path)).prompts_per_step == 50
    for again in (["last", "--output_dir", str(tmp_path)], [str(tmp_path / "checkpoint-5")]):
        monkeypatch.setenv("WORLD_SIZE", "5")
        assert "prompts_per_step=48: 5 ranks" in refused(TrainerConfig, "--resume_from_checkpoint", *again)
        monkeypatch.setenv("WORLD_SIZE", "16")
        assert trainer("--resume_from_checkpoint", *again).prompts_per_step == 48
    assert trainer("--resume_from_checkpoint", "last", "--output_dir", str(tmp_path / "new")).prompts_per_step == 48


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_the_file_beats_the_defaults_and_the_command_line_beats_the_file(file):
    path = file("learning_rate: 1e-5\nbeta: 0\ngradient_checkpointing: no\nsystem_prompt: ''\nnum_generations: 4\n")
    config = trainer("--config", path, "--num_generations", "6")
    assert config.learning_rate == 1e-5  # YAML itself reads this as a string
    assert (config.beta, config.gradient_checkpointing, config.system_prompt) == (0.0, False, "")
    assert config.num_generations == 6


def test_of_several_files_the_last_one_wins(file, tmp_path):
    (tmp_path / "more.yaml").write_text("num_generations: 6\nreward_weights: [3]\n")
    paths = file("beta: 0\nnum_generations: 4\nreward_weights: [1, 2]\n"), str(tmp_path / "more.yaml")
    config = trainer("--config", paths[0], f"--config={paths[1]}", "--reward_funcs", "correctness_reward")
    assert (config.beta, config.num_generations, config.reward_weights) == (0.0, 6, [3.0])


def test_null_in_a_file_takes_back_a_default_and_an_earlier_file(file, tmp_path):
    (tmp_path / "more.yaml").write_text(
        "epsilon_high: null\nimportance_sampling_clip_max: null\ntools: null\nbeta: null\n"
        "importance_sampling_mode: token_mask\n"
    )
    config = trainer("--config", file("epsilon_high: 0.28\nbeta: 0.5\n"), "--config", str(tmp_path / "more.yaml"))
    assert (config.epsilon_high, config.importance_sampling_clip_max, config.tools) == (None, None, [])
    assert config.beta == 0.5  # which has no null
    write_config(config, tmp_path / "written.yaml")
    assert trainer("--config", str(tmp_path / "written.yaml")) == config


def test_a_path_below_the_home_folder_is_found_without_a_shell(file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").touch()
    config = trainer("--config", file("output_dir: ~/run\nreward_funcs: [~/mine.py:f]\n"), "--deepspeed=~/ds.json")
    paths = config.output_dir, *config.reward_funcs, config.deepspeed
    assert paths == (f"{tmp_path}/run", f"{tmp_path}/mine.py:f", f"{tmp_path}/ds.json")


def test_one_file_serves_both(file):
    path = file("port: 4711\nmax_batch_tokens: 9\nreward_weights: [1, -2.5]\nmax_length: null\nlora_dropout: 0.0\n")
    assert parse_arguments(ServerConfig, "", ["--config", path]).max_batch_tokens == 9
    config = trainer("--config", path)
    assert config.ref_servers == ["http://127.0.0.1:4711"]
    assert config.reward_weights == [1.0, -2.5]


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("lr: 1\nmodle: x\nmax_batch_token: 1", "lr (use learning_rate), modle, max_batch_token (did you mean max_"),
        ("7: 1", "no such field"),
        ("beta: [1, 2]", "beta=[1, 2]: give a single value"),
        ("dataset_config: no", "dataset_config=False: YAML reads yes, no, on and off so: put the text in quotes"),
        ("- beta", "write one 'field: value' a line"),
        ("beta:\n\t- 1", "found character '\\t' that cannot start any token in"),
        ("beta: 0\nseed: 1\nbeta: 1", 'beta stands twice: leave one of them out in "<unicode string>", line 3'),
        ("output_dir: 2026-11-31", ": correct the value, or put a text in quotes"),  # after the words of this Python
        ("use_peft: !!bool foo", "not YAML"),
        pytest.param("seed: " + 1000 * "[", "not YAML: maximum recursion", id="brackets"),
        ("chat_template_kwargs: &a {x: *a}", "*a stands for another place's value: write the value"),
        pytest.param(LAUGHS, "*a0 stands for another place's value", id="aliases"),
        ("reward_weights: [1, -1e-3, '--dry_run']", "settings.yaml: reward_weights='--dry_run': use a number"),
    ],
)
def test_a_file_is_checked_like_the_command_line(refused, file, text, sentence):
    assert sentence in refused(TrainerConfig, "--config", file(text))


def test_what_is_written_beside_the_run_reads_the_same_and_holds_no_token(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_REF_TOKEN", "very-secret")
    nested = '{"enable_thinking": false, "names": ["a", null], "more": {"depth": 1.5}}'
    options = ["--chat_template_kwargs", nested, "--reward_weights", "-0.00001", "0.5", "--no_gradient_checkpointing"]
    config = trainer(*options)
    write_config(config, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert "very-secret" not in text
    again = trainer("--config", str(tmp_path / "config.yaml"))
    assert again == config and again.chat_template_kwargs == json.loads(nested)
    parse_arguments(ServerConfig, "", ["--config", str(tmp_path / "config.yaml")])


def test_minus_one_is_never_where_other_trainers_write_it(refused):
    never = {"eval_steps": -1, "eval_samples": -1, "save_steps": -1, "save_total_limit": -1}
    config = TrainerConfig(**never, max_steps=-1, num_train_epochs=1)
    assert [getattr(config, name) for name in never] == [0, 0, 0, 0] and config.max_steps > 0
    never = refused(TrainerConfig, "--load_best_model_at_end", "--eval_steps=-1")
    assert "load_best_model_at_end=True: it does nothing without eval_steps above 0" in never
    assert "max_steps=-1: use a number above 0" in refused(TrainerConfig, "--max_steps=-1")


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_read_by_both_programs(path):
    config = parse_arguments(TrainerConfig, "", ["--config", str(path)])
    served = parse_arguments(ServerConfig, "", ["--config", str(path)])
    assert served.model_name_or_path == config.model_name_or_path and served.port == config.port
    engine_config(config, 1, torch.device("cpu"))


EASYR1 = {"max_prompt_length": 2048, "beta": 0.01, "learning_rate": 1e-6, "weight_decay": 0.01, "epsilon": 0.2}
EASYR1 |= {"steps_per_generation": 4, "kl_estimator": "k3", "loss_type": "grpo", "freeze_vision_tower": False}
SOURCES = {
    "burkov": {
        **{"max_steps": 500, "prompts_per_step": 7, "num_generations": 14, "max_completion_length": 400, "beta": 0.04},
        **{"learning_rate": 5e-6, "num_iterations": 1, "epsilon": 0.1, "epsilon_high": None},
        **{"adam_beta2": 0.999, "weight_decay": 0.01, "max_grad_norm": 0.1},
    },
    "simple_grpo": {
        **{"num_generations": 8, "max_completion_length": 700, "temperature": 0.9, "reward_tolerance": 1e-4},
        **{"beta": 0.04, "epsilon": 0.2, "learning_rate": 1e-6, "adam_beta2": 0.999, "max_grad_norm": 0},
        **{"max_steps": 1000 // 4, "steps_per_generation": 16 // 4},
    },
    "geometry3k_vl": {**EASYR1, "num_generations": 5, "max_completion_length": 2048, "prompts_per_step": 128 // 7 * 7},
    "geometry3k_a800": {
        **{**EASYR1, "num_generations": 6, "max_completion_length": 2096, "prompts_per_step": 64 // 7 * 7},
        **{"min_pixels": 262144, "max_pixels": 2097152, "max_pictures": 1, "num_train_epochs": 15},
        **{"eval_temperature": 0.2},
    },
}
"""the numbers as the sources that the files name have them"""


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_the_numbers_of_its_source(name):
    config = trainer("--config", str(REPOSITORY / f"configs/{name}.yaml"))
    assert {setting: getattr(config, setting) for setting in SOURCES[name]} == SOURCES[name]


def test_a_single_completion_is_enough_where_an_estimator_needs_no_group():
    for name in ("reinforce++", "remax", "mine.py:compare"):
        assert trainer("--num_generations", "1", "--advantage_estimator", name).num_generations == 1


def test_the_launcher_wants_a_folder_for_the_weights_that_its_server_is_sent(refused):
    words = ["--beta=0.1", "--ref_update_steps=2"]
    line = refused(LaunchConfig, *words)
    assert "update_folder=None: ref_update_steps sends weights to the server: name a folder for them" in line
    for more in ("--update_folder=new", "--ref_servers=http://other:1"):
        assert parse_arguments(LaunchConfig, "", [*words, more]).ref_update_steps == 2


def test_the_launcher_leaves_to_the_trainer_what_depends_on_its_ranks():
    config = parse_arguments(LaunchConfig, "", ["--use_peft"])
    assert config.prompts_per_step is None and config.learning_rate is None
    config.check_ranks(5)
    with pytest.raises(ConfigError, match="prompts_per_step=48: 5 ranks"):
        parse_arguments(LaunchConfig, "", ["--prompts_per_step", "48"]).check_ranks(5)
