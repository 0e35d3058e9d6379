"""Every move that the world of a ticket can make: `enabled` lists them as (label, fair, act).

Fair moves are what happens in the end by itself: loops take what was told, engines and NICs go on, timers fire,
heartbeats notice. The others are the adversary's: faults (at most `num_faults` of them), a stopped process that wakes
up, the imm of a voided write. Nothing may depend on those.
"""

from collections.abc import Callable, Iterator
from functools import partial

from ticket_world import TO_PREFILLER, Message, World

from headrace.messenger import life
from headrace.messenger.life import DecoderEvent, PrefillerEvent

Label = tuple[object, ...]
Move = tuple[Label, bool, Callable[[World], None]]

# The world may go on before a loop carries out one of these. The others follow at once on what is before them. Nothing
# is lost by that: a page freed, a source released or a message sent without delay only allows more.
DELAYED_EFFECTS = {"ARM", "RETARGET", "REVOKE_PEER", "CLOSE_LIST", "DROP_JOB"}


def enabled(w: World) -> Iterator[Move]:
    yield from decoder_moves(w)
    if w.prefiller == "alive":
        yield from prefiller_moves(w)
        yield from engine_moves(w)
    yield from wire_moves(w)
    yield from adversary_moves(w)


# ---- the decoder's loop ----------------------------------------------------------------------------------------


def decoder_moves(w: World) -> Iterator[Move]:
    if not w.decoder_alive:
        if w.settings.restart and w.process == 0:
            yield ("a new decoder process",), True, restart
        return
    if w.near_effects:
        yield ("decoder", *w.near_effects[0]), True, decoder_effects
        if w.settings.lingers and w.near_effects[0][1] == "REVOKE_PEER":
            yield ("decoder", *w.near_effects[0], "lingers"), False, partial(decoder_effects, lingers=True)
        return
    if w.ending and w.prefiller != "hung":
        yield ("the prefiller has let go or is gone: Revoked",), True, end_access
    for i, ticket in enumerate(w.tickets):
        if ticket.near == "WAITING":
            if may_open(w, i):
                yield ("request accepted", i), True, partial(accept, i=i)
        elif ticket.near != "CLOSED" and w.lives(ticket):
            yield from ticket_moves(w, i)
    for message in dict.fromkeys(w.net):
        if message[0] not in TO_PREFILLER:
            yield ("decoder takes", *message), True, partial(take_at_decoder, message=message)
    if w.prefiller != "alive" and not w.ending and any(t.is_open and t.session == w.session for t in w.tickets):
        yield ("heartbeats lost: revoke",), True, revoke
        if w.settings.lingers:
            yield ("heartbeats lost: revoke", "lingers"), False, partial(revoke, lingers=True)


def ticket_moves(w: World, i: int) -> Iterator[Move]:
    ticket = w.tickets[i]
    if ticket.near == "NEW":
        yield ("open", i), True, partial(decide, i=i, event=DecoderEvent.OPENED)
    if i in w.settings.cancelled:
        yield ("abort or deadline", i), True, partial(decide, i=i, event=DecoderEvent.CANCEL)
    if ticket.reached:
        yield ("Reached taken", i, ticket.reached[0]), True, partial(take_reached, i=i)
    if ticket.surplus:
        yield ("Surplus taken", i), True, partial(take_surplus, i=i)
    if ticket.digests:
        yield ("digests compared", i), True, partial(take_digests, i=i)
    if ticket.lost_timer and w.settings.timers:
        yield ("lost timer", i), True, partial(fire, i=i, timer="lost_timer", event=DecoderEvent.LOST_TIMER)
    if may_repeat(w, i):
        yield ("sent again", i), True, partial(decide, i=i, event=DecoderEvent.REPEAT_TIMER)
    if ticket.patience and w.settings.timers:
        yield ("patience", i), True, partial(fire, i=i, timer="patience", event=DecoderEvent.PATIENCE)


