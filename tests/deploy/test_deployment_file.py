"""Deployment files: what is read of them, and how every kind of mistake is refused, by its path."""

from hashlib import sha256
from pathlib import Path

import pytest

from headrace.deploy.file import Deployment, Device, Link, Pool, read_deployment
from headrace.errors import InputError
from headrace.gateway.budgets import Budget, Tiers

TEXT = """
model = "org/tiny"
dtype = "fp32"
page_size = 8
max_model_len = 512

[device]
kind = "cuda"
memory = "1.5 GB"
usable = 0.5
per_host = 4

[link]
transports = ["efa", "tcp"]
nics = 2
nic_gbps = 200
latency_us = 12.5

[prefillers]
count = 2
tp = 2
kv_memory = "64MiB"

[decoders]
count = 1
dp = 4
chunk_tokens = 64
max_running = 5
tpot_ms = 40
max_stall_ms = 100.5
"""


def read(folder: Path, text: str) -> Deployment:
    file = folder / "some.toml"
    file.write_text(text)
    return read_deployment(file)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    assert read(tmp_path, TEXT) == Deployment(
        model="org/tiny",
        dtype="fp32",
        page_size=8,
        max_model_len=512,
        device=Device(kind="cuda", memory_bytes=1_500_000_000, usable=0.5, per_host=4),
        link=Link(transports=("efa", "tcp"), nics=2, nic_gbps=200.0, latency_us=12.5),
        prefillers=Pool(count=2, tp=2, dp=1, chunk_tokens=256, max_running=32, kv_memory_bytes=64 << 20),
        decoders=Pool(
            count=1,
            tp=1,
            dp=4,
            chunk_tokens=64,
            max_running=5,
            kv_memory_bytes=None,
            tpot_ms=40.0,
            max_stall_ms=100.5,
        ),
    )


WRONG = [
    ('model = "org/tiny"', "", "model: must be a text, is missing"),
    ('model = "org/tiny"', "model = 7", "model: must be a text, is 7"),
    (
        'model = "org/tiny"',
        'model = "org/tiny"\nmodle = 7',
        "modle: must not be there, known are model, dtype, page_size",
    ),
    ('dtype = "fp32"', 'dtype = "fp8"', "dtype: must be bf16 or fp32, is 'fp8'"),
    ("page_size = 8", "page_size = 0", "page_size: must be a whole number from 1 to 1048576, is 0"),
    ("page_size = 8", "page_size = 8.0", "page_size: must be a whole number from 1 to 1048576, is 8.0"),
    ("page_size = 8", "page_size = true", "page_size: must be a whole number from 1 to 1048576, is True"),
    ("max_model_len = 512", "max_model_len = 1", "max_model_len: must be a whole number from 2 to 1048576, is 1"),
    ("[device]", "[devices]", "device: must be a table, is missing"),
    ("[link]", "[[link]]", "link: must be a table, is [{"),
    ('kind = "cuda"', 'kind = "tpu"', "device.kind: must be cpu or cuda, is 'tpu'"),
    ('kind = "cuda"', "", "device.kind: must be cpu or cuda, is missing"),
    ('kind = "cuda"', 'kind = "cpu"', "device.per_host: must not be there, known are kind, memory, usable"),
    ('memory = "1.5 GB"', 'memory = "much"', "device.memory: must be a size such as 512MiB, 2GB or 1073741824, is 'mu"),
    ('memory = "1.5 GB"', "", "device.memory: must be a size such as 512MiB, 2GB or 1073741824, is missing"),
    ('memory = "1.5 GB"', "memory = 1.5", "device.memory: must be a size such as 512MiB, 2GB or 1073741824, is 1.5"),
    ("usable = 0.5", "usable = 1.1", "device.usable: must be a number above 0, at most 1, is 1.1"),
    ("usable = 0.5", "usable = nan", "device.usable: must be a number above 0, at most 1, is nan"),
    ("per_host = 4", "", "device.per_host: must be a whole number from 1 to 64, is missing"),
    (
        '["efa", "tcp"]',
        '["efa", "udp"]',
        "link.transports: must be a list of some of mapped, shm, efa, verbs, tcp, is 'u",
    ),
    (
        '["efa", "tcp"]',
        '["efa", "efa"]',
        "link.transports: must be a list of some of mapped, shm, efa, verbs, tcp, is [",
    ),
    ('["efa", "tcp"]', "[]", "link.transports: must be a list of some of mapped, shm, efa, verbs, tcp, is []"),
    ('["efa", "tcp"]', '"efa"', "link.transports: must be a list of some of mapped, shm, efa, verbs, tcp, is 'efa'"),
    ("nics = 2", "nics = 5", "link.nics: must be a whole number from 1 to 4, is 5"),
    ("nic_gbps = 200", "nic_gbps = 0", "link.nic_gbps: must be a number above 0, at most 100,000, is 0"),
    ("latency_us = 12.5", "", "link.latency_us: must be a number above 0, at most 1,000,000, is missing"),
    (
        "latency_us = 12.5",
        'latency_us = "1us"',
        "link.latency_us: must be a number above 0, at most 1,000,000, is '1us'",
    ),
    ("count = 2", "", "prefillers.count: must be a whole number from 1 to 256, is missing"),
    ("count = 2", "count = 2\ndp = 2", "prefillers.dp: must not be there, known are "),
    ("tp = 2", "tp = 8", "prefillers.tp: tp must be at most device.per_host, 4: an instance is on one host; is 8"),
    (
        "dp = 4",
        "tp = 2\ndp = 4",
        "decoders.tp: tp * dp must be at most device.per_host, 4: an instance is on o",
    ),
    (
        "chunk_tokens = 64",
        "chunk_tokens = -1",
        "decoders.chunk_tokens: must be a whole number from 1 to 1048576, is -1",
    ),
    ("max_running = 5", 'max_running = "5"', "decoders.max_running: must be a whole number from 1 to 65536, is '5'"),
    ("tpot_ms = 40", "tpot_ms = 0", "decoders.tpot_ms: must be a number above 0, at most 600,000, is 0"),
    ('kv_memory = "64MiB"', 'kv_memory = "64 pages"', "prefillers.kv_memory: must be a size such as 512MiB, 2GB or"),
    (
        'kind = "cuda"\nmemory = "1.5 GB"\nusable = 0.5\nper_host = 4',
        'kind = "cpu"\nmemory = "1.5 GB"',
        "decoders.kv_memory: must be given on a cpu, whose memory everybody uses, is missing",
    ),
]

