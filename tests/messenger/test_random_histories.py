"""Ten thousand random histories end with every page free or rightly held, no ticket open, every request answered once.

`history` moves and checks; the seeds here are the whole input. The mutations show that the check sees what it is for.
"""

import os
from collections import Counter
from types import MappingProxyType

import pytest
from history import run_history

from headrace.messenger import decoder, prefiller
from headrace.messenger.life import (
    DECODER,
    PREFILLER,
    DecoderEffect,
    DecoderEvent,
    DecoderState,
    Move,
    PrefillerEffect,
    PrefillerEvent,
    PrefillerState,
)

NUM_HISTORIES = int(os.environ.get("HEADRACE_HISTORIES", "5000"))  # `make soak` asks for more
BLOCK = 250
assert NUM_HISTORIES >= BLOCK, "HEADRACE_HISTORIES must be at least 250"


@pytest.mark.parametrize("block", range(NUM_HISTORIES // BLOCK))
def test_every_history_ends_with_everything_given_back_and_everybody_answered(block: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        history = run_history(seed)
        for process in history.decoders:
            statistics = process.messenger.statistics()
            outcomes.update(statistics.num_failed, **{history.transfer: statistics.num_ready})
            outcomes[f"revoked {history.network.revocation}"] += statistics.num_revokes
    # What a block must have seen, or it has shown nothing.
    assert outcomes["layers"] > BLOCK / 2
    assert outcomes["whole"] > BLOCK / 8
    assert all(outcomes[reason] for reason in ("cancelled", "deadline", "refused", "failed", "peer_lost", "revoked"))
    assert all(outcomes[f"revoked {when}"] > BLOCK / 20 for when in ("at once", "when let go"))


D, P = DecoderState, PrefillerState
MUTATIONS = {
    "pages are freed when the cancel is sent": (
        "decoder",
        {(D.OPEN, DecoderEvent.CANCEL): (D.CLOSED, "SEND_CANCEL FREE_PAGES CLOSE ANSWER_FAILED")},
    ),
    "pages are freed when the prefiller says that it failed": (
        "decoder",
        {(D.OPEN, DecoderEvent.TOLD): (D.CLOSED, "FREE_PAGES CLOSE ANSWER_FAILED")},
    ),
    "what failed is answered and kept open": (
        "decoder",
        {(D.OPEN, DecoderEvent.TOLD): (D.OPEN, "ANSWER_FAILED")},
    ),
    "source pages are kept when all of them are written": (
        "prefiller",
        {(P.SENDING, PrefillerEvent.LIST_DONE): (P.SENDING, "SEND_CLOSED")},
    ),
    "a lost write is waited for": (
        "decoder",
        {(D.DRAINING, DecoderEvent.PATIENCE): (D.DRAINING, "")},
    ),
    "digests are taken for granted": (
        "decoder",
        {(D.VERIFYING, DecoderEvent.DIGESTS_DIFFER): (D.CLOSED, "KEEP_PAGES CLOSE ANSWER_READY")},
    ),
    "a cancel while verifying is forgotten": (
        "decoder",
        {(D.VERIFYING, DecoderEvent.CANCEL): (D.VERIFYING, "FREE_PAGES")},
    ),
    "pages are freed while access lingers": (
        "decoder",
        {(D.OPEN, DecoderEvent.ACCESS_ENDING): (D.CLOSED, "FREE_PAGES CLOSE ANSWER_FAILED")},
    ),
    "pages are kept though the access has ended": (
        "decoder",
        {(D.REVOKING, DecoderEvent.REVOKED): (D.REVOKING, "")},
    ),
    "a failed step does not end the job": (
        "prefiller",
        {(P.OPEN, PrefillerEvent.STEP_FAILED): (P.OPEN, "")},
    ),
    "source pages are released when the list is closed": (
        "prefiller",
        {(P.ENDED, PrefillerEvent.ENGINE_LEFT): (P.DONE, "RELEASE_SOURCE")},
    ),
    "a lease survives a cancel": (
        "prefiller",
        {(P.OPEN, PrefillerEvent.CANCEL): (P.ENDED, "CLOSE_LIST DROP_JOB SEND_CANCEL_ACK")},
    ),
    "a second copy of a Prefill is run": (
        "prefiller",
        {(P.OPEN, PrefillerEvent.PREFILL_STALE): (P.OPEN, "OPEN_LIST")},
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, changes = MUTATIONS[name]
    effects = DecoderEffect if side == "decoder" else PrefillerEffect
    moves = {
        key: Move(state, tuple(effects[effect] for effect in words.split())) for key, (state, words) in changes.items()
    }
    if side == "decoder":
        monkeypatch.setattr(decoder, "DECODER", MappingProxyType({**DECODER, **moves}))
    else:
        monkeypatch.setattr(prefiller, "PREFILLER", MappingProxyType({**PREFILLER, **moves}))
    for seed in range(600):
        try:
            run_history(seed)
        except Exception:  # noqa: BLE001 - however it shows
            return
    pytest.fail("600 histories saw nothing of it")