def may_repeat(w: World, i: int) -> bool:
    """The timer fires again and again. Its bound keeps the world finite; to be fair it must not count firings, for
    the last one could be wasted on a message that was not lost."""
    kind = {"OPEN": "Prefill", "CANCELLING": "Cancel"}.get(w.tickets[i].near)
    num_copies = sum(message[0] == kind and message[1] == i for message in w.net)
    num_answers = sum(message[0] not in TO_PREFILLER and message[1] == i for message in w.net)
    return kind is not None and max(num_copies, num_answers) < w.settings.repeats


def may_open(w: World, i: int) -> bool:
    """Requests come one after the other; a later one takes the slot and the pages of the one before."""
    if w.ending or w.heard[w.process] != w.session or w.prefiller != "alive":  # Hello was not answered
        return False
    before = w.tickets[i - 1] if i else None
    if before is None or not w.lives(before):
        return before is None or before.near != "WAITING"
    return before.near == "CLOSED" and before.target is None and before.pages in ("free", "kept")


def accept(w: World, i: int) -> None:
    ticket = w.tickets[i]
    ticket.near, ticket.pages, ticket.lease = "NEW", "held", "granted"
    ticket.process, ticket.session = w.process, w.session


def decoder_effects(w: World, lingers: bool = False) -> None:
    w.decoder_effect(lingers=lingers)
    decoder_goes_on(w)


def decoder_goes_on(w: World) -> None:
    while w.near_effects and w.near_effects[0][1] not in DELAYED_EFFECTS:
        w.decoder_effect()


def prefiller_effects(w: World) -> None:
    w.prefiller_effect()
    prefiller_goes_on(w)


def prefiller_goes_on(w: World) -> None:
    while w.far_effects and w.far_effects[0][1] not in DELAYED_EFFECTS:
        w.prefiller_effect()


def decide(w: World, i: int, event: DecoderEvent) -> None:
    w.decoder_event(i, event)
    if w.near_effects and not (w.settings.lingers and w.near_effects[0][1] == "REVOKE_PEER"):
        decoder_effects(w)


def decide_far(w: World, i: int, event: PrefillerEvent) -> None:
    w.prefiller_event(i, event)
    if w.far_effects:
        prefiller_effects(w)


def revoke(w: World, lingers: bool = False) -> None:
    w.revoke(lingers=lingers)
    decoder_goes_on(w)


def end_access(w: World) -> None:
    w.end_access()
    decoder_goes_on(w)


def take_reached(w: World, i: int) -> None:
    ticket = w.tickets[i]
    arrivals, *rest = ticket.reached
    ticket.reached = tuple(rest)
    assert ticket.target is not None
    decide(w, i, life.reached(arrivals=arrivals, target=ticket.target))


def take_surplus(w: World, i: int) -> None:
    w.tickets[i].surplus = False
    decide(w, i, DecoderEvent.CONTRADICTED)


def take_digests(w: World, i: int) -> None:
    ticket = w.tickets[i]
    ticket.digests = False
    intact = not ticket.bad and sum(write[0] == "l" for write in ticket.writes) == w.settings.expected
    decide(w, i, DecoderEvent.DIGESTS_EQUAL if intact else DecoderEvent.DIGESTS_DIFFER)


def fire(w: World, i: int, timer: str, event: DecoderEvent) -> None:
    setattr(w.tickets[i], timer, False)
    decide(w, i, event)


def take_at_decoder(w: World, message: Message) -> None:
    remove(w, message)
    kind, i, num_posted = message
    ticket, expected = w.tickets[i], w.settings.expected
    if not w.lives(ticket) or ticket.near in ("WAITING", "CLOSED"):
        return  # looked up by ticket: another process's, or closed
    if kind == "Refused" and ticket.known in (None, 0) and not w.settings.refused_is_counted:
        decide(w, i, DecoderEvent.REVOKED)  # the row that gives the pages back
        return
    guard = life.closed if kind == "Closed" else life.told
    event = guard(num_posted=num_posted, known=ticket.known, expected=expected)
    if event in (DecoderEvent.TOLD, DecoderEvent.CLOSED_TOLD):
        ticket.known = num_posted
    decide(w, i, event)


def remove(w: World, message: Message) -> None:
    net = list(w.net)
    net.remove(message)
    w.net = tuple(net)


