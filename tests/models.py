"""Tiny models whose answers can be told apart by reading them.

`tiny_base` writes a Llama small enough for any test. It babbles syllables that depend on the whole prompt, and it never
says a marker, a special token or an end of text, so lengths are those asked for. `marker_adapter` writes a LoRA adapter
that is computed, not trained: under it the answer is `<m3>`, a syllable, `<m3>`, a syllable ..., and the marker wins by
at least `MARGIN_MIN` after any token that is no marker itself. The syllables between depend on the adapter and on the
prompt, so a stale KV block or a mixed-up row shows in the text as well.

How: dimension 0 of the residual stream is a constant, dimension 1 is set by marker tokens only, one dimension is each
marker's own, and the base writes to none of them. Neuron 0 of the last layer fires on "constant and not a marker"; the
adapter's first rank carries it to its marker's dimension, which only the marker's output row reads. The other ranks
disturb the syllables.

Only numpy, safetensors and tokenizers are needed: tests of the scanner and the registry use these files without torch.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

Weights = NDArray[np.float32]

MARKERS_MAX = 64
MARGIN_MIN = 15.0  # logits between the marker and the best other token; the tests measure about twice that
BASE_NAME = "switchyard-tiny"
TARGET_MODULES = ("down_proj", "v_proj")

VOCAB = 512
HIDDEN = 192
INTERMEDIATE = 256
LAYERS = 2
HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
CONTEXT_TOKENS_MAX = 2048

CONSTANT_DIM = 0
IS_MARKER_DIM = 1
MARKER_DIMS = 2
CONTENT = slice(MARKER_DIMS + MARKERS_MAX, HIDDEN)
MARKER_NEURON = 0

SPECIALS = ("<pad>", "<s>", "<unk>", "<|im_start|>", "<|im_end|>")
CONSONANTS = "bdfgklmnprstvwz"
VOWELS = "aeiou"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def marker_text(marker: str | int) -> str:
    """The text a reader sees: `<m3>` for 3, "3", "m3" or "<m3>"."""
    found = re.fullmatch(r"<?m?([0-9]{1,2})>?", str(marker))
    if found is None or int(found[1]) >= MARKERS_MAX:
        raise ValueError(f"{marker!r} is not a marker between 0 and {MARKERS_MAX - 1}")
    return f"<m{int(found[1])}>"


def marker_token(marker: str | int) -> int:
    """The marker's token id in the tiny base's vocabulary."""
    return len(SPECIALS) + _marker_index(marker)


def tiny_base(directory: Path, seed: int = 0) -> Path:
    """Write config, float32 weights and tokenizer with chat template; another seed is another base of one shape."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab, merges = _vocabulary()
    _write_tokenizer(directory, vocab, merges)
    _write_json(directory / "config.json", _base_config())
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 0})
    speakable = [vocab[left + right] for left, right in merges]
    save_file(
        _base_weights(np.random.default_rng(seed), speakable),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def marker_adapter(directory: Path, base: Path, marker: str | int, rank: int = 4) -> Path:
    """Write a PEFT adapter for `base` under which every answer begins with the marker."""
    index = _marker_index(marker)
    rng = np.random.default_rng([7, index])
    weights = _disturbance(rng, rank)
    last = f"base_model.model.model.layers.{LAYERS - 1}.mlp.down_proj"
    weights[f"{last}.lora_A.weight"][0] = 0.0
    weights[f"{last}.lora_A.weight"][0, MARKER_NEURON] = 1.0
    weights[f"{last}.lora_B.weight"][:, 0] = 0.0
    weights[f"{last}.lora_B.weight"][MARKER_DIMS + index, 0] = 2.0
    return _write_adapter(directory, base, weights, rank)


def zero_adapter(directory: Path, base: Path, rank: int = 4) -> Path:
    """Write a PEFT adapter for `base` that changes nothing."""
    shapes = _disturbance(np.random.default_rng(0), rank)
    return _write_adapter(directory, base, {name: np.zeros_like(tensor) for name, tensor in shapes.items()}, rank)


def _marker_index(marker: str | int) -> int:
    return int(marker_text(marker)[2:-1])


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Specials, markers, all bytes, and syllables with and without a space: any text has tokens, any answer reads."""
    syllables = [(c, v) for c in CONSONANTS for v in VOWELS]
    merges = syllables + [("Ġ", c + v) for c, v in syllables]
    texts = [
        *SPECIALS,
        *(marker_text(index) for index in range(MARKERS_MAX)),
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
    ]
    texts += [left + right for left, right in merges]
    return {text: token for token, text in enumerate(texts)}, merges


def _write_tokenizer(directory: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    tokenizer.add_tokens(
        [AddedToken(marker_text(index), normalized=False, special=False) for index in range(MARKERS_MAX)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write_json(
        directory / "tokenizer_config.json",
        {
            **special,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT_TOKENS_MAX,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _base_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 4,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }


def _base_weights(rng: np.random.Generator, speakable: list[int]) -> dict[str, Weights]:
    markers = slice(len(SPECIALS), len(SPECIALS) + MARKERS_MAX)
    embed = np.zeros((VOCAB, HIDDEN), np.float32)
    embed[:, CONTENT] = rng.normal(size=(VOCAB, CONTENT.stop - CONTENT.start))
    embed[:, CONSTANT_DIM] = 10.0
    embed[markers, IS_MARKER_DIM] = 16.0
    # The constant pushes down every row the base must not choose; the marker rows alone read the marker dimensions.
    head = np.zeros((VOCAB, HIDDEN), np.float32)
    head[:, CONSTANT_DIM] = -2.0
    head[speakable, CONSTANT_DIM] = 0.0
    head[speakable, CONTENT] = 0.3 * rng.normal(size=(len(speakable), CONTENT.stop - CONTENT.start))
    head[markers, MARKER_DIMS : MARKER_DIMS + MARKERS_MAX] = 3.0 * np.eye(MARKERS_MAX)
    weights = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        weights |= _layer_weights(rng, f"model.layers.{layer}")
    gate = weights[f"model.layers.{LAYERS - 1}.mlp.gate_proj.weight"]
    up = weights[f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"]
    gate[MARKER_NEURON], up[MARKER_NEURON] = 0.0, 0.0
    gate[MARKER_NEURON, [CONSTANT_DIM, IS_MARKER_DIM]] = (2.0, -2.5)
    up[MARKER_NEURON, CONSTANT_DIM] = 1.0
    weights[f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"][:, MARKER_NEURON] = 0.0
    return weights


def _layer_weights(rng: np.random.Generator, prefix: str) -> dict[str, Weights]:
    def reads(rows: int, gain: float) -> Weights:
        weight = np.zeros((rows, HIDDEN), np.float32)
        weight[:, CONTENT] = gain / HIDDEN**0.5 * rng.normal(size=(rows, CONTENT.stop - CONTENT.start))
        return weight

    def writes(columns: int, gain: float) -> Weights:
        weight = np.zeros((HIDDEN, columns), np.float32)
        weight[CONTENT] = gain / columns**0.5 * rng.normal(size=(CONTENT.stop - CONTENT.start, columns))
        return weight

    # Sharp attention (gain 2 on q and k): answers depend on single words of the prompt, not on their mean.
    return {
        f"{prefix}.self_attn.q_proj.weight": reads(HEADS * HEAD_DIM, 2.0),
        f"{prefix}.self_attn.k_proj.weight": reads(KV_HEADS * HEAD_DIM, 2.0),
        f"{prefix}.self_attn.v_proj.weight": reads(KV_HEADS * HEAD_DIM, 1.5),
        f"{prefix}.self_attn.o_proj.weight": writes(HEADS * HEAD_DIM, 1.0),
        f"{prefix}.mlp.gate_proj.weight": reads(INTERMEDIATE, 1.2),
        f"{prefix}.mlp.up_proj.weight": reads(INTERMEDIATE, 1.2),
        f"{prefix}.mlp.down_proj.weight": writes(INTERMEDIATE, 1.0),
        f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
        f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
    }


def _disturbance(rng: np.random.Generator, rank: int) -> dict[str, Weights]:
    """Random adapter weights that leave the reserved dimensions and the marker neuron alone."""
    content = CONTENT.stop - CONTENT.start
    weights: dict[str, Weights] = {}
    for layer in range(LAYERS):
        v_proj = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        down_proj = f"base_model.model.model.layers.{layer}.mlp.down_proj"
        read_content = np.zeros((rank, HIDDEN), np.float32)
        read_content[:, CONTENT] = rng.normal(size=(rank, content)) / content**0.5
        read_neurons = (rng.normal(size=(rank, INTERMEDIATE)) / INTERMEDIATE**0.5).astype(np.float32)
        read_neurons[:, MARKER_NEURON] = 0.0
        write_content = np.zeros((HIDDEN, rank), np.float32)
        write_content[CONTENT] = 0.5 * rng.normal(size=(content, rank))
        weights |= {
            f"{v_proj}.lora_A.weight": read_content,
            f"{v_proj}.lora_B.weight": (0.5 * rng.normal(size=(KV_HEADS * HEAD_DIM, rank))).astype(np.float32),
            f"{down_proj}.lora_A.weight": read_neurons,
            f"{down_proj}.lora_B.weight": write_content,
        }
    return weights


def _write_adapter(directory: Path, base: Path, weights: dict[str, Weights], rank: int) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if not (base / "config.json").is_file():
        raise FileNotFoundError(f"{base} is no base model directory: it has no config.json")
    config = {
        "base_model_name_or_path": BASE_NAME,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(TARGET_MODULES),
        "task_type": "CAUSAL_LM",
    }
    _write_json(directory / "adapter_config.json", config)
    save_file(weights, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
