"""A seeded tiny Llama as a GGUF file, written as llama.cpp's conversion writes one, and that file inside a wheel.

Written from the other side than the code under test: from Hugging Face's tensors, with the rows of the query and key
projections put in the order of rotated neighbours.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from tokenizers.pre_tokenizers import ByteLevel

from headrace.model.builtin import BuiltinModel, Part
from headrace.model.progress import Progress
from headrace.model.wheel import Wheel

Floats = NDArray[np.float32]

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ w", "Â ²"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL))
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

MEMBER = "tiny_llama/tiny.Q4_1.gguf"


def hf_tensors(seed: int = 0, *, tied: bool = True) -> dict[str, Floats]:
    """Under Hugging Face's names, all of them exact in bf16."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(TOKENS), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (len(TOKENS), HIDDEN)
    return {name: exact_in_bf16(rng.standard_normal(shape) * 0.2) for name, shape in shapes.items()}


def exact_in_bf16(values: NDArray[np.float64]) -> Floats:
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def neighbours(rows: Floats, num_heads: int) -> Floats:
    """Rows (i, i + d/2) of each head side by side: what llama.cpp's conversion calls permute."""
    return rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def gguf_tensors(tensors: dict[str, Floats]) -> dict[str, Floats]:
    """Under llama.cpp's names, in llama.cpp's order of rows."""
    renamed = {}
    for name, values in tensors.items():
        name = name.removeprefix("model.").replace("layers.", "blk.").replace("self_attn.", "attn_")
        for ours, theirs in [
            *(("embed_tokens", "token_embd"), ("lm_head", "output"), ("input_layernorm", "attn_norm")),
            *(("post_attention_layernorm", "ffn_norm"), ("o_proj", "output"), ("mlp.", "ffn_"), ("_proj", "")),
        ]:
            name = name.replace(ours, theirs)
        if name == "norm.weight":
            name = "output_norm.weight"
        if "attn_q" in name:
            values = neighbours(values, HEADS)
        elif "attn_k" in name:
            values = neighbours(values, KV_HEADS)
        renamed[name] = values
    return renamed


def write_gguf(
    path: Path,
    tensors: dict[str, Floats],
    *,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    extra: dict[str, int] | None = None,
) -> None:
    """`quantised` for all matrices; vectors stay in fp32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in (extra or {}).items():
        writer.add_uint32(name, value)
    for name, values in tensors.items():
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_wheels(folder: Path, *, num_wheels: int) -> list[bytes]:
    """Wheels with a piece of the tiny model each."""
    path = folder / "source.gguf"
    write_gguf(path, gguf_tensors(hf_tensors()), quantised=GGMLQuantizationType.Q4_1)
    content = path.read_bytes()
    path.unlink()
    size = -(-len(content) // num_wheels)
    return [wheel_around(content[begin : begin + size]) for begin in range(0, len(content), size)]


def wheel_around(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, content)
        archive.writestr("tiny_llama/__init__.py", "")
    return packed.getvalue()


def model_in(*wheels: bytes) -> BuiltinModel:
    """Described as the built-in models are."""
    parts = [
        Part(
            wheel=Wheel(
                requirement=f"tiny-llama{'' if number == 0 else number}==1.0",
                num_bytes=len(wheel),
                sha256=hashlib.sha256(wheel).hexdigest(),
            ),
            member=MEMBER,
        )
        for number, wheel in enumerate(wheels)
    ]
    return BuiltinModel(name="tiny-llama", parts=tuple(parts), disk_bytes=1 << 20)


@dataclass
class ScriptedFetch:
    """Brings the scripted answers one after another: bytes become the wheel, an exception is raised."""

    answers: list[bytes | BaseException]
    cached: list[bool] = field(default_factory=list)  # of each call, whether a cache might have served

    def __call__(self, wheel: Wheel, folder: Path, progress: Progress, *, cached: bool) -> Path:
        self.cached.append(cached)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        progress("fetching", 0, len(answer))
        path = folder / "tiny_llama-1.0-py3-none-any.whl"
        path.write_bytes(answer)
        progress("fetching", len(answer), len(answer))
        return path
