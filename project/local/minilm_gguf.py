"""Converts MiniLM's published weights (safetensors and a word list) to the GGUF file that llama.cpp reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_SPECIAL = frozenset({"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"})
# Sentence embeddings are the mean over the last layer: the pooler is a leftover of BERT's pre-training.
_UNUSED = frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})
_KEPT_EXACT = ("position_embd", "token_types")


def convert(model_dir: Path, target: Path) -> None:
    """Write `target` (about 25 MB, 8-bit) from `config.json`, `vocab.txt` and `model.safetensors` in `model_dir`."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(target, "bert")
    _write_shape(writer, config)
    _write_vocabulary(writer, (model_dir / "vocab.txt").read_text(encoding="utf-8").splitlines())
    _write_tensors(writer, model_dir / "model.safetensors", config["num_hidden_layers"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def _write_vocabulary(writer: gguf.GGUFWriter, words: list[str]) -> None:
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("bert-bge")
    writer.add_token_list([_token(word) for word in words])
    writer.add_token_types([gguf.TokenType.CONTROL if word in _SPECIAL else gguf.TokenType.NORMAL for word in words])
    writer.add_unk_token_id(words.index("[UNK]"))
    writer.add_pad_token_id(words.index("[PAD]"))
    writer.add_mask_token_id(words.index("[MASK]"))
    writer.add_sep_token_id(words.index("[SEP]"))
    writer.add_bos_token_id(words.index("[CLS]"))
    writer.add_eos_token_id(words.index("[SEP]"))
    writer.add_uint32("tokenizer.ggml.cls_token_id", words.index("[CLS]"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)


def _token(word: str) -> str:
    """llama.cpp marks the start of a word; WordPiece marks its continuation."""
    if word in _SPECIAL:
        return word
    return word[2:] if word.startswith("##") else f"\N{LOWER ONE EIGHTH BLOCK}{word}"


def _write_tensors(writer: gguf.GGUFWriter, weights: Path, layers: int) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    eight_bit = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in load_file(weights).items():
        if name in _UNUSED:
            continue
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if renamed is None:
            raise ValueError(f"the weights hold a tensor that BERT does not have: {name}")
        exact = tensor.astype(np.float32)
        if exact.ndim == 2 and not renamed.startswith(_KEPT_EXACT):
            writer.add_tensor(renamed, gguf.quants.quantize(exact, eight_bit), raw_dtype=eight_bit)
        else:
            writer.add_tensor(renamed, exact)