def restart(w: World) -> None:
    w.decoder_alive, w.process = True, 1
    w.session += 1


# ---- the prefiller's loop --------------------------------------------------------------------------------------


def prefiller_moves(w: World) -> Iterator[Move]:
    if w.far_effects:
        yield ("prefiller", *w.far_effects[0]), True, prefiller_effects
        return
    for message in dict.fromkeys(w.net):
        if message[0] in TO_PREFILLER:
            yield ("prefiller takes", *message), True, partial(take_at_prefiller, message=message)
    if w.decoder_alive and w.heard[w.process] < w.session:
        yield ("Hello answered",), True, take_hello
    if w.noticed < (w.process if w.decoder_alive else w.process + 1) - 1:
        yield ("exit of the decoder noticed",), True, notice_exit
    for i, ticket in enumerate(w.tickets):
        if ticket.list in ("complete", "closed") and not ticket.done and all(x[1] != "o" for x in ticket.writes):
            yield ("TransferDone taken", i), True, partial(take_transfer, i=i)
        if ticket.step_failed:
            yield ("failed step taken", i), True, partial(take_failed_step, i=i)
        elif ticket.job == "leaving":
            yield ("engine left", i), True, partial(take_engine_left, i=i)
        if ticket.lease == "granted" and w.settings.leases:
            yield ("lease expires", i), True, partial(expire_lease, i=i)
        if i in w.settings.cancelled and ticket.far in ("OPEN", "SENDING"):
            yield ("deadline at the prefiller", i), True, partial(decide_far, i=i, event=PrefillerEvent.DEADLINE)


def take_at_prefiller(w: World, message: Message, no_room: bool = False) -> None:
    kind, i, _ = message
    remove(w, message)
    ticket = w.tickets[i]
    if ticket.process <= w.noticed:
        return  # from a peer that was removed
    is_known = ticket.remembered or ticket.far not in ("UNSEEN", "DONE")
    is_new = not is_known and w.is_new(i)
    if kind == "Cancel":
        if is_known or is_new:  # else of an older epoch or use of the slot: over at the decoder
            decide_far(w, i, PrefillerEvent.CANCEL)
        return
    event = life.prefill(is_new=is_new, may_run=ticket.lease == "granted" and not no_room)
    if event is PrefillerEvent.PREFILL:
        ticket.lease = "used"
    if event is PrefillerEvent.PREFILL_STALE and not is_known and w.lives(ticket) and ticket.is_open:
        w.broken = w.broken or ("" if w.settings.order_wrapped else "a ticket that is open is answered as over")
    decide_far(w, i, event)


def take_hello(w: World) -> None:
    w.heard = (w.session, w.heard[1]) if w.process == 0 else (w.heard[0], w.session)
    for i, ticket in enumerate(w.tickets):
        if ticket.near != "WAITING" and ticket.session < w.session and ticket.process == w.process:
            ticket.remembered = False
            w.prefiller_event(i, PrefillerEvent.NEWER_EPOCH)
    prefiller_goes_on(w)


def notice_exit(w: World) -> None:
    """The process is gone: `remove_peer` gives up what is outstanding, then every ticket of it is told."""
    w.noticed += 1
    for i, ticket in enumerate(w.tickets):
        if ticket.near != "WAITING" and ticket.process == w.noticed:
            ticket.writes = tuple(sorted(x[0] + "e" if x[1] == "o" else x for x in ticket.writes))
            ticket.list = "closed" if ticket.list == "open" else ticket.list
            ticket.remembered = False
            w.prefiller_event(i, PrefillerEvent.TARGET_EXITED)
    prefiller_goes_on(w)


def take_transfer(w: World, i: int) -> None:
    ticket = w.tickets[i]
    ticket.done = True
    ticket.final = len(ticket.writes)
    num_failed = sum(write[1] == "e" for write in ticket.writes)
    decide_far(w, i, life.list_done(complete=ticket.list == "complete", num_failed=num_failed))


def take_failed_step(w: World, i: int) -> None:
    w.tickets[i].step_failed = False
    decide_far(w, i, PrefillerEvent.STEP_FAILED)


