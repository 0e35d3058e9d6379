"""How a peer is reached: told when it is ready, with a warning where better was to be expected, or why not at all."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from role_world import World, in_world
from scripted_gateway import until
from tiny_checkpoint import Reference, prompt

from headrace.fabric.native import PROVIDERS
from headrace.roles.options import Transport
from headrace.roles.reached import transport_of, why_no_better

ALL: tuple[Transport, ...] = ("mapped", "efa", "verbs", "tcp")
NEITHER = "it is on this host, but without mapped and shm, or another user's, or in another network namespace"
NOT_MAPPED = "it is on this host, but without mapped, or another user's, or in another network namespace"


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "headrace.roles"):
        yield caplog


def lines(told: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in told.records if record.levelno == level]


def test_a_transport_is_called_as_the_options_call_it() -> None:
    assert (transport_of("mapped"), transport_of("shm")) == ("mapped", "shm")
    assert {transport_of(provider): provider for provider in PROVIDERS.values()} == PROVIDERS


@pytest.mark.parametrize(
    ("transport", "ours", "is_here", "why"),
    [
        ("mapped", ALL, True, ""),
        ("tcp", ALL, True, NOT_MAPPED),
        ("efa", ALL, True, NOT_MAPPED),
        ("efa", ALL, False, ""),
        ("verbs", ALL, False, "it has no efa, which we have"),
        ("tcp", ALL, False, "it has no efa or verbs, which we have"),
        ("tcp", ("mapped", "tcp"), False, ""),
        ("tcp", ("mapped", "tcp"), True, NOT_MAPPED),
        ("tcp", ("tcp",), True, ""),
        ("tcp", ("mapped", "shm", "tcp"), True, NEITHER),
        ("shm", ("mapped", "shm", "tcp"), True, NOT_MAPPED),
        ("tcp", ("mapped", "shm", "tcp"), False, ""),
    ],
)
def test_what_falls_back_says_why(transport: Transport, ours: Sequence[Transport], is_here: bool, why: str) -> None:
    assert why_no_better(transport, ours, is_here=is_here) == why


@pytest.mark.parametrize("transports", [("mapped", "tcp"), ("tcp",)])
def test_both_sides_tell_how_the_other_is_reached(
    transports: tuple[Transport, ...],
    told: pytest.LogCaptureFixture,
    checkpoint: Path,
    tmp_path: Path,
    reference: Reference,
) -> None:
    @in_world
    async def play(world: World) -> None:
        world.transport = transports[0]
        prefiller = await world.prefiller(transports=transports)
        decoder = await world.decoder(prefiller, transports=transports)
        assert set(lines(told, logging.INFO)) >= {
            f"prefiller {prefiller.uuid} is ready over {transports[0]}",
            f"decoder {decoder.uuid} is ready over {transports[0]}",
        }
        assert lines(told, logging.WARNING) == []

    play(checkpoint, tmp_path, reference)


def test_the_one_that_falls_back_warns(
    told: pytest.LogCaptureFixture, checkpoint: Path, tmp_path: Path, reference: Reference
) -> None:
    @in_world
    async def play(world: World) -> None:
        world.transport = "tcp"
        prefiller = await world.prefiller(transports=("tcp",))
        decoder = await world.decoder(prefiller, transports=("mapped", "tcp"))
        assert lines(told, logging.WARNING) == [f"prefiller {prefiller.uuid} is ready over tcp: {NOT_MAPPED}"]
        assert f"decoder {decoder.uuid} is ready over tcp" in lines(told, logging.INFO)

    play(checkpoint, tmp_path, reference)


def test_a_peer_without_a_transport_in_common_is_told_of_once_and_never_asked(
    told: pytest.LogCaptureFixture,
    checkpoint: Path,
    tmp_path: Path,
    reference: Reference,
) -> None:
    @in_world
    async def play(world: World) -> None:
        prefiller = await world.prefiller(transports=("tcp",))
        decoder = await world.decoder(transports=("mapped",))
        world.gateway.name_prefillers(decoder.uuid, prefiller.uuid)
        await until(lambda: bool(lines(told, logging.WARNING)), "it is told")
        for seed in (1, 2):
            asked = await world.gateway.generate_remotely(decoder.uuid, prefiller.uuid, prompt(9, seed=seed), 3)
            assert not await world.gateway.accepted(asked)
            assert await asked.text() == world.reference.text(prompt(9, seed=seed), 3)
        assert lines(told, logging.WARNING) == [
            f"prefiller {prefiller.uuid} cannot be greeted: address: no transport in common: ours are mapped, "
            "the peer's tcp;ofi_rxm"
        ]

    play(checkpoint, tmp_path, reference)
