"""Which processes `serve` starts, with which options, and what it tells the person."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.cli import commands
from headrace.cli.app import run
from headrace.cli.child import Child
from headrace.cli.serve import (
    ServeOptions,
    Sizes,
    described_split,
    free_ports,
    greeting,
    plan_children,
    reachable_host,
    serve,
)
from headrace.deploy.known import known_config
from headrace.errors import InputError
from headrace.gateway.budgets import NO_TIERS, Budget, Tiers
from headrace.gateway.options import GatewayOptions
from headrace.roles.options import InstanceOptions, Transport

SIZES = Sizes(chunk_tokens=64, max_running=5, kv_memory_bytes=64 << 20)
OPTIONS = ServeOptions(
    gateways=1,
    prefillers=None,
    decoders=1,
    colocated=False,
    prefiller_tp=None,
    decoder_tp=1,
    decoder_dp=1,
    model="tiny",
    served_name="tiny",
    host="127.0.0.1",
    port=0,
    transfer=None,
    verify_kv=None,
    transports=None,
    require_provider=None,
    dtype="fp32",
    page_size=8,
    prefiller_sizes=SIZES,
    decoder_sizes=SIZES,
    tpot_ms=None,
    max_stall_ms=None,
    max_model_len=512,
    kernels="torch",
    threads=3,
    cpus=(),
    max_queued=7,
    local_prefill=None,
    deadline_s=12.5,
    tiers=NO_TIERS,
    log_level="warning",
)


def plan(options: ServeOptions, directory: Path) -> dict[str, Child]:
    ports = range(9000, 9000 + options.gateways)
    children = plan_children(options, ports=ports, model_dir=Path("/models/tiny"), directory=directory)
    return {child.name: child for child in children}


def test_by_default_there_are_a_gateway_a_prefiller_and_a_decoder(tmp_path: Path) -> None:
    children = plan(OPTIONS, tmp_path)
    assert list(children) == ["gateway", "prefiller-0", "decoder-0"]
    assert all(child.command[:4] == (sys.executable, "-P", "-m", "headrace") for child in children.values())


def test_there_are_as_many_as_asked_for(tmp_path: Path) -> None:
    many = plan(replace(OPTIONS, prefillers=2, decoders=3), tmp_path)
    assert list(many) == ["gateway", "prefiller-0", "prefiller-1", "decoder-0", "decoder-1", "decoder-2"]
    one_pool = plan(replace(OPTIONS, colocated=True, decoders=2), tmp_path)
    assert list(one_pool) == ["gateway", "colocated-0", "colocated-1"]


def test_several_gateways_listen_side_by_side_are_known_to_all_instances_and_come_back(tmp_path: Path) -> None:
    children = plan(replace(OPTIONS, gateways=2), tmp_path)
    assert list(children)[:2] == ["gateway-0", "gateway-1"]
    controls = [f"ipc://{tmp_path}/{name}" for name in ("control.sock", "control-1.sock")]
    for number, control in enumerate(controls):
        command = children[f"gateway-{number}"].command
        assert command[command.index("--control") + 1] == control
        assert command[command.index("--port") + 1] == str(9000 + number)
    for name in ("prefiller-0", "decoder-0"):
        command = children[name].command
        assert [command[at + 1] for at, word in enumerate(command) if word == "--gateway"] == controls


def test_each_gateway_has_a_port_of_its_own() -> None:
    assert len(set(free_ports(replace(OPTIONS, gateways=4)))) == 4
    with pytest.raises(InputError, match="port: must leave room for 2 gateways up to 65535, is 65535"):
        free_ports(replace(OPTIONS, gateways=2, port=65535))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[GatewayOptions | InstanceOptions]:
    """What the roles are started with when the planned commands are run in this process."""
    options: list[GatewayOptions | InstanceOptions] = []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(commands, "fetch_model", Path)
    monkeypatch.setattr(commands, "configure_logging", lambda level, name: None)
    for module, function in [
        ("headrace.gateway.server", "run_gateway"),
        ("headrace.roles.prefiller", "run_prefiller"),
        ("headrace.roles.decoder", "run_decoder"),
    ]:
        monkeypatch.setattr(f"{module}.{function}", options.append)
    return options


def start(child: Child) -> None:
    assert run(child.command[4:]) == 0


def test_every_option_arrives(tmp_path: Path, started: list[GatewayOptions | InstanceOptions]) -> None:
    options = replace(OPTIONS, transfer="whole", verify_kv=False, transports=("tcp",), tpot_ms=62.5, max_stall_ms=200.0)
    tiers = Tiers(
        budgets={"interactive": Budget(ttft_s=0.5, tpot_s=0.0505), "flex": Budget(ttft_s=30.0, tpot_s=None)},
        keys={"ab" * 32: "flex", "cd" * 32: "interactive"},
    )
    options = replace(options, tiers=tiers, local_prefill="needed")
    for child in plan(options, tmp_path).values():
        start(child)
    control = f"ipc://{tmp_path}/control.sock"
    common = InstanceOptions(
        role="prefiller",
        name="prefiller-0",
        gateways=(control,),
        model_dir=Path("/models/tiny"),
        model="tiny",
        dtype="fp32",
        page_size=8,
        chunk_tokens=64,
        max_running=5,
        kv_memory_bytes=64 << 20,
        max_model_len=512,
        kernels="torch",
        threads=3,
        transports=("tcp",),
        share_weights_in=tmp_path / "headrace" / "weights",
    )
    assert started == [
        GatewayOptions(
            name="gateway",
            host="127.0.0.1",
            port=9000,
            control=control,
            tokenizer=Path("/models/tiny"),
            model="tiny",
            max_queued=7,
            local_prefill="needed",
            deadline_s=12.5,
            tiers=tiers,
        ),
        replace(common, transfer="whole"),
        replace(common, role="decoder", name="decoder-0", verify_kv=False, tpot_s=0.0625, max_stall_s=0.2),
    ]


def test_degrees_arrive_at_their_role(tmp_path: Path, started: list[GatewayOptions | InstanceOptions]) -> None:
    options = replace(OPTIONS, prefiller_tp=4, decoder_tp=2, decoder_dp=3)
    for name in ("prefiller-0", "decoder-0"):
        start(plan(options, tmp_path)[name])
    start(plan(replace(options, colocated=True, prefiller_tp=None), tmp_path)["colocated-0"])
    assert [(o.tp, o.dp) for o in started if isinstance(o, InstanceOptions)] == [(4, 1), (2, 3), (2, 3)]


def test_what_was_not_asked_for_is_as_the_roles_have_it(
    tmp_path: Path, started: list[GatewayOptions | InstanceOptions]
) -> None:
    children = plan(replace(OPTIONS, max_model_len=None), tmp_path)
    start(children["prefiller-0"])
    start(children["decoder-0"])
    start(plan(replace(OPTIONS, colocated=True, max_model_len=None), tmp_path)["colocated-0"])
    assert [(o.transfer, o.verify_kv, o.max_model_len) for o in started if isinstance(o, InstanceOptions)] == [
        ("layers", True, None)
    ] * 3
    assert all(o.tpot_s is o.max_stall_s is None for o in started if isinstance(o, InstanceOptions))
    assert {o.transports for o in started if isinstance(o, InstanceOptions)} == {("mapped", "tcp")}
    assert isinstance(started[2], InstanceOptions) and started[2].role == "colocated"


def test_a_colocated_instance_keeps_the_budgets_that_were_given(
    tmp_path: Path, started: list[GatewayOptions | InstanceOptions]
) -> None:
    start(plan(replace(OPTIONS, colocated=True, tpot_ms=50.0), tmp_path)["colocated-0"])
    start(plan(replace(OPTIONS, colocated=True, max_stall_ms=0.1), tmp_path)["colocated-0"])
    assert [(o.tpot_s, o.max_stall_s) for o in started if isinstance(o, InstanceOptions)] == [
        (0.05, None),
        (None, 1e-4),
    ]


@pytest.mark.parametrize("required", ["mapped", "tcp"])
def test_what_is_required_is_all_that_its_instances_have(
    required: Transport, tmp_path: Path, started: list[GatewayOptions | InstanceOptions]
) -> None:
    children = plan(replace(OPTIONS, require_provider=required), tmp_path)
    for name in ("prefiller-0", "decoder-0"):
        start(children[name])
    assert [o.transports for o in started if isinstance(o, InstanceOptions)] == [(required,)] * 2


@pytest.mark.parametrize("command", ["prefiller", "decoder"])
def test_an_instance_listens_at_every_address_that_it_was_given(
    command: str, started: list[GatewayOptions | InstanceOptions]
) -> None:
    hosts = ("--fabric-host", "10.0.0.1", "--fabric-host", "10.0.1.1", "--insecure")
    assert run([command, "--model", "/models/tiny", *hosts, "--transports", "tcp, mapped"]) == 0
    assert run([command, "--model", "/models/tiny", "--require-provider", "mapped"]) == 0
    assert [(o.fabric_hosts, o.transports) for o in started if isinstance(o, InstanceOptions)] == [
        (("10.0.0.1", "10.0.1.1"), ("mapped", "tcp")),
        (("127.0.0.1",), ("mapped",)),
    ]


def test_a_provider_that_contradicts_ends_it_before_anything_starts() -> None:
    with pytest.raises(InputError, match=r"^require_provider: must be one of --transports \(mapped\), is tcp$"):
        serve(replace(OPTIONS, transports=("mapped",), require_provider="tcp"))


@pytest.mark.parametrize(
    "given",
    [
        {"prefillers": 1},
        {"prefiller_tp": 1},
        {"transfer": "layers"},
        {"verify_kv": True},
        {"transports": ()},
        {"require_provider": "tcp"},
        {"local_prefill": "needed"},
    ],
)
def test_an_option_that_would_do_nothing_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(given))}: must be left out with --colocated"):
        serve(replace(OPTIONS, colocated=True, **given))


@pytest.mark.parametrize(
    ("degrees", "refused"),
    [
        ({"prefiller_tp": 2}, "^prefiller_tp: must divide the model's 3 KV heads"),
        ({"decoder_tp": 6}, "^decoder_tp: must divide the model's 9 attention heads"),
    ],
)
def test_ranks_that_cannot_share_the_model_are_refused_by_the_option_before_anything_starts(
    degrees: dict[str, int], refused: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(known_config("smollm2-135m-instruct")))
    monkeypatch.setattr("headrace.cli.serve.fetch_model", lambda name: tmp_path)
    with pytest.raises(InputError, match=refused):
        serve(replace(OPTIONS, **degrees))


def test_each_instance_gets_cpus_of_its_own(tmp_path: Path) -> None:
    children = plan(replace(OPTIONS, threads=2, decoders=2, cpus=(5, 4, 0, 1, 2, 3)), tmp_path)
    assert "--cpus" not in children["gateway"].command
    cpus = [child.command[child.command.index("--cpus") + 1] for child in list(children.values())[1:]]
    assert cpus == ["5,4", "0,1", "2,3"]


def test_each_rank_has_cpus_of_its_own(tmp_path: Path) -> None:
    children = plan(replace(OPTIONS, threads=1, prefiller_tp=2, decoder_dp=2, cpus=(3, 2, 0, 1)), tmp_path)
    cpus = [child.command[child.command.index("--cpus") + 1] for child in list(children.values())[1:]]
    assert cpus == ["3,2", "0,1"]


@pytest.mark.parametrize("cpus", [(0,), (0, 1, 2)])
def test_cpus_are_as_many_as_threads(cpus: tuple[int, ...]) -> None:
    with pytest.raises(
        InputError, match=f"^cpus: must be one for each of 2 ranks of 1 threads, 2 in all, are {len(cpus)}$"
    ):
        serve(replace(OPTIONS, threads=1, cpus=cpus))


def test_a_cpu_that_is_not_ours_is_refused() -> None:
    with pytest.raises(InputError, match="^cpus: must be CPUs that this process may use, 1023 is none$"):
        serve(replace(OPTIONS, threads=1, colocated=True, cpus=(1023,)))


def test_a_person_can_paste_the_curl_line() -> None:
    told = greeting("127.0.0.1", 9000, "it's tiny")
    command = shlex.split(told[told.index("curl") :].replace("\\\n", ""))
    assert command[:2] == ["curl", "http://127.0.0.1:9000/v1/chat/completions"]
    assert '"model": "it\'s tiny"' in command[-1]
    assert "Ctrl-C" in told


def test_a_person_is_told_how_kv_travels_where_it_does() -> None:
    told = described_split(replace(OPTIONS, prefillers=2, decoders=1))
    assert told == "KV goes from 2 prefillers to 1 decoder over mapped.\n"
    assert described_split(replace(OPTIONS, decoders=3, transports=("tcp",))).endswith("to 3 decoders over tcp.\n")
    told_of_ranks = described_split(replace(OPTIONS, prefiller_tp=4, decoders=2, decoder_dp=2))
    assert told_of_ranks == "KV goes from 1 prefiller of 4 ranks to 2 decoders of 2 ranks over mapped.\n"
    assert described_split(replace(OPTIONS, colocated=True)) == ""
    assert f"Ctrl-C ends it.\n{told}To try:\n" in greeting("127.0.0.1", 9000, "tiny", split=told)


def test_where_it_listens_everywhere_it_is_asked_here() -> None:
    assert [reachable_host(host) for host in ("0.0.0.0", "::", "10.0.0.1")] == ["127.0.0.1", "::1", "10.0.0.1"]
    assert "http://[::1]:9000/v1" in greeting("::1", 9000, "tiny")
