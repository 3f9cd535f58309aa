"""grpo import-gguf: a GGUF file's weights and words, as its own library and its tokenizer have them."""

import json
import re
from pathlib import Path

import gguf
import pytest
import torch
from conftest import REPOSITORY, run_python
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo.model import CHAT_TEMPLATE, build_model, build_tokenizer, language_settings
from grpo.config.errors import ConfigError
from grpo.config.sampling_settings import SharedConfig
from grpo.import_gguf import import_gguf
from grpo.model.load import load_tokenizer

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
WORDS = {"llama": "smollm", "qwen2": "qwen2"}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["What is 47 + 38?", "if x:\n    return  12  34", "don't 3.14 1,000", "<|im_start|>user\n7<|im_end|>", "é 日本"]
IN_4_BITS, WHOLE = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F32


def smollm_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer of SmolLM2's kind: each digit alone, then GPT-2's words (its tokenizer.json)."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "a  b    c", "what is what user return"] * 9, trainer)
    names = dict(bos_token=SPECIAL[1], eos_token=SPECIAL[2], pad_token=SPECIAL[2], unk_token=SPECIAL[0])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **names)


def make(kind: str):
    """Make a model with random weights, and its tokenizer."""
    torch.manual_seed(0)
    if kind == "qwen2":
        tokenizer = build_tokenizer(seed=0)
        return build_model(tokenizer), tokenizer
    tokenizer = smollm_tokenizer()
    settings = language_settings(tokenizer) | {"num_key_value_heads": 2, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(**settings)), tokenizer


