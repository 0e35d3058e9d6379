"""Which tier and which budgets a request has: by its key, its tier, its headers."""

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from http_front import MODEL, Front, a_front, make_intake

from headrace.errors import InputError
from headrace.gateway.budgets import NO_BUDGET, TPOT_HEADER, TTFT_HEADER, Budget, Terms, Tiers, digest_of
from headrace.gateway.intake import Intake

TIERS = Tiers(
    budgets={"interactive": Budget(ttft_s=0.5, tpot_s=0.05)},
    keys={digest_of("sk-batch"): "flex", digest_of("sk-person"): "interactive"},
)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_without_a_word_a_request_has_the_budget_of_its_tier() -> None:
    assert TIERS.terms({}, "interactive") == Terms(tier="interactive", budget=Budget(ttft_s=0.5, tpot_s=0.05))
    assert TIERS.terms({}, "flex") == Terms(tier="flex", budget=NO_BUDGET)


def test_a_header_takes_the_place_of_one_of_the_two() -> None:
    assert TIERS.terms({TTFT_HEADER: "250"}, "interactive").budget == Budget(ttft_s=0.25, tpot_s=0.05)
    assert TIERS.terms({TPOT_HEADER: "12.5"}, "interactive").budget == Budget(ttft_s=0.5, tpot_s=0.0125)
    assert TIERS.terms({TPOT_HEADER: "900"}, "flex").budget == Budget(ttft_s=None, tpot_s=0.9)


@pytest.mark.parametrize("name", [TTFT_HEADER, TPOT_HEADER])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e3", "fast", "600001", "0.0", "1,5"])
def test_what_is_no_budget_is_refused_by_the_headers_name(name: str, value: str) -> None:
    with pytest.raises(InputError, match="must be a number of milliseconds, at most 600,000, is ") as refused:
        TIERS.terms({name: value}, "flex")
    assert refused.value.field == name


def test_a_key_that_the_deployment_names_decides_the_tier_whatever_the_request_says() -> None:
    assert TIERS.terms(bearer("sk-batch"), "interactive") == Terms(tier="flex")
    assert TIERS.terms(bearer("sk-person"), "flex").tier == "interactive"


@pytest.mark.parametrize("authorization", ["Bearer sk-other", "Bearer", "", "Basic sk-batch", f"Bearer {TIERS}"])
def test_a_key_that_nobody_named_has_the_tier_that_it_asks_for(authorization: str) -> None:
    assert TIERS.terms({"authorization": authorization}, "flex").tier == "flex"
    assert TIERS.terms({"authorization": authorization}, "interactive").tier == "interactive"


# ---- over HTTP -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def intake(tmp_path_factory: pytest.TempPathFactory) -> Intake:
    return make_intake(tmp_path_factory.mktemp("model"))


@pytest.fixture
def front(intake: Intake) -> Iterator[Front]:
    with a_front(intake, tiers=TIERS) as front:
        front.says("and the mill turned.")
        yield front


def ask(front: Front, path: str, headers: dict[str, str], **body: Any) -> httpx2.Response:
    asked = {"prompt": "The water"} if path == "completions" else {"messages": [{"role": "user", "content": "Why?"}]}
    return front.ask("POST", f"/v1/{path}", json={"model": MODEL, **asked, **body}, headers=headers)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_an_answer_says_which_tier_was_used(front: Front, path: str) -> None:
    assert ask(front, path, {}).json()["service_tier"] == "default"
    assert ask(front, path, {}, service_tier="flex").json()["service_tier"] == "flex"
    assert ask(front, path, bearer("sk-batch"), service_tier="default").json()["service_tier"] == "flex"
    assert [asked.tier for asked in front.dispatch.asked] == ["interactive", "flex", "flex"]


def test_headers_reach_the_dispatch_side_whatever_their_case(front: Front) -> None:
    ask(front, "completions", {"X-Headrace-TTFT-ms": "250"})
    assert front.dispatch.asked[0].budget == Budget(ttft_s=0.25, tpot_s=0.05)


def test_a_wrong_header_is_a_400_that_names_it(front: Front) -> None:
    response = ask(front, "chat/completions", {TPOT_HEADER: "soon"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, TPOT_HEADER)
    assert front.dispatch.asked == []
