"""A reward that differs within a group of an untrained model's answers, so that one step has something to learn."""


def distinct_words(prompt: str, response: str, answer: str, extra: dict) -> float:
    """The share of the response's words that are distinct: between 0 and 1."""
    words = response.split()
    return len(set(words)) / len(words) if words else 0.0
