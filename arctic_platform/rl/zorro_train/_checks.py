"""The form of our complaints: one sentence that says what, where and what to do."""


def need(condition: bool, text: str) -> None:
    """A rule on the caller's arguments; ValueError when it is broken."""
    if not condition:
        raise ValueError(f"[zorro] {text}")


def refuse(condition: bool, text: str) -> None:
    """What is understood and not available here; NotImplementedError."""
    if condition:
        raise NotImplementedError(f"[zorro] {text}")
