"""Texts of the command line: what each parser takes, and what it says to the rest."""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer import BadParameter

from headrace.cli.values import (
    UNITS,
    CpuNumbers,
    TransportNames,
    cpu_list,
    in_units,
    one_of,
    plain_name,
    seconds,
    size_in_bytes,
    transport_list,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1073741824", 1 << 30),
        ("1", 1),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("512 MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("0.5GiB", 512 << 20),
        ("1.5kB", 1500),
        ("0.0000001TB", 100_000),
        ("7B", 7),
        (536870912, 512 << 20),  # a default
    ],
)
def test_a_size_is_bytes_or_has_a_unit(text: object, num_bytes: int) -> None:
    assert size_in_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "0", "-1", "MiB", "5XB", "1e9", "0.1B", "1,000", "512M", "1 2", "٣MiB", "nan"])
def test_another_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(BadParameter) as raised:
        size_in_bytes(text)
    assert raised.value.message == f"must be a size such as 512MiB, 2GB or 1073741824, is {text!r}"


@given(st.integers(1, 2**50), st.sampled_from(sorted(UNITS)))
def test_a_size_comes_back_from_its_text(number: int, unit: str) -> None:
    num_bytes = number * UNITS[unit]
    assert size_in_bytes(in_units(num_bytes)) == num_bytes == size_in_bytes(f"{number}{unit}")


def test_a_size_is_shown_in_its_largest_whole_unit() -> None:
    assert [in_units(n) for n in (1, 1000, 1024, 512 << 20, 3 << 29)] == ["1B", "1KB", "1KiB", "512MiB", "1536MiB"]


def test_a_whole_number_lies_within_its_limits() -> None:
    assert [whole_number(least=1)(text) for text in ("1", " 70 ", 16)] == [1, 70, 16]
    assert whole_number(least=0, most=65535)("65535") == 65535


@pytest.mark.parametrize("text", ["0", "4", "-1", "2.0", "x", "", "1_000", "²", "9" * 5000])
def test_another_number_is_refused_with_the_limits(text: str) -> None:
    with pytest.raises(BadParameter) as raised:
        whole_number(least=1, most=3)(text)
    assert raised.value.message == f"must be a whole number from 1 to 3, is {text!r}"


def test_without_an_upper_limit_the_lower_one_is_named() -> None:
    with pytest.raises(BadParameter, match="must be a whole number of at least 2, is '1'"):
        whole_number(least=2)("1")


def test_seconds_are_above_zero_and_finite() -> None:
    assert [seconds(text) for text in ("0.5", "600", 600.0)] == [0.5, 600, 600]
    for text in ("0", "-1", "nan", "inf", "1e7", "x", ""):
        with pytest.raises(BadParameter, match="must be a number of seconds, at most 1,000,000, is"):
            seconds(text)


def test_a_choice_is_one_of_a_few() -> None:
    parse = one_of("bf16", "fp32")
    assert parse("fp32") == "fp32"
    with pytest.raises(BadParameter, match="must be bf16 or fp32, is 'BF16'"):
        parse("BF16")


@pytest.mark.parametrize("text", ["", "a b", "a\nb", "a\x1b[31m", "x" * 257, "a\u2028b"])
def test_a_name_that_would_break_a_log_line_is_refused(text: str) -> None:
    assert plain_name("decoder-0/é") == "decoder-0/é"
    with pytest.raises(BadParameter, match="must be 1 to 256 visible characters without spaces"):
        plain_name(text)


@pytest.mark.parametrize("parse", [size_in_bytes, whole_number(least=1), seconds, transport_list])
@given(text=st.text())
def test_any_text_is_a_value_or_refused(parse: Callable[[object], object], text: str) -> None:
    with contextlib.suppress(BadParameter):
        parse(text)


def test_cpus_are_numbers_and_ranges_in_their_order() -> None:
    assert [cpu_list(text).numbers for text in ("0", "3,0-1", " 2 - 2")] == [(0,), (3, 0, 1), (2,)]
    assert cpu_list(CpuNumbers((4, 5))) == CpuNumbers((4, 5))


@pytest.mark.parametrize("text", ["", ",", "0,", "a", "-1", "3-1", "0-1024", "1.5", "0 1"])
def test_other_cpus_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadParameter, match="^must be CPU numbers such as 0,2-5, is "):
        cpu_list(text)


def test_a_cpu_that_is_named_twice_is_refused() -> None:
    with pytest.raises(BadParameter, match="^must name each CPU once, is '1,0-1'$"):
        cpu_list("1,0-1")


def test_transports_are_a_list_or_auto() -> None:
    texts = ("auto", "mapped", "tcp, mapped", "efa,verbs")
    assert [transport_list(text).names for text in texts] == [(), ("mapped",), ("tcp", "mapped"), ("efa", "verbs")]
    assert transport_list(TransportNames(("tcp",))) == TransportNames(("tcp",))


@pytest.mark.parametrize("text", ["", ",", "mapped,", "sm2", "TCP", "auto,tcp", "mapped tcp"])
def test_other_transports_are_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(
        BadParameter, match="^must be auto or a list such as mapped,tcp of mapped, shm, efa, verbs, tcp, is "
    ):
        transport_list(text)


def test_a_transport_that_is_named_twice_is_refused() -> None:
    with pytest.raises(BadParameter, match="^must name each transport once, is 'tcp,tcp'$"):
        transport_list("tcp,tcp")
