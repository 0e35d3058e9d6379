from pathlib import Path

import pytest

from headrace.bench.traces.reading import read_trace
from headrace.errors import InputError

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,0
2023-11-16 18:17:13.9799600,110,27
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1000, "input_length": 600, "output_length": 6, "hash_ids": [0, 9]}
{"timestamp": 4000, "input_length": 500, "output_length": 7, "hash_ids": [4]}
"""
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.8\n2015,156,2171,12.9\n"
SERVEGEN = """client,start_s,rate_rps,cv,pattern,param1,param2
0,0,0,0,,0,0
0,600,0.5,1.0,Gamma,1.0,2.0
1,0,0.1,1.0,Weibull,1.0,10.0
1,600,0,0,,0,0
"""
SERVEGEN_LENGTHS = """{"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 1.0}"},
"600": {"input_tokens": "{20: 0.5, 40: 0.5}", "output_tokens": "{4: 1.0}"},
"700": {"input_tokens": "{}", "output_tokens": "{}"}}"""


def written(folder: Path, text: str, name: str = "trace.csv") -> Path:
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "times", "lengths"),
    [
        (AZURE_2023, [0.0, 0.052, 10.0], [(4808, 10), (3180, 8), (110, 27)]),
        (AZURE_2024, [0.0, 0.007405], [(2162, 5), (2399, 6)]),
        (BURSTGPT, [0.0, 40.0], [(472, 18), (1087, 230)]),
        (VIDUR, [0.0, 1.0], [(3772, 54), (2015, 156)]),
    ],
)
def test_each_format_is_recognised_and_read(
    tmp_path: Path, text: str, times: list[float], lengths: list[tuple[int, int]]
) -> None:
    read = read_trace(written(tmp_path, text))
    assert [arrival.at_s for arrival in read.arrivals] == pytest.approx(times)
    assert [(arrival.prompt_tokens, arrival.max_tokens) for arrival in read.arrivals] == lengths
    assert read.name == "trace" and "trace.csv" in read.notes[0]


def test_requests_without_an_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, BURSTGPT)).notes[-1].startswith("1 requests without a prompt or an answer")


def test_a_part_of_a_trace_is_read_no_further_than_it_goes(tmp_path: Path) -> None:
    broken_behind = AZURE_2023 + "2023-11-16 19:00:00,nonsense,1\n"
    read = read_trace(written(tmp_path, broken_behind), begin_s=0.01, duration_s=5.0)
    assert [(arrival.at_s, arrival.prompt_tokens) for arrival in read.arrivals] == [(0.0, 3180)]
    assert len(read_trace(written(tmp_path, broken_behind), most=2).arrivals) == 2


def test_mooncakes_prefixes_are_kept_and_its_coarse_times_spread(tmp_path: Path) -> None:
    file = written(tmp_path, MOONCAKE, "conversation.jsonl")
    read = read_trace(file, seed=1)
    assert [arrival.blocks for arrival in read.arrivals] == [(0, 1), (0,), ()]  # whole blocks of 512 alone
    first, second, third = (arrival.at_s for arrival in read.arrivals)
    assert first == 0.0 and 0.0 < second < 3.0 and third <= 3.0
    assert read_trace(file, seed=1) == read and read_trace(file, seed=2) != read


def test_servegens_clients_come_at_their_rates_with_the_lengths_of_the_hour(tmp_path: Path) -> None:
    file = written(tmp_path, SERVEGEN, "some_clients.csv")
    with pytest.raises(InputError, match=r"must have its lengths beside it, in some_dataset\.json"):
        read_trace(file)
    written(tmp_path, SERVEGEN_LENGTHS, "some_dataset.json")
    read = read_trace(file)
    early = [arrival for arrival in read.arrivals if arrival.prompt_tokens == 10]
    late = [arrival for arrival in read.arrivals if arrival.prompt_tokens in {20, 40}]
    assert len(early) + len(late) == len(read.arrivals)
    assert 35 <= len(early) <= 90 and 230 <= len(late) <= 370  # 60 and 300 expected
    assert [arrival.at_s for arrival in read.arrivals] == sorted(arrival.at_s for arrival in read.arrivals)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r":1: must be the first line of one of: Azure \(TIMESTAMP,ContextTokens,GeneratedTokens\)"),
        ("when,what\n1,2\n", r":1: must be the first line of one of"),
        (AZURE_2023.replace("3180", "many"), r":3: must have a number as ContextTokens, has 'many'"),
        (AZURE_2023.replace("3180", "-3"), r":3: must have a number of tokens as ContextTokens, has -3"),
        (AZURE_2023.replace("2023-11-16 18:17:04.0319600", "noon"), r":3: must have a date and time as TIMESTAMP"),
        (AZURE_2023.replace(",3180,8", ""), r":3: must have a ContextTokens"),
        (MOONCAKE + "{}\n", r":4: must be a request of Mooncake's"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", r"must have requests from 0 s on, has none"),
        (SERVEGEN.replace("Weibull", "Cauchy"), r":4: must have Gamma, Weibull or nothing as pattern"),
    ],
)
def test_a_wrong_line_is_named_with_what_would_be_right(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_trace(written(tmp_path, text))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must be a trace file that is there"):
        read_trace(tmp_path / "none.csv")
