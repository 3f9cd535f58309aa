"""Makes a folder that every program takes out of a GGUF file, the format of llama.cpp and Ollama.

    grpo import-gguf SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    grpo launch --model_name_or_path smollm2

The folder has the weights in float32, config.json and the tokenizer with its chat template. Quantized weights have lost
digits: where the model's own folder or hub id is at hand, train that. A file with scaled positions (Llama 3.1's) is
refused: transformers would lose them. Needs the packages gguf and accelerate.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.config.errors import ConfigError, program_name, require
from grpo.run.exit import exit_code

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Values of `tokenizer.ggml.pre` whose words GPT-2's pattern splits, and those that before it take each digit out alone.
# https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
GPT2_WORDS = {"gpt-2", "phi-2", "mpt", "olmo"}
SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FLOATS = {"F32": 24, "F16": 11, "BF16": 8}
"""bits of a number's significand in types that are not quantized"""


def import_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file as `from_pretrained` reads it. Raises ConfigError and SaveError."""
    from grpo.model.hub import refuse_unloadable
    from grpo.model.lora import require_packages
    from grpo.run.folder import whole_folder
    from grpo.run.run_folder import check_writable

    require(path.is_file(), "file", str(path), "there is no such file: correct the path")
    require(not folder.exists(), "folder", str(folder), "it exists already: name another folder, or delete it")
    check_writable("folder", folder)
    require_packages("file", str(path), "gguf", "accelerate")
    from gguf import GGUFReader

    with refuse_unloadable("file", str(path), "name a GGUF file of an architecture that transformers knows"):
        reader = GGUFReader(path)
        refuse_scaled_positions(path, reader)
        tokenizer, model = load_tokenizer(path, reader), load_weights(path)
        tie_copied_head(reader, model)
        add_ends(reader, model)
    tokenizer.model_max_length = model.config.max_position_embeddings
    with whole_folder(folder, "model") as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def refuse_scaled_positions(path: Path, reader: GGUFReader) -> None:
    """Raise ConfigError for a file whose scaled positions transformers does not read: it would make another model."""
    kind = reader.fields["general.architecture"].contents()
    scaling = reader.fields.get(f"{kind}.rope.scaling.type")
    lost = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    lost += [f"{kind}.rope.scaling.type"] if scaling is not None and scaling.contents() != "none" else []
    remedy = f"it scales positions ({', '.join(lost)}), which would be lost: name the model's own folder or hub id"
    is_read = kind == "gpt-oss"  # the one architecture whose scaling transformers reads
    require(not lost or is_read, "file", str(path), remedy)


def add_ends(reader: GGUFReader, model: PreTrainedModel) -> None:
    """Add the ends of a turn or message that the file names, too: transformers reads the end of a text alone."""
    names = (f"tokenizer.ggml.{end}_token_id" for end in ("eos", "eot", "eom"))
    ends = {int(reader.fields[name].contents()) for name in names if name in reader.fields}
    if len(ends) > 1:
        model.generation_config.eos_token_id = sorted(ends)


def load_tokenizer(path: Path, reader: GGUFReader) -> PreTrainedTokenizerBase:
    """Load the tokenizer, and let it split words as the file says. Raises ConfigError where that is unknown."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    fields = reader.fields
    names = "tokenizer.ggml.model", "tokenizer.ggml.pre"
    kind, words = (fields[name].contents() if name in fields else "" for name in names)
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    splitter = tokenizer.backend_tokenizer.pre_tokenizer
    if kind == "gpt2" and isinstance(splitter, pre_tokenizers.ByteLevel):  # transformers took GPT-2's pattern
        if words in SINGLE_DIGITS:
            digits = pre_tokenizers.Digits(individual_digits=True)
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, splitter])
        elif words not in GPT2_WORDS:
            remedy = f"its tokenizer splits words as {words!r}, which is unknown here: name the model's own folder"
            raise ConfigError(f"file={str(path)!r}: {remedy}")
    return tokenizer


def load_weights(path: Path) -> PreTrainedModel:
    """Load the model in float32, as if its weights had never been quantized."""
    import torch
    from transformers import AutoModelForCausalLM

    read = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    settings = read.config
    if hasattr(settings, "quantization_config"):
        del settings.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.load_state_dict(read.state_dict(), assign=True)  # save_pretrained refuses what came from a GGUF file
    model.generation_config = read.generation_config
    return model


def tie_copied_head(reader: GGUFReader, model: PreTrainedModel) -> None:
    """Tie the head to the embedding where the file stores one matrix twice, in two types: both get the finer one's
    values. Untied, each would be trained by itself, and take memory of its own."""
    bits = {tensor.name: bits_of(tensor) for tensor in reader.tensors if tensor.name in (EMBEDDING, HEAD)}
    if len(bits) < 2:  # tied in the file
        return
    embedding, head = (part.weight.data for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    # A block of weights, four standard deviations wide, has steps of four over 2^bits: more than rounding can explain
    # is another matrix.
    difference = ((embedding - head).norm() / head.norm()).item()
    if not difference <= 2.0 ** (2 - min(bits.values())):
        return
    model.get_input_embeddings().weight.data = head if bits[HEAD] >= bits[EMBEDDING] else embedding
    model.config.tie_word_embeddings = True
    model.tie_weights()
    share = f"{100 * difference:.1f} %"
    print(f"{EMBEDDING} and {HEAD} are one matrix in two types (they differ by {share}): tied, as the finer one has it")


def bits_of(tensor: ReaderTensor) -> float:
    """Return how many bits a weight of the tensor has, with its share of its block's scales."""
    return FLOATS.get(tensor.tensor_type.name, 8 * tensor.n_bytes / tensor.n_elements)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=program_name(), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="folder to make")
    arguments = parser.parse_args()
    from grpo.run.folder import SaveError  # imports torch, which takes seconds

    def work() -> None:
        import_gguf(arguments.file, arguments.folder)
        print(f"the model is in {arguments.folder}: --model_name_or_path {shlex.quote(str(arguments.folder))}")

    return exit_code(work, (SaveError,), "interrupted; nothing is left")


if __name__ == "__main__":
    sys.exit(main())
