"""What a request finds when it comes: the fleet as it stands for it, and whether it is let in. Owns nothing.

Runs on the gateway's loop. `admit` and `forecast` decide, and know no tables.
"""

from headrace.gateway.admit import require_in_time
from headrace.gateway.affinity import Prompt
from headrace.gateway.budgets import NO_BUDGET
from headrace.gateway.exchange import Exchange
from headrace.gateway.forecast import Fleet, Forecast
from headrace.gateway.generation import Generation
from headrace.gateway.line import Turn
from headrace.gateway.route import Wanted


def let_in(exchange: Exchange, generation: Generation, turn: Turn, *, max_tokens: int, now: float) -> Forecast | None:
    """-> what is predicted of it; None where it has no budget, for which nothing need be. Raises BudgetExceeded."""
    wanted = Wanted(num_tokens=len(generation.token_ids), max_tokens=max_tokens, tier=generation.tier)
    turn.num_tokens = wanted.num_prefilled
    if generation.budget == NO_BUDGET:
        return None
    fleet = fleet_for(exchange, Prompt(generation.token_ids), wanted, now)
    computing = fleet.prefillers or fleet.decoders
    turn.num_tokens -= min(wanted.num_prefilled, max((view.cached_tokens for view in computing), default=0))
    return require_in_time(fleet, wanted, generation.budget, exchange.line.ahead_of(turn))


def fleet_for(exchange: Exchange, prompt: Prompt, wanted: Wanted, now: float) -> Fleet:
    """As it stands for this prompt."""
    observed, streams = exchange.observed, exchange.streams
    return Fleet(
        decoders=observed.decoders(prompt),
        prefillers=observed.prefillers(prompt),
        transfers=observed.transfers(now),
        stay_s=streams.stay_s,
        tpot_s=streams.tpot_of(wanted.tier),
    )