def take_engine_left(w: World, i: int) -> None:
    w.tickets[i].job = "left"
    decide_far(w, i, PrefillerEvent.ENGINE_LEFT)


def expire_lease(w: World, i: int) -> None:
    w.tickets[i].lease = "ended"


# ---- the prefiller's engine and its fabric's owner thread ------------------------------------------------------


def engine_moves(w: World) -> Iterator[Move]:
    for i, ticket in enumerate(w.tickets):
        if ticket.job == "queued":
            yield ("step begins", i, ticket.step), True, partial(begin_step, i=i)
        elif ticket.job in ("step", "dropping"):
            if ticket.ready < computed_after(w, ticket.step):
                yield ("step computed", i, ticket.step), True, partial(compute, i=i)
            else:
                yield ("step ends", i, ticket.step), True, partial(end_step, i=i)
        if ticket.list == "open" and len(ticket.writes) < ticket.ready:
            yield ("post", i, len(ticket.writes)), True, partial(post, i=i)
        for write in dict.fromkeys(ticket.writes):
            if write[1] == "o":
                yield ("completes", i, write), True, partial(become, i=i, old=write, new=write[0] + "c")
                if write[0] in "vw" or not w.lives(ticket):
                    yield ("error", i, write), False, partial(become, i=i, old=write, new=write[0] + "e")


def computed_after(w: World, step: int) -> int:
    """Writes whose bytes are there: one page each step, and with the last step all of them."""
    return w.settings.expected if step == w.settings.num_steps else step


def begin_step(w: World, i: int) -> None:
    w.tickets[i].job = "step"
    w.tickets[i].step += 1


def compute(w: World, i: int) -> None:
    w.tickets[i].ready = computed_after(w, w.tickets[i].step)


def end_step(w: World, i: int) -> None:
    ticket = w.tickets[i]
    ticket.job = "queued" if ticket.job == "step" and ticket.step < w.settings.num_steps else "leaving"


def fail_step(w: World, i: int) -> None:
    """The native call voids at once; the loop hears of it later."""
    ticket = w.tickets[i]
    ticket.job, ticket.step_failed = "leaving", True
    if ticket.list == "open":
        ticket.list = "closed"


def post(w: World, i: int) -> None:
    w.post(w.tickets[i])


def become(w: World, i: int, old: str, new: str) -> None:
    w.tickets[i].move_write(old, new)


def fail_write(w: World, i: int, write: str) -> None:
    become(w, i, write, write[0] + "e")
    if not w.settings.errors_are_final:
        post(w, i)


# ---- the wire --------------------------------------------------------------------------------------------------


def wire_moves(w: World) -> Iterator[Move]:
    for i, ticket in enumerate(w.tickets):
        for write in dict.fromkeys(ticket.writes):
            where, writer = write
            if where == "f" and w.settings.halves:
                yield ("lands by half", i, write), True, partial(become, i=i, old=write, new="h" + writer)
            elif where in "fh":
                yield ("lands", i, write), True, partial(land, i=i, write=write)
            elif where == "v" and w.counted_by(i):
                yield ("voided imm arrives", i, write), False, partial(arrive_void, i=i, write=write)
            if where in "fh" and w.prefiller == "dead":
                yield ("dies with its writer", i, write), False, partial(become, i=i, old=write, new="x" + writer)


def land(w: World, i: int, write: str, bad: bool = False) -> None:
    ticket = w.tickets[i]
    ticket.move_write(write, "l" + write[1])
    ticket.bad = ticket.bad or bad
    if w.decoder_alive and not w.lives(ticket):
        w.broken = "a write lands in a process that never asked for it"
    w.arrive(i)


def arrive_void(w: World, i: int, write: str) -> None:
    w.tickets[i].move_write(write, "w" + write[1])
    w.arrive(i)


# ---- faults ----------------------------------------------------------------------------------------------------


def adversary_moves(w: World) -> Iterator[Move]:
    if w.prefiller == "hung":
        yield ("the prefiller wakes",), False, wake
    if not w.faults_left:
        return
    for kind, label, act in faults(w):
        if kind in w.settings.faults:
            yield label, False, partial(spend, act=act)