def interleaved(weight, heads: int):
    """Return Llama's queries or keys as llama.cpp lays them out: rows of the two halves of each head in turn."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, kind: str, model, tokenizer, words: str, head=None, **more) -> dict[str, torch.Tensor]:
    """Write the file, with matrices in 4 bits, and return the weights that it holds. `head`: the values and the type of
    a head beside the embedding; `more`: methods of the writer with their argument."""
    writer, settings = gguf.GGUFWriter(path, kind), model.config
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(settings.num_attention_heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    writer.add_vocab_size(settings.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
    special, added = set(tokenizer.all_special_ids), set(tokenizer.added_tokens_decoder)
    plain = gguf.TokenType.USER_DEFINED, gguf.TokenType.NORMAL
    writer.add_token_types(
        [gguf.TokenType.CONTROL if id in special else plain[id not in added] for id in range(len(tokenizer))]
    )
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    for name, value in more.items():
        getattr(writer, name)(value)
    held = {}
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], settings.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        stored = IN_4_BITS if weight.dim() == 2 else WHOLE
        held[name] = torch.tensor(dequantize(quantize(weight.numpy(), stored), stored))
        heads = settings.num_attention_heads if "q_proj" in name else settings.num_key_value_heads
        is_turned = kind == "llama" and ("q_proj" in name or "k_proj" in name)
        values = interleaved(weight.numpy(), heads) if is_turned else weight.numpy()
        base, _, ending = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{ending}", quantize(values, stored), raw_dtype=stored)
    if head is not None:
        values, stored = head
        held["lm_head.weight"] = torch.tensor(dequantize(quantize(values.numpy(), stored), stored))
        writer.add_tensor("output.weight", quantize(values.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_folder_has_the_files_weights_words_and_template(tmp_path, kind):
    model, tokenizer = make(kind)
    turn_end = {"add_eot_token_id": 5} if kind == "llama" else {}  # of Gemma's, beside the end of a text
    held = write_gguf(tmp_path / "model.gguf", kind, model, tokenizer, WORDS[kind], **turn_end)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert type(loaded) is type(model) and loaded.dtype == torch.float32
    weights = dict(loaded.state_dict())
    assert torch.equal(weights.pop("lm_head.weight"), weights["model.embed_tokens.weight"])
    assert weights.keys() == held.keys() and all(torch.equal(weights[name], held[name]) for name in held)
    assert loaded.config.to_diff_dict().get("quantization_config") is None
    ends = sorted({tokenizer.eos_token_id, 5}) if turn_end else tokenizer.eos_token_id
    assert loaded.generation_config.eos_token_id == ends

    read = AutoTokenizer.from_pretrained(tmp_path / "folder")
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert read(text)["input_ids"] == ids and read.decode(ids) == text
    chat = [{"role": "user", "content": "7 + 8 ="}]
    assert read.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert read.eos_token == "<|im_end|>" and read.pad_token == tokenizer.pad_token
    assert read.model_max_length == model.config.max_position_embeddings


@pytest.mark.parametrize(
    "stored, finer",
    [
        (gguf.GGMLQuantizationType.Q8_0, "lm_head.weight"),
        (gguf.GGMLQuantizationType.F16, "lm_head.weight"),
        (IN_4_BITS, "model.embed_tokens.weight"),
        (gguf.GGMLQuantizationType.Q4_0, "model.embed_tokens.weight"),
    ],
)
def test_an_embedding_that_is_stored_again_as_the_head_is_tied(tmp_path, capsys, stored, finer):
    model, tokenizer = make("qwen2")
    head = model.get_input_embeddings().weight.data.clone(), stored
    held = write_gguf(tmp_path / "model.gguf", "qwen2", model, tokenizer, "qwen2", head)
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded.get_output_embeddings().weight, held[finer])
    assert "are one matrix in two types" in capsys.readouterr().out


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_head_of_other_values_stays_a_matrix_of_its_own(tmp_path, capsys, share):
    model, tokenizer = make("qwen2")
    embedding = model.get_input_embeddings().weight.data.clone()
    head = embedding + share * embedding.std() * torch.randn_like(embedding)
    eight_bits = gguf.GGMLQuantizationType.Q8_0
    held = write_gguf(tmp_path / "model.gguf", "qwen2", model, tokenizer, "qwen2", (head, eight_bits))
    import_gguf(tmp_path / "model.gguf", tmp_path / "folder")

    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").state_dict()
    assert all(torch.equal(weights[name], held[name]) for name in held)
    assert "are one matrix" not in capsys.readouterr().out


def test_what_cannot_be_imported_is_refused_and_leaves_nothing(tmp_path):
    file, folder = tmp_path / "model.gguf", tmp_path / "folder"
    with pytest.raises(ConfigError, match=r"^file='.*': there is no such file: correct the path$"):
        import_gguf(file, folder)
    file.write_bytes(b"no GGUF at all, though long enough for a header" * 9)
    with pytest.raises(ConfigError, match=r"^file='.*': cannot be loaded \(.*\): name a GGUF file of an architecture"):
        import_gguf(file, folder)
    write_gguf(file, "llama", *make("llama"), "poro-chat")
    with pytest.raises(ConfigError, match="its tokenizer splits words as 'poro-chat', which is unknown here: name the"):
        import_gguf(file, folder)
    scaled = {"add_rope_scaling_type": gguf.RopeScalingType.LINEAR}
    write_gguf(file, "llama", *make("llama"), WORDS["llama"], **scaled)
    with pytest.raises(ConfigError, match=r"it scales positions \(llama.rope.scaling.type\), which would be"):
        import_gguf(file, folder)
    assert not folder.exists()
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"^folder='.*': it exists already: name another folder, or delete it$"):
        import_gguf(file, folder)


def test_a_program_that_is_given_the_file_names_the_command(tmp_path):
    file = tmp_path / "model.gguf"
    file.touch()
    expected = f"it is a GGUF file: grpo import-gguf {file} FOLDER makes a folder of it, which you name"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_tokenizer(SharedConfig(model_name_or_path=str(file)))


@pytest.mark.slow
def test_the_command(tmp_path):
    write_gguf(tmp_path / "model.gguf", "llama", *make("llama"), "smollm")
    place = {"folder": tmp_path, "environment": {"PYTHONPATH": str(REPOSITORY)}}
    codes = [run_python("-m", "grpo.import_gguf", "model.gguf", "folder", **place) for _ in range(2)]
    assert [done.returncode for done in codes] == [0, 2], codes
    assert codes[0].stdout == "the model is in folder: --model_name_or_path folder\n"
    assert codes[1].stderr.splitlines()[-1].startswith("python -m grpo.import_gguf: error: folder='folder': it exists")
