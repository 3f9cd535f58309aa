"""Which servers may teach a policy."""

from dataclasses import replace

import pytest
from servers import MODEL

from grpo.client.reference import check_teacher, check_top_k
from grpo.client.server_errors import ServerError
from grpo.config.errors import ConfigError
from grpo.config.trainer import TrainerConfig
from grpo.data.records import Example
from grpo.trainer.servers import check_teachers
from grpo.wire.health import ServerInfo

URL = "http://127.0.0.1:59880"
POLICY = replace(MODEL, text_fingerprint="text", processor_fingerprint="pixels")
# The head of a larger model of the family is wider, and the rest of its configuration is another.
TEACHER = replace(POLICY, name="big", fingerprint="x", config_fingerprint="y", vocab_size=128, quantization="4bit")
WRONG = [
    (replace(TEACHER, tokenizer_fingerprint="other"), "whose vocabulary is not that of m, so a token id is another"),
    (replace(TEACHER, text_fingerprint="other"), "whose tokenizer has the vocabulary of m, and other special tokens"),
    (replace(TEACHER, text_fingerprint=""), "does not tell how it reads texts: restart it with the trainer's version"),
    (replace(TEACHER, processor_fingerprint="other"), "prepares pictures in another way than m"),
    (replace(TEACHER, max_length=1023), "at most 1023 tokens a sequence, and max_prompt_length .* is 1024: restart it"),
]


@pytest.mark.parametrize("teacher, fault", WRONG)
def test_a_teacher_whose_ids_mean_something_else_is_refused(teacher, fault):
    config = TrainerConfig()
    check_teacher(config, URL, policy=POLICY, teacher=TEACHER, has_pictures=True)
    with pytest.raises(ServerError, match=f"^{URL} serves big.*{fault}"):
        check_teacher(config, URL, policy=POLICY, teacher=teacher, has_pictures=True)


def test_pictures_matter_where_prompts_have_some():
    check_teacher(TrainerConfig(), URL, policy=POLICY, teacher=WRONG[3][0])


def test_a_server_of_an_earlier_version_teaches_by_the_drawn_tokens_alone():
    older = ServerInfo.from_json(b'{"version": 1, "status": "ready", "model": "big"}')
    check_top_k(URL, older.most_top_k, 0)
    with pytest.raises(ServerError, match="answers with 0 of the likeliest tokens, and 64 are wanted: restart it with"):
        check_top_k(URL, older.most_top_k, 64)
    with pytest.raises(ServerError, match="answers with 40 .* and 64 are wanted: use distillation_top_k 40 or less"):
        check_top_k(URL, 40, 64)


def test_teachers_are_named_by_source():
    names = ["math=http://a:1", "http://c:3/", "math=https://b:2/x=1", "code=http://d:4"]
    teachers = TrainerConfig(teacher_servers=names).teachers
    assert teachers == {"math": ["http://a:1", "https://b:2/x=1"], "": ["http://c:3"], "code": ["http://d:4"]}
    assert TrainerConfig().teachers == {}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"teacher_servers": ["math=here"]}, "teacher_servers='here': write it as http://HOST:PORT"),
        ({"teacher_servers": ["a=http://x:1", "a=http://x:1/"]}, "name each once for a"),
        ({"distillation_loss": "jsd"}, "distillation_loss='jsd': it does nothing without teacher_servers"),
        ({"teacher_servers": [URL], "distillation_top_k": 8}, "it does nothing without distillation_loss"),
        ({"teacher_servers": [URL], "distillation_coef": 0}, "distillation_coef=0: use a number above 0"),
        ({"teacher_servers": [URL], "loss_type": "vespo"}, "loss_type='vespo': vespo has one weight for a sequence"),
        ({"teacher_servers": [URL], "num_generations": 1}, "grpo compares a prompt's completions: use 2 or more"),
        ({"teacher_servers": [URL], "reward_weights": [0, 0], "max_resample": 1}, "max_resample=1: it needs rewards"),
        ({"teacher_servers": [URL], "reward_funcs": [], "num_draws": 16}, "num_draws=16: it needs rewards"),
        ({"teacher_servers": [URL], "reward_funcs": [], "dataset_order": "adaptive"}, "'adaptive': it needs rewards"),
        ({"teacher_servers": [URL], "ref_servers": [URL], "ref_update_steps": 2}, "replaces the model of a reference"),
        ({"reward_funcs": []}, "name a reward function, an environment or agent that gives rewards, or a teacher"),
    ],
)
def test_settings_of_distillation_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"reward_funcs": []},
        {"reward_weights": [0, 0]},
        {"reward_funcs": [], "num_draws": 1},
        {"reward_funcs": [], "dataset_order": "as_is"},
        {"reward_funcs": [], "dataset_order": "column:level"},
    ],
)
def test_a_teacher_alone_needs_one_completion_of_a_prompt(settings):
    assert TrainerConfig(teacher_servers=[URL], num_generations=1, **settings).is_taught_alone


def test_a_teacher_beside_rewards_does_not_teach_alone():
    with_vespo = {"loss_type": "vespo", "distillation_loss": "jsd", "epsilon": 0.2}
    assert not TrainerConfig(teacher_servers=[URL], **with_vespo).is_taught_alone


def test_a_teacher_needs_prompts_and_an_answer_that_may_be_so_large():
    examples = [Example(index=0, prompt="p", prompt_ids=[1], columns={}, source=source) for source in ("math", "code")]
    check_teachers(TrainerConfig(teacher_servers=[f"math={URL}", URL]), examples)
    with pytest.raises(ConfigError, match="no prompt is of 'maths'; the sources are code, math"):
        check_teachers(TrainerConfig(teacher_servers=[f"maths={URL}"]), examples)
    large = {"num_generations": 64, "max_completion_length": 8192}
    large = TrainerConfig(teacher_servers=[URL], distillation_loss="jsd", **large)
    with pytest.raises(ConfigError, match="33554432 likeliest tokens, above 16777216: use 32 or less"):
        check_teachers(large, examples)
    branches = {"num_generations": 16, "max_prompt_length": 18432, "max_completion_length": 2048}
    agent = TrainerConfig(teacher_servers=[URL], distillation_loss="jsd", agent="command: true", **branches)
    with pytest.raises(ConfigError, match="use 51 or less"):
        check_teachers(agent, examples)