def spend(w: World, act: Callable[[World], None]) -> None:
    w.faults_left -= 1
    act(w)


def faults(w: World) -> Iterator[tuple[str, Label, Callable[[World], None]]]:
    for message in dict.fromkeys(w.net):
        yield "message lost", ("message lost", *message), partial(remove, message=message)
        yield "message doubled", ("message doubled", *message), partial(double, message=message)
        if message[0] == "Prefill" and w.prefiller == "alive" and not w.far_effects:
            refuse = partial(take_at_prefiller, message=message, no_room=True)
            yield "no room", ("prefiller has no room for", *message), refuse
    if w.prefiller == "alive":
        yield "hang", ("the prefiller is stopped",), stop
    if w.prefiller != "dead":
        yield "death", ("the prefiller dies",), die
    if w.decoder_alive and w.process == 0:
        yield "decoder death", ("the decoder dies",), decoder_dies
    is_revocable = w.decoder_alive and not w.ending and not w.near_effects
    if is_revocable and any(w.lives(t) and t.is_open for t in w.tickets):
        yield "revoke", ("another ticket causes a revoke",), revoke
        if w.settings.lingers:
            yield "revoke", ("another ticket causes a revoke", "lingers"), partial(revoke, lingers=True)
    for i, ticket in enumerate(w.tickets):
        yield from ticket_faults(w, i)
        if ticket.near in ("OPEN", "VERIFYING", "CANCELLING", "DRAINING"):
            for forged in lies(w, i):
                yield "breach", ("forged", *forged), partial(double, message=forged)


def lies(w: World, i: int) -> list[Message]:
    """Those that can be noticed. Refused, or too small a number, before anything arrived is believed."""
    expected = w.settings.expected
    refused = [("Refused", i, 0)] if w.tickets[i].arrivals else []
    return [("Closed", i, expected - 1), ("Failed", i, expected + 1), *refused]


def ticket_faults(w: World, i: int) -> Iterator[tuple[str, Label, Callable[[World], None]]]:
    ticket = w.tickets[i]
    if w.prefiller == "alive" and ticket.job in ("step", "dropping"):
        yield "failed step", ("step fails", i, ticket.step), partial(fail_step, i=i)
    for write in dict.fromkeys(ticket.writes):
        if write[0] == ("h" if w.settings.halves else "f"):
            yield "wrong bytes", ("lands wrong", i, write), partial(land, i=i, write=write, bad=True)
        if write[0] in "fh":
            yield "write lost", ("lost", i, write), partial(become, i=i, old=write, new="x" + write[1])
        if write[1] == "o" and w.prefiller == "alive":
            yield "error", ("error", i, write), partial(fail_write, i=i, write=write)
            if write[0] in "fh":
                yield "error and lost", ("error and lost", i, write), partial(become, i=i, old=write, new="xe")


def double(w: World, message: Message) -> None:
    w.net = tuple(sorted((*w.net, message)))


def stop(w: World) -> None:
    w.prefiller = "hung"


def wake(w: World) -> None:
    w.prefiller = "alive"


def die(w: World) -> None:
    w.prefiller = "dead"
    w.net = tuple(m for m in w.net if m[0] not in TO_PREFILLER)
    w.far_effects = ()


def decoder_dies(w: World) -> None:
    """Its memory is gone, and what flies there falls into nothing unless a successor took over its key."""
    w.decoder_alive = w.ending = False
    w.near_effects = ()
    w.net = tuple(m for m in w.net if m[0] in TO_PREFILLER)
    for ticket in w.tickets:
        if ticket.is_open:
            ticket.near, ticket.pages, ticket.known, ticket.target = "CLOSED", "none", None, None
            ticket.arrivals, ticket.reached, ticket.surplus = 0, (), False
            ticket.digests = ticket.lost_timer = ticket.patience = False
    if w.settings.fresh_keys:
        for ticket in w.tickets:
            ticket.writes = tuple(sorted("x" + x[1] if x[0] in "fhv" else x for x in ticket.writes))
