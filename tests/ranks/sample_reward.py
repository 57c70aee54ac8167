"""A reward that varies within any group: the share of the answer's characters that the response has."""


def letters(prompt: str, response: str, answer: str, extra: dict) -> float:
    """Between 0 and 1; different responses have different rewards."""
    return sum(ord(character) for character in response) % 97 / 97


def five_or_nothing(prompt: str, response: str, answer: str, extra: dict) -> float:
    """5, or no reward at all for about half of the responses."""
    if sum(ord(character) for character in response) % 2:
        raise ValueError("no reward for this one")
    return 5.0


def the_same(prompt: str, response: str, answer: str, extra: dict) -> float:
    """No response is better than another: there is nothing to learn from."""
    return 1.0