DIGEST = "ab" * 32

WRONG_PROMISES = [
    ("[tiers.fast]\nttft_ms = 1", "tiers.fast: must not be there, known are interactive, flex"),
    ("[tiers.flex]\nttft = 1", "tiers.flex.ttft: must not be there, known are ttft_ms, tpot_ms"),
    ("[tiers.flex]\nttft_ms = 0", "tiers.flex.ttft_ms: must be a number above 0, at most 600,000, is 0"),
    ("[tiers]\nflex = 7", "tiers.flex: must be a table, is 7"),
    ("[keys]\nbatch = 'sk'", "keys.batch: must be a table, is 'sk'"),
    ("[keys.batch]\ntier = 'flex'", "keys.batch.sha256: must be there, or file instead: one of the two"),
    (f"[keys.batch]\nsha256 = '{DIGEST}'\nfile = 'k'\ntier = 'flex'", "keys.batch.sha256: must be there, or"),
    ("[keys.batch]\nsha256 = 'sk-batch'\ntier = 'flex'", "keys.batch.sha256: must be 64 hexadecimal digits in low"),
    (f"[keys.batch]\nsha256 = '{DIGEST}'", "keys.batch.tier: must be interactive or flex, is missing"),
    (f"[keys.batch]\nsha256 = '{DIGEST}'\ntier = 'fast'", "keys.batch.tier: must be interactive or flex, is 'fast'"),
    ("[keys.batch]\nfile = 'none.key'\ntier = 'flex'", "keys.batch.file: must be a file that can be read: "),
    ("[keys.batch]\nfile = 'two.key'\ntier = 'flex'", "keys.batch.file: must hold one key of visible ASCII"),
    (
        f"[keys.a]\nsha256 = '{DIGEST}'\ntier = 'flex'\n[keys.b]\nsha256 = '{DIGEST}'\ntier = 'flex'",
        "keys.b: must be another key than those before, is one of them",
    ),
]


@pytest.mark.parametrize(("text", "said"), WRONG_PROMISES)
def test_a_promise_that_is_none_is_refused_by_its_path(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "two.key").write_text("one two")
    with pytest.raises(InputError) as refused:
        read(tmp_path, TEXT + text)
    assert f"some.toml: {said}" in str(refused.value)


def test_tiers_have_budgets_and_keys_have_tiers(tmp_path: Path) -> None:
    (tmp_path / "batch.key").write_text("sk-batch\n")
    promises = f"""
[tiers.interactive]
ttft_ms = 500
tpot_ms = 50.5
[tiers.flex]
[keys.batch]
file = "batch.key"
tier = "flex"
[keys.people]
sha256 = "{DIGEST}"
tier = "interactive"
"""
    assert read(tmp_path, TEXT + promises).tiers == Tiers(
        budgets={"interactive": Budget(ttft_s=0.5, tpot_s=0.0505)},
        keys={sha256(b"sk-batch").hexdigest(): "flex", DIGEST: "interactive"},
    )


@pytest.mark.parametrize(("text", "instead", "said"), WRONG)
def test_a_mistake_is_refused_by_its_path(text: str, instead: str, said: str, tmp_path: Path) -> None:
    assert TEXT.count(text) == 1
    with pytest.raises(InputError) as caught:
        read(tmp_path, TEXT.replace(text, instead))
    assert str(caught.value).startswith(f"{tmp_path}/some.toml: {said}"), caught.value


def test_what_is_no_toml_says_where(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"some.toml: must be TOML, is not: .*line 2"):
        read(tmp_path, 'model = "tiny"\npage_size = \n')
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"bytes.toml: must be TOML, is not"):
        read_deployment(tmp_path / "bytes.toml")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing.toml: must be a file that can be read: No such file or directory$"):
        read_deployment(tmp_path / "nothing.toml")
