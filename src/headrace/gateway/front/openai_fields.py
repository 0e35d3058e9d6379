"""Fields of a request body that may have several shapes, each parsed into one. Pure; raises WrongValue."""

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256

Prompt = str | list[int]


class WrongValue(ValueError):
    """Inside a field: `path` goes on from it ("[2].text")."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def parse_prompts(value: object) -> list[Prompt]:
    """A text, texts, token ids, or lists of them."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise WrongValue("", f"must be a text, token ids, or a list of either, is {shown(value)}")
    if isinstance(value[0], int):
        return [_parse_token_ids(value, "")]
    return [
        prompt if isinstance(prompt, str) else _parse_token_ids(prompt, f"[{nth}]") for nth, prompt in enumerate(value)
    ]


def _parse_token_ids(value: object, path: str) -> list[int]:
    if not isinstance(value, list):
        raise WrongValue(path, f"must be a text or token ids, is {shown(value)}")
    for nth, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise WrongValue(f"{path}[{nth}]", f"must be a token id, is {shown(token_id)}")
    return value


def parse_stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise WrongValue("", f"must be a text or up to {MAX_STOPS} of them, is {shown(value)}")
    for nth, stop in enumerate(stops):
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            path = "" if isinstance(value, str) else f"[{nth}]"
            raise WrongValue(path, f"must be a text of 1 to {MAX_STOP_CHARACTERS} characters, is {shown(stop)}")
    return tuple(stops)


def parse_content(value: object) -> str:
    """A text, or parts that are all text: each on a line of its own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise WrongValue("", f"must be a text or a list of text parts, is {shown(value)}")
    return "\n".join(_parse_part(part, f"[{nth}]") for nth, part in enumerate(value))


def _parse_part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise WrongValue(path, f'must be a part {{"type": "text", "text": ..}}, is {shown(part)}')
    if part.get("type") != "text":
        raise WrongValue(f"{path}.type", f"must be 'text', is {shown(part.get('type'))}: only text is supported")
    if other := next((name for name in part if name not in {"type", "text"}), None):
        raise WrongValue(f"{path}.{other}", "is not supported")
    text = part.get("text")
    if not isinstance(text, str):
        raise WrongValue(f"{path}.text", f"must be a text, is {shown(text)}")
    return text


def shown(value: object) -> str:
    """A value from outside, short enough for a message."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}.."
