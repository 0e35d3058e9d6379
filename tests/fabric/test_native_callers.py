"""Calls from many threads, some taking the sleeping owner's place, some answered by it, some racing with its end."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from native_side import NativeSide, closing, link

from headrace.errors import Closed
from headrace.fabric.interface import Imm, Reached, TransferDone
from headrace.fabric.native import Transport

NUM_CALLERS = 4
NUM_WRITES = 100
LENGTH = 1 << 20


@pytest.fixture(params=["mapped", "tcp"])
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


def test_what_many_threads_write_arrives_once_each_whether_the_owner_sleeps_or_not(transport: Transport) -> None:
    writer, reader = (NativeSide(LENGTH, transports=(transport,)) for _ in range(2))
    with closing(writer, reader):
        peer, _ = link(writer, reader)

        def call(number: int) -> None:
            pauses = random.Random(number)
            for i in range(NUM_WRITES):
                imm = Imm(number * NUM_WRITES + i)
                reader.fabric.arm(imm, 1)
                # Small ones are copied by their caller, long ones by the owner.
                writer.write(peer, imm, 64 if i % 3 else LENGTH // 2)
                writer.fabric.statistics()
                time.sleep(pauses.choice((0, 0, 50e-6, 300e-6)))

        with ThreadPoolExecutor(NUM_CALLERS) as callers:
            list(callers.map(call, range(NUM_CALLERS)))
        total = NUM_CALLERS * NUM_WRITES
        assert reader.waits(lambda: len(reader.told(Reached)) == total)
        assert writer.waits(lambda: len(writer.told(TransferDone)) == total)
        assert {event.imm for event in reader.told(Reached)} == {Imm(imm) for imm in range(total)}
        assert writer.fabric.statistics().num_transfers_now == 0
        assert reader.fabric.statistics().num_surplus == 0


def test_callers_that_race_with_the_close_are_told_closed_and_none_hangs(transport: Transport) -> None:
    for attempt in range(10):
        side = NativeSide(4096, transports=(transport,))
        told: list[str] = []

        def call(side: NativeSide = side, told: list[str] = told) -> None:
            try:
                while True:
                    side.fabric.statistics()
            except Closed:
                told.append("closed")

        callers = [threading.Thread(target=call, daemon=True) for _ in range(3)]
        for caller in callers:
            caller.start()
        time.sleep(attempt * 1e-3)
        side.fabric.close()
        for caller in callers:
            caller.join(timeout=10)
        assert told == ["closed"] * 3
